"""Flax NNX modules that train in less memory: `RNN` for `nnx.RNN`, `Chain` for `nnx.Sequential`, and `AttentionInGroups`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.recurrent import flip_sequences
from jaxtyping import Array, Float

from memjax._core import check
from memjax._plan.result import Plan
from memjax.remat._chain.chain import chain
from memjax.remat._chain.chain import check_memory as check_memory_of_chain
from memjax.remat._chain.schedule import ChainSchedule
from memjax.remat._layers import call, check_layers, flags_of_call, run_cell
from memjax.remat._scan.scan import check_memory, scan
from memjax.remat._tiled.heads import attention_in_groups


class RNN(nnx.RNN):
    """`flax.nnx.RNN` whose backward pass keeps within a memory budget, by `memjax.remat.scan`.

    Parameters, outputs and gradients are those of `nnx.RNN`, dropout masks included, and a checkpoint of one loads into
    the other.

    Args:
      cell: any NNX cell, `(carry, x) -> (carry, y)`. Its `nnx.Param` variables are the same at every step; other state
        (counts of random streams, running statistics) goes from step to step, and is kept with each stored carry.
      slots, budget: memory for the backward pass, as for `memjax.remat.scan`: exactly one of them.
      time_major, return_carry, reverse, keep_order, unroll, broadcast_rngs, rngs: as for `nnx.RNN`. `time_major=True` saves
        a copy of the inputs.

    Calling it takes `nnx.RNN`'s arguments. With `seq_lengths` and `return_carry` each carry holds the last valid one as
    well, which takes twice the memory for it, where `nnx.RNN` stacks the carries of all steps.

    Raises:
      ValueError: both or neither of `slots` and `budget`; when called, what `memjax.remat.scan` raises, and a cell that
        adds or removes variables.
    """

    def __init__(
        self,
        cell: nnx.RNNCellBase,
        *,
        slots: int | None = None,
        budget: int | str | None = None,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        broadcast_rngs: Any = None,
        rngs: nnx.Rngs | bool = True,
    ):
        if not (isinstance(cell, nnx.Module) and hasattr(cell, "num_feature_axes")):
            raise check.fail(TypeError, "cell", "an NNX recurrent cell", cell, "such as nnx.LSTMCell(...)")
        self.slots, self.budget = check_memory(slots, budget)
        try:
            nnx.filterlib.to_predicate(broadcast_rngs)
        except (TypeError, ValueError):
            raise check.fail(TypeError, "broadcast_rngs", "a filter of flax.nnx", broadcast_rngs) from None
        super().__init__(
            cell,
            time_major=time_major,
            return_carry=return_carry,
            reverse=reverse,
            keep_order=keep_order,
            unroll=unroll,
            broadcast_rngs=broadcast_rngs,
            rngs=rngs,
        )

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Any:
        flags = flags_of_call(self, inputs, return_carry, time_major, reverse, keep_order)
        rngs = self.rngs if rngs is None else rngs
        if not isinstance(rngs, nnx.Rngs | nnx.RngStream | None):
            raise check.fail(TypeError, "rngs", "an nnx.Rngs or nnx.RngStream", rngs, "such as nnx.Rngs(0)")
        key = lambda: rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
        initial = lambda shape: self.cell.initialize_carry(shape, key())
        return run_cell(self, inputs, initial_carry, initial, seq_lengths, flip_sequences, flags)

    def scan_cell(self, wrap: Callable[..., Any], carry: Any, xs: Any, reverse: bool) -> tuple[Any, Any]:
        """Scan `wrap(cell)` over `xs`, the cell's state going along."""
        fixed = nnx.Any(nnx.Param, nnx.RngKey, nnx.All(nnx.RngState, self.broadcast_rngs))

        @nnx.split_rngs(splits=1, only=self.broadcast_rngs, squeeze=True)
        def run(cell, carry):
            graph, constant, state = nnx.split(cell, fixed, ...)  # type: ignore[misc]

            def step(carry, x):
                state, inner = carry
                copy = nnx.merge(graph, constant, state, copy=True)
                inner, y = wrap(copy)(inner, x)
                after, _, state = nnx.split(copy, fixed, ...)  # type: ignore[misc]
                if after != graph:
                    raise ValueError("cell must not add or remove variables while it runs; create them beforehand")
                return (state, inner), y

            (state, carry), ys = scan(
                step, (state, carry), xs, None, reverse, self.unroll, slots=self.slots, budget=self.budget
            )
            nnx.update(cell, state)
            return carry, ys

        return run(self.cell, carry)


