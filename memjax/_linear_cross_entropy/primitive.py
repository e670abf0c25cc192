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
from jax.interpreters import ad, batching, mlir

from memjax._core.arrays import vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_errors, forward_mode_message, jvp_of_some, only_transposed
from memjax._core.lists import pick
from memjax._linear_cross_entropy import choice, forward_grad, recompute
from memjax._linear_cross_entropy.options import Array, Operands, Options, Result, scaled

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
    flat, tree = jax.tree.flatten(operands)
    jaxpr = jax.make_jaxpr(partial(_flat_forward, primitive, tree, options))(*flat)
    outs = primitive.bind(*flat, jaxpr=jaxpr, tree=tree, options=options)
    return _result(outs, options)


def _result(outs: Any, options: Options) -> Result:
    loss, lse, *aux = outs
    return Result(loss, lse, *(aux if options.aux else (None, None)))


def _flat_forward(primitive: Primitive, tree: Any, options: Options, *flat: Array) -> list[Array]:
    operands = jax.tree.unflatten(tree, flat)
    if primitive is total_p:
        result = forward_grad.total_loss(operands, options)
    else:
        result, _ = recompute.token_losses(operands, options)
    return jax.tree.leaves(vary(result, varying_axes(operands.x)))


# Differentiation


def _differentiable_tokens(options: Options, wanted: frozenset[str], operands: Operands) -> Any:
    @jax.custom_vjp
    def losses(operands: Operands) -> list[Array]:
        return forward(operands)[0]

    def forward(operands: Operands) -> Any:
        result, total = _opaque(lambda operands: recompute.token_losses(operands, options), operands)
        outs = jax.tree.leaves(vary(result, varying_axes(operands.x)))
        return outs, (operands, total)

    def backward(saved: Any, cotangents: Any) -> tuple[Operands]:
        operands, total = saved
        grads = recompute.gradients(operands, total, cotangents[0], options, wanted)
        return (_cotangents(operands, grads),)

    losses.defvjp(forward, backward)
    return losses(operands)


def _differentiable_total(options: Options, wanted: frozenset[str], operands: Operands) -> Any:
    @jax.custom_vjp
    def loss(operands: Operands) -> list[Array]:
        return jax.tree.leaves(vary(forward_grad.total_loss(operands, options), varying_axes(operands.x)))

    def forward(operands: Operands) -> Any:
        rows, grads = _opaque(lambda o: forward_grad.loss_and_gradients(o, options, wanted), operands)
        if "scale" in wanted:
            grads["scale"] = rows.loss
        result = rows._replace(loss=scaled(operands.scale, rows.loss).sum())
        outs = jax.tree.leaves(vary(result, varying_axes(operands.x)))
        # Cotangents must have the dtypes of what they belong to; nothing else of the operands is needed.
        like = Operands._make(None if a is None else jnp.zeros((0,), a.dtype) for a in operands)
        return outs, (like, grads)

    def backward(saved: Any, cotangents: Any) -> tuple[Operands]:
        like, grads = saved
        scaled = {k: (cotangents[0] * g.astype(cotangents[0].dtype)) for k, g in grads.items()}
        return (_cotangents(like, scaled),)

    loss.defvjp(forward, backward)
    return loss(operands)


def _differentiable_total_by_recompute(options: Options, wanted: frozenset[str], operands: Operands) -> Any:
    per_token = _differentiable_tokens(options, wanted - {"scale"}, operands._replace(scale=None))
    result = _result(per_token, options)
    loss = scaled(operands.scale, result.loss).sum()
    return jax.tree.leaves(result._replace(loss=loss))


def _cotangents(like: Operands, grads: dict[str, Array]) -> Operands:
    cast = {k: g.astype(getattr(like, k).dtype) for k, g in grads.items()}
    return Operands._make(cast.get(name) for name in Operands._fields)


