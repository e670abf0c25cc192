"""Flax Linen modules that train within a memory budget: `RNN` for `nn.RNN`, `Chain` for `nn.Sequential`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.recurrent import flip_sequences

from memjax._core import check
from memjax._core.lists import drop, merge, pick
from memjax._plan.result import Plan
from memjax.remat._chain.chain import chain
from memjax.remat._chain.schedule import ChainSchedule
from memjax.remat._layers import call, check_layers, flags_of_call, run_cell
from memjax.remat._scan.scan import scan

__all__ = ["RNN", "Chain"]


class RNN(nn.RNN):
    """`flax.linen.RNN` whose backward pass keeps within a memory budget, by `memjax.remat.scan`.

    Parameters, outputs and gradients are those of `nn.RNN`, dropout masks included (with `split_rngs={"dropout": True}`).

    Attributes:
      slots, budget: memory for the backward pass, as for `memjax.remat.scan`: exactly one of them.
      cell, time_major, return_carry, reverse, keep_order, unroll, variable_broadcast, variable_carry, split_rngs: as for
        `nn.RNN`. `time_major=True` saves a copy of the inputs. Variables that are carried are kept with each stored carry.
        `variable_axes` cannot be changed.

    With `seq_lengths` and `return_carry` each carry holds the last valid one as well, which takes twice the memory for it,
    where `nn.RNN` stacks the carries of all steps.

    Raises:
      ValueError: when called, both or neither of `slots` and `budget`, and what else `memjax.remat.scan` raises.
    """

    slots: int | None = None
    budget: int | str | None = None

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        init_key: Any = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        if not (isinstance(self.cell, nn.Module) and hasattr(self.cell, "num_feature_axes")):
            raise check.fail(
                TypeError, "cell", "a Flax Linen cell", self.cell, "pass nn.GRUCell(features), for example"
            )
        flags = flags_of_call(self, inputs, return_carry, time_major, reverse, keep_order)
        if not isinstance(self.unroll, bool):
            check.integer("unroll", self.unroll, least=0, what="True, False or a number of steps")
        if not isinstance(self.split_rngs, Mapping):
            raise check.fail(TypeError, "split_rngs", "a dict of names and flags", self.split_rngs)
        if self.variable_axes:
            raise ValueError(f"variable_axes cannot be set, got {self.variable_axes}")
        if self.is_initializing():
            return super().__call__(
                inputs, initial_carry=initial_carry, init_key=init_key, seq_lengths=seq_lengths, **flags
            )
        key = jax.random.key(0) if init_key is None else check.prng_key("init_key", init_key)
        initial = lambda shape: self.cell.initialize_carry(key, shape)
        return run_cell(self, inputs, initial_carry, initial, seq_lengths, flip_sequences, flags)

    def scan_cell(self, wrap: Callable[..., Any], carry: Any, xs: Any, reverse: bool) -> tuple[Any, Any]:
        """Scan `wrap(cell)` over `xs`, as `flax.core.lift.scan` does with `jax.lax.scan`."""
        length = len(jax.tree.leaves(xs)[0])

        def transform(step_in_scope, scope, *args):
            def inner(scope_fn, repack_fn, variables, rngs, carry, xs):
                constant, state = variables
                split = tuple(self.split_rngs.values())
                one_each = [jax.tree.map(lambda rng: jax.random.split(rng, length), r) for r in pick(rngs, split)]
                same = drop(rngs, split)

                def step(carry, slices):
                    state, inner_carry = carry
                    one, x = slices
                    scope = scope_fn((constant, state), tuple(merge(one, same, split)))
                    inner_carry, y = step_in_scope(scope, inner_carry, x)
                    return (repack_fn(scope)[0], inner_carry), y

                # Flax traces its step once before it scans, which moves random streams on: for the same masks, so does this.
                jax.eval_shape(lambda xs: step((state, carry), jax.tree.map(lambda a: a[0], xs)), (one_each, xs))
                xs = one_each, xs
                (state, carry), ys = scan(
                    step, (state, carry), xs, None, reverse, self.unroll, slots=self.slots, budget=self.budget
                )
                return (carry, ys), (state,)

            filters = (self.variable_broadcast, self.variable_carry)
            return lift.pack(inner, filters, filters[1:], tuple(self.split_rngs), name="scan")(scope, *args)

        def step(cell, carry, x):
            return wrap(cell)(carry, x)

        return nn.transforms.lift_direct_transform(transform, (step,), self.cell, carry, xs)


class Chain(nn.Sequential):
    """`flax.linen.Sequential` whose backward pass keeps within a memory budget, by `memjax.remat.chain`.

    Each layer is one block of the chain, of which some values are kept and the others recomputed. Parameters,
    outputs and gradients are those of `nn.Sequential`, running statistics included; dropout masks are others.

    Attributes:
      layers: as for `nn.Sequential`.
      budget, schedule: as for `memjax.remat.chain`; exactly one of them.

    Raises:
      ValueError: when called, what `memjax.remat.chain` raises.
    """

    budget: int | str | None = None
    schedule: Plan | ChainSchedule | None = None

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        check_layers(self.layers, nn.Module)
        if self.is_initializing():
            x: Any = args
            for layer in self.layers:
                x = call(layer, x)
            return x
        blocks, params = zip(*map(_block, self.layers), strict=True)
        x, all_updates = chain(blocks, params, args, budget=self.budget, schedule=self.schedule, has_aux=True)
        for layer, updates in zip(self.layers, all_updates, strict=True):
            for collection, variables in updates.items():
                for name, value in variables.items():
                    layer.put_variable(collection, name, value)  # type: ignore[attr-defined]
        return x


def _block(layer: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """(`(params, x) -> (y, updated variables)`, params) of a layer."""
    if not isinstance(layer, nn.Module):
        return lambda params, x: (call(layer, x), {}), {}
    scope = layer.scope
    assert scope is not None
    module, variables = layer.unbind()
    mutable = [name for name in variables if name != "params" and layer.is_mutable_collection(name)]
    rngs = {name: layer.make_rng(name) for name in scope.rngs if name != "params"}

    def block(params, x):
        variables, rngs = params
        bound = lambda *args, **kwargs: module.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        y, updates = call(bound, x)
        return y, dict(updates)

    return block, (dict(variables), rngs)
