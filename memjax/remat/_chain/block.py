"""One block of a chain, traced once: run it, run it keeping what its backward pass needs, run it backwards.

Everything is a flat list of arrays. `p` are the leaves of the block's parameters and what it closes over, which exist anyhow.
`x` are the leaves of its input, which the chain holds for as long as they are needed. The block keeps the smallest set of values
from which its backward pass follows without repeating matrix products and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from memjax._core import check
from memjax._core.arrays import is_float, zeros
from memjax._core.backward import Backward
from memjax._core.backward.derivatives import Static, perturbed
from memjax._core.barriers import barrier
from memjax._core.lists import Arrays, drop, merge, pick, spread
from memjax._core.program.costs import device, program_seconds
from memjax._core.program.dataflow import is_literal, variables
from memjax._core.program.jaxpr import axis_sizes, calls_in_place, evaluate, nbytes, with_axes
from memjax._core.program.working import peak_bytes
from memjax._core.timing import seconds
from memjax._measure import remat_compiler_options
from memjax._plan.budget.digest import digest_of
from memjax._plan.memory.alone import bytes_of, compile_alone, constants, temporary
from memjax.remat._chain.solvers import BlockCost, Items, blocks_of


class Block:
    """`f(params, x) -> y`, or `-> (y, aux)`; float leaves of y carry gradients, aux does not.

    Attributes:
      jaxpr: of (p, x) to (y, aux).
      consts: values of what `f` closes over; with the leaves of the parameters behind them they are `p`.
      p, x, y, aux: types of the leaves.
      x_vars, y_vars: the variables of `jaxpr` that hold x and y.
      axes: sizes of the named axes that collectives of the block run over.
      y_tree, aux_tree: tree structures of the user's results.
      run: (p, x) to (y, aux), as a program that equal blocks share. It must not be differentiated.
      keep: (p, x) to (y, aux). Differentiating it keeps what the backward pass needs.
    """

    def __init__(self, f: Callable[..., Any], params: Any, x: Any, has_aux: bool):
        def with_aux(params, x):
            out = f(params, x)
            if not has_aux:
                return out, ()
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    f"with has_aux=True each block must return a pair (y, aux), got {jax.tree.structure(out)}"
                )
            return out[0], lax.stop_gradient(out[1])

        closed, (y, aux) = jax.make_jaxpr(with_aux, return_shape=True)(params, x)
        self.y_tree, self.aux_tree = jax.tree.structure(y), jax.tree.structure(aux)
        self.jaxpr, self.consts = closed.jaxpr, list(closed.consts)
        self.axes = axis_sizes(closed.jaxpr)
        n_params, n_y = len(jax.tree.leaves(params)), len(jax.tree.leaves(y))
        variables = [*self.jaxpr.constvars, *self.jaxpr.invars]
        self.n_p = len(self.consts) + n_params
        self.p = [var.aval for var in variables[: self.n_p]]
        self.x_vars, self.y_vars = variables[self.n_p :], self.jaxpr.outvars[:n_y]
        self.x = [var.aval for var in self.x_vars]
        self.y, self.aux = list(closed.out_avals[:n_y]), list(closed.out_avals[n_y:])
        self.y_float = [is_float(aval) for aval in self.y]
        # Cached on the block: a global cache would keep its constants alive.
        self._backwards: dict[tuple[bool, ...], Backward] = {}
        self.run = jax.jit(self.evaluate)
        self.keep = jax.custom_vjp(self.run)
        self.keep.defvjp(self._keep, self._back, symbolic_zeros=True)

    def _flat(self, inputs: Arrays) -> Arrays:
        n = len(self.consts)
        return evaluate(self.jaxpr, inputs[:n], inputs[n:], differentiable=True)

    def evaluate(self, p: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Evaluates the block inside the caller's trace; returns (y, aux)."""
        out = self._flat([*p, *x])
        return out[: len(self.y)], out[len(self.y) :]

    def handed_on(self, x_mask: Sequence[bool]) -> tuple[bool, ...]:
        """For each leaf of the output, whether it is a leaf of the input that `x_mask` marks."""
        marked = set(pick(self.x_vars, x_mask))
        return tuple(not is_literal(var) and var in marked for var in self.y_vars)

    def backward(self, wrt: tuple[bool, ...]) -> Backward:
        """The derivative of the block with respect to the leaves of (p, x) that `wrt` marks."""
        if wrt not in self._backwards:
            out_float = [*self.y_float, *[False] * len(self.aux)]
            backward = self._backwards[wrt] = Backward(self._flat, [*self.p, *self.x], wrt, out_float)
            # Programs of their own: equal blocks share them.
            backward.keep, backward.back = jax.jit(backward.keep), jax.jit(backward.back)  # type: ignore[method-assign]
        return self._backwards[wrt]

    def _keep(self, p: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
        wrt = perturbed([*p, *x])
        p, x = [leaf.value for leaf in p], [leaf.value for leaf in x]
        check.known_sizes("remat.chain", (p, x))
        out, kept = self.backward(wrt).keep([*p, *x])
        n = len(self.y)
        saved = barrier([*out[:n], *kept])  # these arrays are kept, and not others that the compiler prefers
        return (saved[:n], out[n:]), (Static(wrt), p, x, saved[n:])

    def _back(self, saved: Any, cts: Any) -> tuple[Arrays, Arrays]:
        wrt, p, x, kept = saved
        (p, x, kept), cts = _after(pick(cts[0], self.y_float), (p, x, kept))
        cts = barrier(with_axes(self.backward(wrt.value).back, self.axes)([*p, *x], kept, cts))  # none is put off
        cts = spread(cts, wrt.value)
        return cts[: self.n_p], cts[self.n_p :]


def _after(cts: Sequence[Any], values: Any) -> tuple[Any, Arrays]:
    """(values, cts): the values may only be used once the gradients are there, so nothing is recomputed early.

    Cotangents that are known to be zero become zeros.
    """
    is_zero = [isinstance(ct, SymbolicZero) for ct in cts]
    nonzero = drop(cts, is_zero)
    if nonzero:
        nonzero, values = barrier((nonzero, values))
    return values, merge([zeros(ct.aval) for ct in pick(cts, is_zero)], nonzero, is_zero)


# Blocks one after the other, differentiated by a schedule of whole blocks.


def run_items(
    items: Items, blocks: Sequence[Block], values: Mapping[int, Arrays], x: Arrays
) -> tuple[Arrays, list[Arrays]]:
    """Runs the blocks of `items` on the first one's input; returns (y, aux of each block). `values` are their `p`."""
    auxs: list[Arrays] = []
    for item in items:
        if isinstance(item, int):
            x, aux = blocks[item].keep(values[item], x)
            auxs.append(aux)
        else:
            x, more = _recomputed(item, blocks)({i: values[i] for i in blocks_of(item)}, x)
            auxs += more
    return x, auxs


def _recomputed(items: Items, blocks: Sequence[Block]) -> Callable[..., tuple[Arrays, list[Arrays]]]:
    """A function that runs the blocks of `items` and keeps only the input; its backward pass recomputes as `items` says."""

    def plain(values, x):
        auxs = []
        for i, p in values.items():
            x, aux = blocks[i].run(p, x)
            x = barrier(x)  # or the compiler sums residual branches up again in each block, and keeps them all
            auxs.append(aux)
        return x, auxs

    def forward(values, x):
        leaves, tree = jax.tree.flatten((values, x), is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
        arrays = [leaf.value for leaf in leaves]
        return plain(*jax.tree.unflatten(tree, arrays)), (Static((perturbed(leaves), tree)), arrays)

    def backward(saved, cts):
        (wrt, tree), arrays = saved[0].value, saved[1]
        mine = list(blocks_of(items))
        y_float = blocks[mine[-1]].y_float
        arrays, cts = _after(pick(cts[0], y_float), arrays)
        fixed = drop(arrays, wrt)

        def run(chosen):
            y, _ = run_items(items, blocks, *jax.tree.unflatten(tree, merge(chosen, fixed, wrt)))
            return pick(y, y_float)

        axes = {name: size for i in mine for name, size in blocks[i].axes.items()}
        pull_back = with_axes(lambda chosen, cts: jax.vjp(run, chosen)[1](cts)[0], axes)
        d_chosen = barrier(pull_back(pick(arrays, wrt), cts))
        return jax.tree.unflatten(tree, spread(d_chosen, wrt))

    group = jax.custom_vjp(plain)
    group.defvjp(forward, backward, symbolic_zeros=True)
    return group


# What a block costs: time from its operations or by the clock, working memory from compiling it by itself.

_MOST_COMPILED = 1024


def estimates(blocks: Sequence[Block]) -> list[BlockCost]:
    """Estimates the costs of the blocks of a chain, without running them."""
    keys = list(_with_handed_on(blocks))
    costs = {key: _estimate(*key) for key in dict.fromkeys(keys)}
    return [costs[key] for key in keys]


def measured(blocks: Sequence[Block], values: Sequence[Arrays], x: Arrays) -> list[BlockCost]:
    """Measures the costs of the blocks on the default device: compiles and times them for these arguments."""
    if any(isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) for leaf in jax.tree.leaves((values, x))):
        raise TypeError("measure=True runs the blocks: call chain_costs outside jit, with arrays as params and x")
    keys = list(_with_handed_on(blocks))
    costs: dict[Any, BlockCost] = {}
    for key, p in zip(keys, values, strict=True):
        if key not in costs:
            costs[key] = _measured(*key, p, x)
        x, _ = key[0].run(p, x)
    return [costs[key] for key in keys]


def _with_handed_on(blocks: Sequence[Block]) -> Iterator[tuple[Block, tuple[bool, ...]]]:
    """Yields each block, with flags for the leaves of its input that are leaves of the chain's input, handed on."""
    from_input = (True,) * len(blocks[0].x)
    for block in blocks:
        yield block, from_input
        from_input = block.handed_on(from_input)


def _estimate(block: Block, from_input: Sequence[bool]) -> BlockCost:
    """The cost of a block whose float inputs are all differentiated.

    Leaves of the chain's input, which `from_input` marks, cost nothing where the block hands them on as well.
    """
    backward = _whole_backward(block)
    cts = [aval for aval in block.y if is_float(aval)]
    run = jax.make_jaxpr(block.evaluate)(block.p, block.x)
    pull = jax.make_jaxpr(backward.back)([*block.p, *block.x], backward.kept, cts)
    forward, back = (calls_in_place(traced, differentiable=False) for traced in (run, pull))
    rates = device()
    works = _compiled_bytes(block, run, pull)
    if works is None:
        n_kept, n_dp = len(back.invars) - len(cts), len(back.outvars) - sum(map(is_float, block.x))
        backward_work = modelled_bytes(back, rates.platform, back.invars[n_kept:], back.outvars[n_dp:])
        works = modelled_bytes(forward, rates.platform), backward_work, 0
    times = program_seconds(forward, rates), program_seconds(back, rates)
    return BlockCost(*times, *_sizes(block, backward, from_input), *works)


def modelled_bytes(program: Any, platform: str, entering: Sequence[Any] = (), leaving: Sequence[Any] = ()) -> int:
    """The most bytes that a program without calls works with, without its inputs and outputs but those named."""
    counted = {*variables(entering), *variables(leaving)}
    elsewhere = variables([*program.constvars, *program.invars, *program.outvars])
    return peak_bytes(program.eqns, set(elsewhere) - counted, variables(entering), variables(leaving), [], platform)


def _measured(block: Block, from_input: Sequence[bool], p: Arrays, x: Arrays) -> BlockCost:
    backward = _whole_backward(block)
    options: dict[str, Any] = dict(remat_compiler_options())
    run = jax.jit(block.evaluate).lower(p, x).compile(compiler_options=options)
    out, kept = backward.keep([*p, *x])
    arguments = [*p, *x], kept, [jnp.ones_like(leaf) for leaf in out[: len(block.y)] if is_float(leaf)]
    back = backward.back.lower(*arguments).compile(compiler_options=options)  # type: ignore[attr-defined]  # jitted
    times = _fastest(run, p, x), _fastest(back, *arguments)
    return BlockCost(*times, *_sizes(block, backward, from_input), *_bytes(block, run, back))


def _whole_backward(block: Block) -> Backward:
    return block.backward(tuple(is_float(aval) for aval in (*block.p, *block.x)))


def _sizes(block: Block, backward: Backward, from_input: Sequence[bool]) -> tuple[int, int]:
    """Bytes of the output, and of what is kept, without leaves that are `from_input`."""
    exist = set(pick(block.x_vars, from_input))
    outputs = set(variables(block.y_vars)) - exist
    handed_on = sum(nbytes(var.aval) for var in outputs.intersection(block.jaxpr.invars))
    return sum(nbytes(var.aval) for var in outputs), backward.nbytes_with(len(block.y)) + handed_on


_compiled: dict[str, tuple[int, int, int] | None] = {}
"""Bytes by digest of the programs, which themselves would hold what blocks close over."""


def _compiled_bytes(block: Block, run: Any, pull: Any) -> tuple[int, int, int] | None:
    """As `_bytes`, for programs that are compiled here; None if they cannot be."""
    key = digest_of([run, pull], block.p, block.x, block.y, pull.in_avals, jax.default_backend())
    if key not in _compiled:
        programs = compile_alone(run), compile_alone(pull)
        if len(_compiled) == _MOST_COMPILED:
            _compiled.pop(next(iter(_compiled)))
        _compiled[key] = None if None in programs else _bytes(block, *programs)
    return _compiled[key]


def _bytes(block: Block, run: Any, pull: Any) -> tuple[int, int, int]:
    """Temporary bytes of the forward pass; of the backward pass, with the gradients of output and input; and of constants.

    These stand throughout. Constants of the same type in both passes are taken to be the same ones.
    """
    gradients = sum(nbytes(aval) for aval in (*block.x, *block.y) if is_float(aval))
    standing = [constants(program) for program in (run, pull)]
    works = [temporary(program) - bytes_of(types) for program, types in zip((run, pull), standing, strict=True)]
    return max(works[0], 0), max(works[1], 0) + gradients, bytes_of(standing[0] | standing[1])


def _fastest(run: Callable[..., Any], *arguments: Any) -> float:
    """The shortest of several runs after a first one."""
    return min([seconds(run, *arguments) for _ in range(8)][1:])
