"""One primitive per algorithm, so that `vmap` flattens tokens where the head is shared.

Under `vmap` a `custom_vjp` is batched: dW would become one gradient per example, summed afterwards, a batch
of them in memory. `custom_vmap` would flatten instead but cannot be differentiated. So the primitives
`bind`ed here have a batching rule of their own and, for differentiation, a rule that hands over to a
`custom_vjp`:

    grad of vmap    the batching rule comes first: per-token losses of flattened tokens, one dW
    vmap of grad    the gradients are per example: plain batching of the `custom_vjp`
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from memjax._core import check
from memjax._core.arrays import vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_errors, forward_mode_message, jvp_of_some, only_transposed
from memjax._core.compat import is_in_order, register_batcher
from memjax._core.compat.partitioner import spread_by_xla
from memjax._core.lists import pick
from memjax._linear_cross_entropy import algorithms, choice, devices
from memjax._linear_cross_entropy.options import Array, Operands, Options, Result, scaled, with_rows
from memjax._linear_cross_entropy.programs import Arrays, Program, as_operands, named

_DIFFERENTIABLE = ("x", "w", "bias", "scale")
_PER_TOKEN = ("x", "labels", "targets", "scale")
_FORWARD_MODE = forward_mode_message("memjax.linear_cross_entropy", 'implementation="full", which holds all logits')


def token_losses(operands: Operands, options: Options) -> Result:
    """Losses per token; the gradient recomputes the logits."""
    return _bind(tokens_p, operands, options)


def total_loss(operands: Operands, options: Options) -> Result:
    """The sum of scale * loss over the tokens; the gradients are computed with it."""
    return _bind(total_p, operands, options)


def _bind(primitive: Primitive, operands: Operands, options: Options) -> Result:
    operands = vary(operands, varying_axes(*jax.tree.leaves(operands)))
    return _result(_bound(primitive, Program(_PROGRAMS[primitive], options), named(operands)))


def _bound(primitive: Primitive, program: Program, arrays: Arrays) -> Arrays:
    """`program(arrays)` as one equation."""
    flat, tree = jax.tree.flatten(arrays)
    axes = varying_axes(arrays["x"])
    function = lambda *flat: vary(program(jax.tree.unflatten(tree, flat)), axes)
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*flat)
    outs = primitive.bind(*flat, jaxpr=jaxpr, tree=tree, program=program)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _rest(result: Result) -> Arrays:
    rest = result._asdict()
    return {name: rest[name] for name in ("lse", "correct", "entropy") if rest[name] is not None}


def _result(outs: Arrays) -> Result:
    loss = outs["total"] if "total" in outs else outs["loss"]
    return Result(loss, outs["lse"], outs.get("correct"), outs.get("entropy"))


# Differentiation


def _differentiable_tokens(options: Options, wanted: frozenset[str], operands: Operands) -> Arrays:
    @jax.custom_vjp
    def losses(operands: Operands) -> Arrays:
        return forward(operands)[0]

    def forward(operands: Operands) -> Any:
        outs = _opaque(Program("losses_and_mass", options), named(operands))
        saved = {name: outs[name] for name in ("lse", "mass") if name in outs}
        outs.pop("mass", None)
        return outs, (operands, saved)

    def backward(saved: Any, cotangents: Arrays) -> tuple[Operands]:
        operands, rows = saved
        arrays = {**named(operands), **rows, "cotangent": cotangents["loss"]}
        return (_cotangents(operands, _opaque(Program("gradients", options, wanted), arrays)),)

    losses.defvjp(forward, backward)
    return losses(operands)


def _differentiable_total(options: Options, wanted: frozenset[str], operands: Operands) -> Arrays:
    @jax.custom_vjp
    def loss(operands: Operands) -> Arrays:
        return _opaque(Program("total", options), named(operands))

    def forward(operands: Operands) -> Any:
        outs = _opaque(Program("losses_and_gradients", options, wanted), named(operands))
        grads = {name: outs.pop(name) for name in _DIFFERENTIABLE if name in outs}
        if "scale" in wanted:
            grads["scale"] = outs["loss"]
        outs["total"] = scaled(operands.scale, outs.pop("loss")).sum()
        # Cotangents must have the dtypes of what they belong to; nothing else of the operands is needed.
        like = Operands._make(None if a is None else jnp.zeros((0,), a.dtype) for a in operands)
        return outs, (like, grads)

    def backward(saved: Any, cotangents: Arrays) -> tuple[Operands]:
        like, grads = saved
        d = cotangents["total"]
        return (_cotangents(like, {k: d * g.astype(d.dtype) for k, g in grads.items()}),)

    loss.defvjp(forward, backward)
    return loss(operands)


def _differentiable_total_by_recompute(options: Options, wanted: frozenset[str], operands: Operands) -> Arrays:
    outs = _differentiable_tokens(options, wanted - {"scale"}, operands._replace(scale=None))
    outs["total"] = scaled(operands.scale, outs.pop("loss")).sum()
    return outs


def _later(operands: Operands, options: Options, wanted: frozenset[str]) -> bool:
    """Whether gradients are better computed after the loss. Chunks of tokens need to know how many there are."""
    symbolic = not isinstance(operands.x.shape[0], int)
    return symbolic or choice.recompute_is_faster(operands, options, algorithms.by_mosaic(operands, options), wanted)


def _cotangents(like: Operands, grads: dict[str, Array]) -> Operands:
    cast = {k: g.astype(getattr(like, k).dtype) for k, g in grads.items()}
    return Operands._make(cast.get(name) for name in Operands._fields)


def _jvp(primitive: Primitive, primals: Any, tangents: Any, *, jaxpr: Any, tree: Any, program: Program) -> Any:
    del jaxpr
    options = program.options
    moving = [type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents]
    wanted = frozenset(pick(list(jax.tree.unflatten(tree, primals)), moving))
    for name, argument in (("targets", "labels"), ("class_weights", "class_weights")):
        if name in wanted:
            raise ValueError(
                f"{argument} must not be differentiated, got a gradient with respect to it: its gradient is not computed;"
                f" pass jax.lax.stop_gradient({argument})"
            )
    differentiable = _differentiable_tokens
    if primitive is total_p:
        operands = with_rows(as_operands(jax.tree.unflatten(tree, primals)))
        later = options.choose and _later(operands, options, wanted)
        differentiable = _differentiable_total_by_recompute if later else _differentiable_total

    function = lambda flat: differentiable(options, wanted, as_operands(jax.tree.unflatten(tree, flat)))
    call = lambda flat: tuple(jax.tree.leaves(function(flat)))
    tangents = [only_transposed(tangent, _FORWARD_MODE) for tangent in pick(tangents, moving)]
    with forward_mode_errors(_FORWARD_MODE):
        return jvp_of_some(call, primals, moving, tangents)


# Batching


def _register_batcher(primitive: Primitive, rule: Any) -> None:
    def batch(name: str | None, args: Any, dims: Any, **parameters: Any) -> Any:
        _not_a_vocabulary(name, parameters["program"].options)
        if all(dim is None for dim in dims):  # JAX asks wherever a `jax.vmap` is outside of a `jax.shard_map`
            outs = primitive.bind(*args, **parameters)
            return outs, [None] * len(outs)
        return rule(args, dims, **parameters)

    register_batcher(primitive, batch)


def _batch(primitive: Primitive, args: Any, dims: Any, *, jaxpr: Any, tree: Any, program: Program) -> Any:
    del jaxpr
    options = program.options
    batch = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    operands = as_operands(jax.tree.unflatten(tree, args))
    axes = as_operands(dict(zip(jax.tree.unflatten(tree, args), dims, strict=True)))
    if axes.w is not None or axes.bias is not None:
        function = _differentiable_total if primitive is total_p else _differentiable_tokens
        active = frozenset(k for k in _DIFFERENTIABLE if getattr(operands, k) is not None)
        outs = jax.tree.leaves(jax.vmap(partial(function, options, active), in_axes=(axes,), axis_size=batch)(operands))
        return outs, [0] * len(outs)

    def outside(a: Array | None, axis: int | None) -> Array | None:
        if a is None:
            return None
        return jnp.broadcast_to(a, (batch, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)

    more = operands._replace(**{k: outside(getattr(operands, k), getattr(axes, k)) for k in _PER_TOKEN})
    chunk = None if primitive is total_p else options.chunk  # it would count tokens
    result = token_losses(more._replace(scale=None), replace(options, chunk=chunk))
    if primitive is total_p:
        losses = scaled(more.scale, result.loss)
        outs = {"total": losses.sum(range(1, losses.ndim)), **_rest(result)}
    else:
        outs = {"loss": result.loss, **_rest(result)}
    flat = jax.tree.leaves(outs)
    return flat, [0] * len(flat)


def _not_a_vocabulary(name: str | None, options: Options) -> None:
    """Raises where the axis of a `jax.vmap` is to shard the vocabulary."""
    axes = options.axis_name if isinstance(options.axis_name, tuple) else (options.axis_name,)
    if name is not None and name in axes:
        raise check.fail(
            ValueError, "axis_name", "a mesh axis", name, 'that of a jax.vmap works with implementation="full" alone'
        )


def _define(name: str) -> Primitive:
    """A primitive that stands for the `jaxpr` of its program. Rules of differentiation and batching are registered below."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
    primitive.def_impl(partial(_run, primitive))
    mlir.register_lowering(primitive, _lower)
    return primitive