def _jvp(primitive: Primitive, primals: Any, tangents: Any, *, jaxpr: Any, tree: Any, options: Options) -> Any:
    del jaxpr
    moving = [type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents]
    names = [name for name, a in zip(Operands._fields, jax.tree.unflatten(tree, primals), strict=True) if a is not None]
    wanted = frozenset(pick(names, moving))
    for name, argument in (("targets", "labels"), ("class_weights", "class_weights")):
        if name in wanted:
            raise ValueError(
                f"{argument} must not be differentiated, got a gradient with respect to it: its gradient is not computed;"
                f" pass jax.lax.stop_gradient({argument})"
            )
    differentiable = _differentiable_tokens
    if primitive is total_p:
        operands = jax.tree.unflatten(tree, primals)
        mosaic = recompute.by_mosaic(operands, options)
        later = options.choose and choice.recompute_is_faster(operands, options, mosaic, wanted)
        differentiable = _differentiable_total_by_recompute if later else _differentiable_total

    call = lambda flat: tuple(differentiable(options, wanted, jax.tree.unflatten(tree, flat)))
    tangents = [only_transposed(tangent, _FORWARD_MODE) for tangent in pick(tangents, moving)]
    with forward_mode_errors(_FORWARD_MODE):
        return jvp_of_some(call, primals, moving, tangents)


# Batching


def _batch(primitive: Primitive, args: Any, dims: Any, *, jaxpr: Any, tree: Any, options: Options) -> Any:
    del jaxpr
    batch = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    operands = jax.tree.unflatten(tree, args)
    remaining = iter(dims)
    axes = Operands._make(None if a is None else next(remaining) for a in operands)
    if axes.w is not None or axes.bias is not None:
        function = _differentiable_total if primitive is total_p else _differentiable_tokens
        active = frozenset(k for k in _DIFFERENTIABLE if getattr(operands, k) is not None)
        outs = jax.vmap(partial(function, options, active), in_axes=(axes,), axis_size=batch)(operands)
        return outs, [0] * len(outs)

    def flatten(a: Array | None, axis: int | None) -> Array | None:
        if a is None:
            return None
        a = jnp.broadcast_to(a, (batch, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        return a.reshape(-1, *a.shape[2:])

    flat = operands._replace(**{k: flatten(getattr(operands, k), getattr(axes, k)) for k in _PER_TOKEN})
    chunk = None if primitive is total_p else options.chunk  # it would count tokens
    result = token_losses(flat._replace(scale=None), replace(options, chunk=chunk))
    result = jax.tree.map(lambda a: a.reshape(batch, -1), result)
    if primitive is total_p:
        result = result._replace(loss=scaled(flat.scale.reshape(batch, -1), result.loss).sum(1))
    outs = jax.tree.leaves(result)
    return outs, [0] * len(outs)


def _define(name: str) -> Primitive:
    """A primitive that stands for the `jaxpr` it carries. Rules of differentiation and batching are registered below."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
    primitive.def_impl(lambda *args, jaxpr, **_: jax.jit(jaxpr_as_fun(jaxpr))(*args))
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda *args, jaxpr, **_: jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
    )
    return primitive


tokens_p = _define("linear_cross_entropy_tokens")
total_p = _define("linear_cross_entropy_total")
for _primitive in (tokens_p, total_p):
    ad.primitive_jvps[_primitive] = partial(_jvp, _primitive)
    batching.primitive_batchers[_primitive] = partial(_batch, _primitive)


# Calls that partial evaluation leaves alone


def _opaque(function: Any, *args: Any) -> Any:
    """`function(*args)` as one equation.

    Partial evaluation, a step of differentiation, would move what does not change from one round of a scan to the next in
    front of it: masks and constants as large as a chunk of logits.
    """
    flat, tree = jax.tree.flatten(args)
    flat_function = lambda *flat: function(*jax.tree.unflatten(tree, flat))
    jaxpr, shape = jax.make_jaxpr(flat_function, return_shape=True)(*flat)
    return jax.tree.unflatten(jax.tree.structure(shape), opaque_p.bind(*flat, jaxpr=jaxpr))


def _opaque_jvp(primals: Any, tangents: Any, *, jaxpr: Any) -> Any:
    moving = [type(tangent) is not ad.Zero for tangent in tangents]
    return jvp_of_some(lambda flat: jaxpr_as_fun(jaxpr)(*flat), primals, moving, pick(tangents, moving))


def _opaque_batch(args: Any, dims: Any, *, jaxpr: Any) -> Any:
    outs = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


opaque_p = _define("linear_cross_entropy_forward")
ad.primitive_jvps[opaque_p] = _opaque_jvp
batching.primitive_batchers[opaque_p] = _opaque_batch
