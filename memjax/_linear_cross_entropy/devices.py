"""Programs under `jit` on several devices with automatic axes: each device computes its own tokens, as in a `jax.shard_map`.

How arrays are sharded is known only after XLA has spread it over the program. Left to itself it would then cut loops over chunks
of tokens, and gather what kernels read. `jax.experimental.custom_partitioning` asks us instead, once shardings are known: the
mesh axes that shard tokens are those of `token_axis_name`, and of those that shard the head's vocabulary the others are
`axis_name`'s. A head that is sharded otherwise is gathered, and its gradient is scattered as the head is.

The user's mesh need not be known, and there may be several. Axes here are of a mesh of our own, with the smallest dimensions
that explain the shardings.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from memjax._core import check as _check
from memjax._core.arrays import as_array
from memjax._core.compat.partitioner import tiles_of_devices
from memjax._linear_cross_entropy import check
from memjax._linear_cross_entropy.options import Array, Axes, as_axes, as_entry, psum
from memjax._linear_cross_entropy.programs import Arrays, Program

Run = Callable[[Program, Arrays], Arrays]


def over_devices(run: Run, program: Program, jaxpr: Any, arrays: Arrays) -> Arrays:
    """`program(arrays)`, traced as `jaxpr`, for XLA to spread over devices. Each runs its own by `run`.

    The call hides the effects of collectives and of kernels that write in place: JAX would refuse to lower it with them.
    """
    results = jax.eval_shape(program, arrays)
    names = _Names(tuple(sorted(arrays)), tuple(sorted(results)), arrays["labels"].ndim)
    return _over_devices(run, program, names, _fingerprint(jaxpr), arrays)


def _fingerprint(jaxpr: Any) -> Array:
    """A number that tells programs apart in JAX's cache of compiled programs, for which they are all one opaque call."""
    return jnp.uint32(zlib.crc32(re.sub("0x[0-9a-f]+", "", str(jaxpr)).encode()))


@dataclass(frozen=True)
class _Names:
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    rank: int  # dimensions of tokens


def _whole(run: Run, program: Program, names: _Names, fingerprint: Array, arrays: Arrays) -> Arrays:
    return program(arrays)


@dataclass(frozen=True)
class _Placement:
    """The mesh axes over which tokens and vocabulary are sharded."""

    tokens: tuple[Axes, ...]  # for each of their dimensions
    vocabulary: Axes

    @property
    def all_tokens(self) -> Axes:
        return tuple(axis for axes in self.tokens for axis in axes)

    def spec(self, program: Program, name: str) -> PartitionSpec:
        at = {"V": self.vocabulary, **{f"T{i}": axes for i, axes in enumerate(self.tokens)}}
        return PartitionSpec(*(as_entry(at.get(d, ())) for d in program.dimensions(name, len(self.tokens))))


def _placement(program: Program, mesh: _Mesh, arrays: dict[str, Any]) -> _Placement:
    rank = len(arrays["labels"].shape)
    tokens: list[Axes] = [()] * rank
    for name in ("x", *arrays):  # x first: whatever else there is of tokens is smaller
        if name not in ("w", "bias", "class_weights") and not any(tokens):
            tokens = mesh.axes(arrays[name])[:rank]
    of_tokens = {axis for axes in tokens for axis in axes}
    w = arrays["w"]
    dimension = program.options.layout.index("v")
    vocabulary = tuple(axis for axis in mesh.axes(w)[dimension] if axis not in of_tokens)
    if w.shape[dimension] % mesh.size(vocabulary):
        vocabulary = ()
    return _Placement(tuple(tokens), vocabulary)


def _partition(run: Run, program: Program, names: _Names, _: Any, arguments: Any, results: Any) -> Any:
    """The program of each device, and how its arguments and results are sharded."""
    arrays = arguments[1]
    mesh = _mesh((*arrays.values(), *results.values()))
    placement = _placement(program, mesh, arrays)
    tokens = placement.all_tokens
    shape = arrays["labels"].shape
    specs = {name: placement.spec(program, name) for name in results}
    scattered: list[tuple[int, Axes]] = []
    if "w" in results:
        specs["w"], scattered = _scattered(specs["w"], results["w"], mesh, tokens)
    local = replace(program, options=replace(program.options, axis_name=placement.vocabulary or None))

    def of_device(_: Array, arrays: Arrays) -> Arrays:
        out = run(local, _without_padding(arrays, shape, mesh, placement))
        out |= {k: psum(a, placement.vocabulary or None) for k, a in out.items() if k in ("loss", "total", "x")}
        out |= {k: psum(a, tokens or None) for k, a in out.items() if k in ("total", "bias")}
        if "w" in out:
            for dimension, axes in scattered:
                out["w"] = lax.psum_scatter(out["w"], axes, scatter_dimension=dimension, tiled=True)
            left = tuple(axis for axis in tokens if all(axis not in axes for _, axes in scattered))
            out["w"] = psum(out["w"], left or None)
        return out

    given = {name: mesh.sharding(placement.spec(program, name)) for name in arrays}
    found = {name: mesh.sharding(spec) for name, spec in specs.items()}
    return mesh.abstract, of_device, found, (mesh.sharding(PartitionSpec()), given)


