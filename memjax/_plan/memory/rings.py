"""Feed-forward layers whose weights could travel round a ring: what `memjax.shard.metp_mlp` would give, as sentences.

A plan changes no place of an array, so it is the user who decides. A layer counts if it is surely one: products with two or three
matrices that are inputs, nothing but elementwise functions between them, and tokens of sequences split over devices, with hidden
values that are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memjax._core.check import readable_bytes
from memjax._core.compat import explicit_sharding
from memjax._core.meshes import device_of, mesh_of
from memjax._core.program import costs
from memjax._core.program.dataflow import Dataflow, is_literal, variables
from memjax._core.program.jaxpr import Program
from memjax._core.program.primitives import ELEMENTWISE, VIEWS
from memjax._plan.derivative import Passes
from memjax._plan.memory.layout import Layout

_WORTH_A_WORD = 0.9  # of the bytes without a ring: so many, or fewer
_MOVES = VIEWS | {"reshard", "sharding_constraint", "copy"}


class Layer(NamedTuple):
    """A feed-forward layer.

    Attributes:
      tokens: of a device, over its sequences.
      dim, hidden: the widths.
      size: over how many devices the tokens are split.
      weights: how many matrices it has: 2, or 3 of a gated one.
      itemsize: bytes of a number.
      dtype: of its numbers.
    """

    tokens: int
    dim: int
    hidden: int
    size: int
    weights: int
    itemsize: int
    dtype: Any


def ring_notes(every: Iterable[Passes], shardings: Sequence[Any], layout: Callable[[], Layout]) -> tuple[str, ...]:
    """What METP's layers would give for the feed-forward layers of some passes; nothing if there are none or it gives little.

    Args:
      every: the passes.
      shardings: of the inputs.
      layout: gives the layout of the inputs; it is called where there are such layers on a mesh.
    """
    mesh = mesh_of(shardings)
    if mesh is None or mesh.size == 1:
        return ()
    found: dict[Layer, int] = {}
    for passes in every:
        bodies = [(pair.program, pair.forward.params["length"]) for pair in passes.loops]
        for program, count in ((passes.forward, 1), *bodies):
            for products in _feed_forward(program) if not passes.axes else ():
                if (layer := _layer(*products, layout())) is not None:
                    found[layer] = found.get(layer, 0) + count
    if not found:
        return ()
    layer = max(found, key=lambda one: one.tokens * one.hidden * one.itemsize)
    names = [name for name, size in dict(mesh.shape).items() if size == layer.size]
    note = _note(layer, sum(found.values()), names, costs.device(device_of(shardings)))
    return (note,) if note else ()


def _feed_forward(program: Program) -> Iterator[tuple[list[Any], Any]]:
    """The products of each feed-forward layer of a program: one or two of its input, and the one of its hidden values."""
    flow, inputs = program.flow, {*program.invars, *program.constvars}
    for eqn in program.eqns:
        if _is_product_with_matrix(eqn, flow, inputs) and eqn.invars[0].aval.ndim == 3:
            before = _products_before(eqn.invars[0], flow) or []
            of_one = lambda one, before=before: one.invars[0] is before[0].invars[0]
            if 1 <= len(before) <= 2 and all(
                _is_product_with_matrix(one, flow, inputs) and of_one(one) for one in before
            ):
                yield before, eqn


def _layer(before: Sequence[Any], last: Any, layout: Layout) -> Layer | None:
    """The layer, if the tokens of each sequence are split over devices, and neither width is."""
    x, hidden, after = before[0].invars[0], before[0].outvars[0], last.outvars[0]
    part, of_after = _on_device(hidden, layout), _on_device(after, layout)
    if part is None or of_after is None or (part[2], of_after[2]) != (hidden.aval.shape[2], after.aval.shape[2]):
        return None
    size = x.aval.shape[1] // max(part[1], 1)
    if size <= 1 or part[1] * size != x.aval.shape[1] or of_after[1] != part[1] or part[2] % size:
        return None
    dtype = x.aval.dtype
    return Layer(part[0] * part[1], x.aval.shape[2], part[2], size, len(before) + 1, dtype.itemsize, dtype)


def _on_device(var: Any, layout: Layout) -> tuple[int, ...] | None:
    """The shape of a device's part, where that is known."""
    if layout.shapes and var in layout.shapes:
        return layout.shapes[var]
    told = explicit_sharding(var.aval)
    return None if told is None else told.shard_shape(var.aval.shape)