class Chain(nnx.Sequential):
    """`flax.nnx.Sequential` whose backward pass keeps within a memory budget, by `memjax.remat.chain`.

    Each layer is one block of the chain, of which some values are kept and the others recomputed. Parameters,
    outputs and gradients are those of `nnx.Sequential`, running statistics and dropout included, and a checkpoint of one loads
    into the other.

    Args:
      *layers: modules and functions, each called with the output of the one before: a tuple as its arguments, a dict as
        its keyword arguments, anything else as its one argument.
      budget, schedule: as for `memjax.remat.chain`; exactly one of them.

    Raises:
      ValueError: both or neither of `budget` and `schedule`; when called, layers that share state other than parameters,
        and what `memjax.remat.chain` raises.
    """

    def __init__(
        self,
        *layers: Callable[..., Any],
        budget: int | str | None = None,
        schedule: Plan | ChainSchedule | None = None,
    ):
        check_layers(layers, nnx.Module)
        self.budget, self.schedule = check_memory_of_chain(budget, schedule)
        super().__init__(*layers)

    def __call__(self, *args: Any) -> Any:  # type: ignore[override]
        known: dict[Any, Callable[..., Any]] = {}
        blocks, params = [], []
        for layer in self.layers:
            graph, *states = nnx.split(layer, nnx.Param, ...) if isinstance(layer, nnx.Module) else (layer, {}, {})
            blocks.append(known.setdefault(graph, _block(graph)))
            params.append(tuple(states))
        counted_alone = sum(len(jax.tree.leaves(state)) for _, state in params)
        if counted_alone != len(jax.tree.leaves(_without_params(self))):
            raise ValueError(
                "layers share state other than parameters; give each its own (nnx.Rngs.fork makes streams)"
            )
        x, states = chain(blocks, params, args, budget=self.budget, schedule=self.schedule, has_aux=True)
        for layer, state in zip(self.layers, states, strict=True):
            if isinstance(layer, nnx.Module):
                nnx.update(layer, state)
        return x


def _block(graph: Any) -> Callable[..., Any]:
    """One layer as `(params, x) -> (y, state afterwards)`; `graph` describes a module, or is a function."""

    def block(params, x):
        layer = nnx.merge(graph, *params, copy=True) if isinstance(graph, nnx.GraphDef) else graph
        y = call(layer, x)
        return y, _without_params(layer) if isinstance(layer, nnx.Module) else {}

    return block


def _without_params(module: nnx.Module) -> Any:
    """All state but parameters."""
    return nnx.state(module, nnx.Not(nnx.Param))


_normal = nnx.initializers.lecun_normal


class AttentionInGroups(nnx.Module):
    """`x` plus multi-head self-attention to `norm(x)`, one group of heads after the other: `memjax.remat.attention_in_groups`.

    Parameters: `query` (dim, heads, head_dim), `key` and `value` (dim, kv_heads, head_dim), `out` (heads, head_dim, dim), and
    those of `norm`.

    Args:
      dim, heads: features of positions, and heads of queries.
      kv_heads: a divisor of `heads`. None: as many as heads.
      head_dim: features of a head. None: dim / heads.
      norm: an NNX module or a function, applied to x first; `nnx.RMSNorm(dim, rngs=rngs)`, for example.
      dtype: of computation. None: that of the input.
      groups, tile, rotary, attend, keep_attention: see `attention_in_groups`, which says what is saved and what memory it takes.

    Raises:
      ValueError, TypeError: arguments of another kind or out of range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: Callable[[Array], Array] | None = None,
        dtype: Any = None,
        groups: int | None = None,
        tile: int | None = None,
        rotary: Callable[[Array, Array], Array] | None = None,
        attend: Callable[[Array, Array, Array], Array] | None = None,
        keep_attention: bool = False,
        rngs: nnx.Rngs,
    ):
        dim, heads, kv_heads, head_dim = check.heads(dim, heads, kv_heads, head_dim)
        if not isinstance(rngs, nnx.Rngs):
            raise check.fail(TypeError, "rngs", "flax.nnx.Rngs", rngs, "pass nnx.Rngs(0)")
        if dtype is not None:
            check.dtype("dtype", dtype, floating=True)

        for name, count in (("groups", groups), ("tile", tile)):
            if count is not None:
                check.integer(name, count, least=1)
        for name, f, arguments in (("norm", norm, 1), ("rotary", rotary, 2), ("attend", attend, 3)):
            if f is not None:
                check.function(name, f, arguments=arguments)
        check.flag("keep_attention", keep_attention)

        inward, outward = _normal(in_axis=0, out_axis=(1, 2)), _normal(in_axis=(0, 1), out_axis=2)
        self.query = nnx.Param(inward(rngs.params(), (dim, heads, head_dim)))
        self.key = nnx.Param(inward(rngs.params(), (dim, kv_heads, head_dim)))
        self.value = nnx.Param(inward(rngs.params(), (dim, kv_heads, head_dim)))
        self.out = nnx.Param(outward(rngs.params(), (heads, head_dim, dim)))
        self.norm = norm
        self._dtype = dtype
        self._options: dict[str, Any] = {
            "groups": groups,
            "tile": tile,
            "rotary": rotary,
            "attend": attend,
            "keep_attention": keep_attention,
        }

    def __call__(self, x: Float[Array, "B T D"], positions: Array | None = None) -> Float[Array, "B T D"]:
        """`positions`: what `rotary` is given, of shape (T,) or (B, T). None: 0 to T - 1."""
        check.array("x", x, ndim=3, floating=True)
        x = x if self._dtype is None else x.astype(self._dtype)
        kernels = (param[...].astype(x.dtype) for param in (self.query, self.key, self.value, self.out))
        return attention_in_groups(x, *kernels, norm=self.norm, positions=positions, **self._options)