def _scattered(spec: PartitionSpec, given: Any, mesh: _Mesh, tokens: Axes) -> Any:
    """The sharding of the head's gradient, and the axes of tokens over which a dimension is scattered, as in `given`."""
    entries, scattered = [], []
    for dimension, (entry, wanted) in enumerate(zip(spec, mesh.axes(given), strict=True)):
        local = as_axes(entry)
        more = wanted[len(local) :]
        fits = wanted[: len(local)] == local and set(more) <= set(tokens)
        if more and fits and given.shape[dimension] % mesh.size(wanted) == 0:
            scattered.append((dimension, more))
            local = wanted
        entries.append(as_entry(local))
    return PartitionSpec(*entries), scattered


def _without_padding(arrays: Arrays, shape: tuple[int, ...], mesh: _Mesh, placement: _Placement) -> Arrays:
    """The arrays, where the last device has rows that are no tokens: they get no weight."""
    real: Any = True
    local = arrays["labels"].shape
    for i, (size, axes) in enumerate(zip(shape, placement.tokens, strict=True)):
        if size % mesh.size(axes):
            index = lax.axis_index(axes) * local[i] + lax.broadcasted_iota(jnp.int32, local, i)
            real &= index < size
    if real is True:
        return arrays
    return {k: jnp.where(real, a, 0) if k in ("scale", "cotangent") else a for k, a in arrays.items()}


def _infer(run: Run, program: Program, names: _Names, _: Any, arguments: Any, results: Any) -> Any:
    """How results are sharded, for GSPMD."""
    arrays = arguments[1]
    mesh = _mesh(arrays.values())
    placement = _placement(program, mesh, arrays)
    specs = {name: placement.spec(program, name) for name in results}
    if "w" in results:
        specs["w"], _ = _scattered(specs["w"], arrays["w"], mesh, placement.all_tokens)
    return {name: mesh.sharding(spec) for name, spec in specs.items()}


def _rule(run: Run, program: Program, names: _Names, *_: Any) -> str:
    """Which dimensions are sharded alike, for Shardy."""
    text = lambda some: ", ".join(" ".join(program.dimensions(name, names.rank)) for name in some)
    return f", {text(names.arguments)} -> {text(names.results)}"


@dataclass(frozen=True)
class _Mesh:
    """Devices in the order of the program, as an array with one axis for each of `sizes`."""

    sizes: tuple[int, ...]

    @property
    def abstract(self) -> AbstractMesh:
        return AbstractMesh(self.sizes, self.names)

    @property
    def names(self) -> Axes:
        return tuple(f"axis{i}" for i in range(len(self.sizes)))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.abstract, spec)

    def size(self, axes: Axes) -> int:
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def axes(self, a: Any) -> list[Axes]:
        """The axes over which each dimension is sharded."""
        found = self._explained(tiles_of_devices(a.sharding, len(a.shape)))
        return [()] * len(a.shape) if found is None else found

    def explains(self, a: Any) -> bool:
        return self._explained(tiles_of_devices(a.sharding, len(a.shape))) is not None

    def _explained(self, tiles: np.ndarray) -> list[Axes] | None:
        """Axes from the tile that each device has along each dimension, (devices, dimensions), or None."""
        digits = np.stack(np.unravel_index(np.arange(len(tiles)), self.sizes), 1)
        first = np.ravel_multi_index(np.eye(len(self.sizes), dtype=int).T, self.sizes)
        strides = tiles[first]  # of each axis in each dimension
        if not np.array_equal(digits @ strides, tiles):
            return None
        order = np.argsort(-strides, axis=0, kind="stable").T
        return [tuple(self.names[i] for i in axes if strides[i, k]) for k, axes in enumerate(order)]


def _mesh(arrays: Sequence[Any]) -> _Mesh:
    """A mesh that explains how all of these are sharded. What none does is not taken for sharded."""
    arrays = [a for a in arrays if a.sharding is not None]
    count = len(tiles_of_devices(arrays[0].sharding, len(arrays[0].shape)))
    return max(map(_Mesh, _prime_factors(count)), key=lambda mesh: sum(map(mesh.explains, arrays)))


def _prime_factors(count: int) -> list[tuple[int, ...]]:
    """The prime factors of `count`, in every order."""
    primes = [p for p in range(2, count + 1) if count % p == 0 and all(p % q for q in range(2, p))]
    return [(p, *rest) for p in primes for rest in _prime_factors(count // p)] or [()]


_over_devices = custom_partitioning(_whole, static_argnums=(0, 1, 2))
_over_devices.def_partition(
    _partition, infer_sharding_from_operands=_infer, sharding_rule=_rule, decode_shardings=False
)


# The loss of arrays that an explicit mesh shards: `jax.shard_map` over the axes that their types name.
#
# With `AxisType.Explicit` arrays' types say how they are sharded, and JAX refuses operations where it cannot tell how
# the result would be sharded. For the loss this is known: tokens are independent but for one sum, and `axis_name`
# shards the vocabulary. So the axes that shard tokens become `token_axis_name`, and those that shard the vocabulary and
# no tokens `axis_name`. A head that is sharded otherwise, as fully sharded parameters are, is gathered.


def is_on_explicit_mesh(*arrays: Any) -> bool:
    """Whether an explicit mesh holds any of the arrays."""
    return any(bool(_mesh_of(a).explicit_axes) for a in arrays if isinstance(a, jax.Array))


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
    mesh = next(_mesh_of(a) for a in arrays.values() if is_on_explicit_mesh(a))
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


def _mesh_of(a: Any) -> Any:
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
    """The array, of JAX, sharded as `spec` says."""
    a = as_array(a)
    if _axes(a) != [as_axes(entry) for entry in spec]:
        return jax.sharding.reshard(a, NamedSharding(mesh, spec))
    return a
