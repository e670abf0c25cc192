"""`python -m memjax`: what `memjax.explain` and `memjax.jit` say of a step, without a program around them."""

from memjax._commands.commands import run as run
