"""Training steps that others published, unchanged, at the size of a CPU."""

from benchmarks.cases.jit_public import of_flax, of_optax, of_others

CASES = of_flax.CASES | of_optax.CASES | of_others.CASES
