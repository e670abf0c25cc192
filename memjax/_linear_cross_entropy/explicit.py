"""The loss of arrays that an explicit mesh shards: `jax.shard_map` over the axes that their types name.

With `AxisType.Explicit` arrays' types say how they are sharded, and JAX refuses operations where it cannot tell how the result
would be sharded. For the loss this is known: tokens are independent but for one sum, and `axis_name` shards the vocabulary. So
the axes that shard tokens become `token_axis_name`, and those that shard the vocabulary and no tokens `axis_name`. A head that is
sharded otherwise, as fully sharded parameters are, is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from memjax._core import check as _check
from memjax._linear_cross_entropy import check
from memjax._linear_cross_entropy.options import Array, Axes, as_axes, as_entry


def placed(*arrays: Any) -> bool:
    """Whether an explicit mesh holds any of the arrays."""
    return any(bool(_mesh(a).explicit_axes) for a in arrays if isinstance(a, jax.Array))


def over_shards(loss: Callable[..., Any], aux: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """`loss` of the arguments, called with every device's shards. `aux` makes a tree like the one of diagnostics."""
    x, w, labels, layout = (arguments[name] for name in ("x", "w", "labels", "layout"))
    bias, weights, class_weights = (arguments[name] for name in ("bias", "weights", "class_weights"))
    if arguments["axis_name"] is None:
        check.arrays(x, w, labels, layout, bias, weights, class_weights, 1)
    *tokens, features = _axes(x)
    token_axes = tuple(axis for axes in tokens for axis in axes)
    of_w = dict(zip(layout, _axes(w), strict=True))
    if features:
        fix = "shard only its tokens, with jax.sharding.reshard"
        raise _check.fail(ValueError, "x", f"whole along D, not sharded over {features}", x, fix)
    of_vocabulary = tuple(axis for axis in of_w["v"] if axis not in token_axes)
    # What is sharded with the tokens is gathered by every device, so that its gradient is scattered.
    gathered = {name: tuple(axis for axis in axes if axis in token_axes) for name, axes in of_w.items()}
    of_tokens = PartitionSpec(*map(as_entry, tokens))
    vocabulary = as_entry(of_vocabulary)
    kept = {"v": of_vocabulary + gathered["v"], "d": gathered["d"]}
    specs = {
        "x": PartitionSpec(*of_tokens, None),
        "w": PartitionSpec(*(as_entry(kept[name]) for name in layout)),
        "labels": of_tokens if labels.ndim < x.ndim else PartitionSpec(*of_tokens, vocabulary),
        "bias": PartitionSpec(vocabulary),
        "weights": of_tokens,
        "class_weights": PartitionSpec(None),
    }
    arrays = {name: arguments[name] for name in specs if arguments[name] is not None}
    mesh = next(_mesh(a) for a in arrays.values() if placed(a))
    arrays = {name: _following(a, mesh, specs[name]) for name, a in arrays.items()}
    options = {name: value for name, value in arguments.items() if name not in arrays}
    options["token_axis_name"] = _joined(options["token_axis_name"], token_axes)
    options["axis_name"] = _joined(options["axis_name"], of_vocabulary)

    def of_device(arrays: dict[str, Any]) -> Any:
        whole = arrays["w"]
        for dimension, name in enumerate(layout):
            if gathered[name]:
                whole = jax.lax.all_gather(whole, gathered[name], axis=dimension, tiled=True)
        return loss(**{**arrays, "w": whole}, **options)

    out = of_tokens if options["reduction"] == "none" else PartitionSpec()
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=({name: specs[name] for name in arrays},),
        out_specs=(out, aux(of_tokens, PartitionSpec())) if options["return_aux"] else out,
        axis_names=set(mesh.explicit_axes),
    )(arrays)


def _mesh(a: Any) -> Any:
    return jax.typeof(a).sharding.mesh


def _axes(a: Array) -> list[Axes]:
    """The mesh axes over which each dimension is sharded, as its type says."""
    spec = jax.typeof(a).sharding.spec
    entries = [*spec, *[None] * (a.ndim - len(spec))]
    return [as_axes(entry) for entry in entries]


def _joined(option: Any, axes: Axes) -> Any:
    """An option such as `axis_name`, with `axes` added."""
    return (*as_axes(option), *axes) or None


def _following(a: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """The array, sharded as `spec` says."""
    if isinstance(a, jax.Array) and _axes(a) != [as_axes(entry) for entry in spec]:
        return jax.sharding.reshard(a, NamedSharding(mesh, spec))
    return a