def _run(primitive: Primitive, *args: Any, jaxpr: Any, **parameters: Any) -> Any:
    # Interpreted kernels call Python in order. The primitive has no effects, so a program that has one cannot hold it.
    if any(map(is_in_order, jaxpr.effects)):
        return jax.jit(jaxpr_as_fun(jaxpr))(*args)
    return jax.jit(partial(primitive.bind, jaxpr=jaxpr, **parameters))(*args)


def _lower(ctx: Any, *args: Any, jaxpr: Any, tree: Any, program: Program) -> Any:
    function = jaxpr_as_fun(jaxpr)
    if (spread := spread_by_xla(ctx)) is not None:
        ctx = spread
        function = lambda *flat: devices.over_devices(_opaque, program, jaxpr, jax.tree.unflatten(tree, flat))
    leaves = lambda *flat: jax.tree.leaves(function(*flat))
    return mlir.lower_fun(leaves, multiple_results=True)(ctx, *args)


tokens_p = _define("linear_cross_entropy_tokens")
total_p = _define("linear_cross_entropy_total")
_PROGRAMS = {tokens_p: "losses", total_p: "total"}
for _primitive in (tokens_p, total_p):
    ad.primitive_jvps[_primitive] = partial(_jvp, _primitive)
    _register_batcher(_primitive, partial(_batch, _primitive))


# Calls that partial evaluation leaves alone


def _opaque(program: Program, arrays: Arrays) -> Arrays:
    """`program(arrays)` as one equation.

    Partial evaluation, a step of differentiation, would move what does not change from one round of a scan to the next in
    front of it: masks and constants as large as a chunk of logits.
    """
    return _bound(opaque_p, program, arrays)


def _opaque_jvp(primals: Any, tangents: Any, *, jaxpr: Any, **_: Any) -> Any:
    moving = [type(tangent) is not ad.Zero for tangent in tangents]
    return jvp_of_some(lambda flat: jaxpr_as_fun(jaxpr)(*flat), primals, moving, pick(tangents, moving))


def _opaque_batch(args: Any, dims: Any, *, jaxpr: Any, **_: Any) -> Any:
    outs = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


opaque_p = _define("linear_cross_entropy_forward")
ad.primitive_jvps[opaque_p] = _opaque_jvp
_register_batcher(opaque_p, _opaque_batch)