def _is_product_with_matrix(eqn: Any, flow: Dataflow, inputs: set[Any]) -> bool:
    """Whether it multiplies the last dimension of an array by a matrix that is an input, or one cast or moved."""
    if eqn.primitive.name != "dot_general" or any(map(is_literal, eqn.invars)):
        return False
    (contracted, _), batch = eqn.params["dimension_numbers"]
    x, w = eqn.invars
    if any(batch) or tuple(contracted) != (x.aval.ndim - 1,) or w.aval.ndim != 2:
        return False
    while (maker := flow.makers.get(w)) is not None:
        if maker.primitive.name not in _MOVES or len(variables(maker.invars)) != 1:
            return False
        [w] = variables(maker.invars)
    return w in inputs


def _products_before(var: Any, flow: Dataflow) -> list[Any] | None:
    """The products that a value is made of by nothing but elementwise functions, in order; None if there is anything else."""
    found: dict[int, Any] = {}
    pending, seen = [var], {var}
    while pending:
        eqn = flow.makers.get(pending.pop())
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "dot_general":
            found[flow.place[eqn.outvars[0]]] = eqn
            continue
        operands = variables(eqn.invars)
        is_constant = name == "broadcast_in_dim" and not operands
        if not is_constant and (
            name not in ELEMENTWISE | _MOVES or any(o.aval.shape != var.aval.shape for o in operands)
        ):
            return None
        pending += [one for one in operands if one not in seen]
        seen.update(operands)
    return [found[place] for place in sorted(found)]


def _note(layer: Layer, count: int, names: list[str], rates: costs.Device) -> str:
    from memjax.shard.overlap import Link, mlp_step  # not before: few programs have rings

    step = functools.partial(
        mlp_step,
        layer.tokens,
        dim=layer.dim,
        hidden=layer.hidden,
        size=layer.size,
        gated=layer.weights == 3,
        itemsize=layer.itemsize,
    )
    steps = [step(), step(backward=True)]
    link = Link((1,), (costs.link_of_devices(rates),))
    whole = layer.tokens * layer.hidden * layer.itemsize + 2 * layer.weights * layer.dim * layer.hidden * layer.itemsize
    # A block of hidden values, and two of the weights: one arrives while the other is multiplied with.
    in_ring = layer.tokens * layer.hidden * layer.itemsize // layer.size + 2 * int(steps[1].message_bytes)
    if in_ring > _WORTH_A_WORD * whole:
        return ""
    products = [costs.product_seconds(step.flops, layer.dtype, rates) for step in steps]
    hops = [link.seconds(step.message_bytes) for step in steps]
    ratio = sum(map(max, products, hops)) / sum(products)
    along = f" along {names[0]!r}" if len(names) == 1 else ""
    how = "hidden behind these" if ratio == 1 else "longer than what they run beside"
    layers = f"{count} feed-forward layers have" if count > 1 else "a feed-forward layer has"
    ring, now, hop = (
        readable_bytes(in_ring, up=True),
        readable_bytes(whole),
        readable_bytes(int(steps[0].message_bytes)),
    )
    return (
        f"ring: {layers} the tokens of a sequence (dimension 1) split over {layer.size} devices{along}, and whole weights on "
        f"each. With memjax.shard.metp_mlp, or metp, blocks of the weights travel: a device would hold {ring} of hidden values, "
        f"weights and their gradients while the widest of them runs, instead of {now}, in {ratio:.2f} of the time of its "
        f"products, hops of {hop} being {how} (predicted)"
    )
