"""`tiled`: a function of sequences that runs tile by tile, in both passes.

Arctic Long Sequence Training (Bekman et al. 2025, "TiledMLP") runs feed-forward layers so; here it is any function in which
positions do not mix, which is checked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax._core import check as _check
from memjax._core.arrays import vary, varying_axes
from memjax._core.backward.derivatives import forward_mode_message, reverse_only
from memjax._core.clear_errors import call_errors
from memjax._core.lists import Arrays, drop, merge, pick
from memjax._core.platforms import traced_device
from memjax._core.positions.rules import apply_rule
from memjax._core.positions.walk import Positions, Seen, State, Walk, shared
from memjax._core.program.closures import Hoisted
from memjax._core.program.costs import rows_of_tile
from memjax._core.segments import Segments, automatic_devices, segments, shards
from memjax._core.tiles import Tiles, with_size
from memjax.remat._modules import wrapped_module
from memjax.remat._tiled.mixing import check_result, refuse_mixed_positions

_FORWARD_MODE = forward_mode_message(
    "memjax.remat.tiled", "the function without it, of which forward mode keeps nothing"
)


def tiled(
    f: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    tile: int | None = None,
    sum_dtype: Any | None = jnp.float32,
    check: bool = True,
) -> Callable[..., Any]:
    """`f`, run on tiles of the mapped axes one after the other, in the forward and in the backward pass.

    For functions of long sequences in which positions do not depend on each other: feed-forward layers, projections,
    norms over features, rotary embeddings, a loss. What `f` computes on the way exists for one tile at a time.

    Args:
      f: a function of pytrees, whose mapped arrays keep their axis: it is called with tiles of shape (..., tile, ...). What it
        closes over is shared, and differentiated as usual. Or a Flax module or class of modules, Linen or NNX: the result is
        one of the same kind with the same variables, which are shared; `in_axes` are then those of the arguments of
        `__call__`, without `self`.
      in_axes: which axis of each argument holds positions, as in `jax.vmap`: an integer, None for arguments that all tiles
        share, or a tuple with a pytree prefix for each argument. All mapped axes have the same length. Keyword arguments are
        shared; what is no array is static.
      out_axes: which axis of each result holds positions; None for results that are sums over positions (a loss), which are
        added up.
      tile: positions per tile. The length need not be a multiple of it. None: 8,192 rows of a matrix product on GPUs and
        TPUs, 512 elsewhere, for each device of a mesh; tiles as equal as can be.
      sum_dtype: gradients of shared arrays and results with `out_axes=None` are added up in this dtype, or in their own if
        that has more bits. None: always in their own.
      check: refuse `f` if it mixes positions. The check reads the program of `f` and runs nothing. False: the caller knows
        better, and tiles are contiguous.

    Returns:
      a function with the signature of `f` and, up to rounding, its results and gradients.

    Saved between forward and backward: the arguments alone; the backward pass runs `f` again. With T positions, t a tile, a
    bytes per position that `f` keeps or works with, w bytes of shared arrays and g bytes of their gradients in `sum_dtype`:
    t a + g beside arguments and results, where `f` alone takes T a. The gradient of an argument is written over the cotangent
    of a result of the same type, where that is not needed any more. Time: one more forward pass.

    On a mesh a tile has positions of every device: the axis is taken for as many segments as there are devices, or as its type
    says that it is sharded over, and a tile has the same places of each. So a device computes what it holds, and `tile` is
    rounded down to a multiple of the segments, one position of each at least. That needs check=True.

    Raises:
      ValueError: when called, `f` mixes positions (the message names the operation and its source line), mapped axes are
        missing or of different lengths, or `in_axes` and `out_axes` do not fit.
      TypeError: an argument of the wrong kind; forward-mode differentiation.

    Source: Bekman et al. 2025, "Arctic Long Sequence Training", section 3.1, for feed-forward layers.
    """
    options = _Options(in_axes, out_axes, tile, sum_dtype, check)
    module = wrapped_module(functools.partial(_tiled, options=options), f)
    if module is not None:
        return module
    _check.function("f", f)
    return _tiled(f, options=options)


class _Options:
    def __init__(self, in_axes: Any, out_axes: Any, tile: Any, sum_dtype: Any, checked: Any):
        if tile is not None:
            tile = _check.integer("tile", tile, least=1, what="a number of positions")
        if sum_dtype is not None:
            sum_dtype = _check.dtype("sum_dtype", sum_dtype, floating=True, fix="or None for the arrays' own")
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            for axis in jax.tree.leaves(axes):
                _check.integer(name, axis, what="integers and None")
        if isinstance(in_axes, list):
            in_axes = tuple(in_axes)
        self.in_axes, self.out_axes, self.tile, self.sum_dtype = in_axes, out_axes, tile, sum_dtype
        self.check = _check.flag("check", checked)


def _tiled(f: Callable[..., Any], options: _Options, leading: int = 0) -> Callable[..., Any]:
    """`f` tiled. Its first `leading` arguments are shared; `options.in_axes` are those of the others."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        axes = options.in_axes
        if isinstance(axes, tuple):
            if len(axes) != len(args) - leading:
                wanted = f"a tuple of one entry for each of the {len(args) - leading} arguments"
                raise _check.fail(ValueError, "in_axes", wanted, axes)
        else:
            axes = (axes,) * (len(args) - leading)
        axes = ((None,) * leading + axes, None)
        leaf_axes = _per_leaf("in_axes", axes, (args, kwargs))
        return _call(f, (args, kwargs), leaf_axes, options)

    return run


def _call(f: Callable[..., Any], arguments: Any, leaf_axes: list[int | None], options: _Options) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    paths = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
    mapped: list[bool] = []
    axes: list[int] = []
    length: int | None = None
    for i, (leaf, axis) in enumerate(zip(leaves, leaf_axes, strict=True)):
        mapped.append(axis is not None)
        if axis is None:
            continue
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise _check.fail(TypeError, paths[i], "an array, as in_axes gives it an axis", leaf)
        if not -leaf.ndim <= axis < leaf.ndim:
            raise _check.fail(ValueError, "in_axes", f"axes of {paths[i]}, {_check.shown(leaf)}", axis)
        axes.append(axis % leaf.ndim)
        size = leaf.shape[axis]
        if length is not None and size != length:
            raise _check.fail(ValueError, paths[i], f"{length} long along axis {axis}, as those before", leaf)
        length = size
    _check.known_sizes("remat.tiled", pick(leaves, mapped))
    if length is None:
        raise _check.fail(ValueError, "in_axes", "an axis for at least one array", options.in_axes)
    arrays = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in pick(leaves, mapped)]
    others = drop(leaves, mapped)
    dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in others]
    static = drop(others, dynamic)
    # Sums over devices wait for the last tile: what is shared is made to vary as what is mapped does.
    shared_arrays = vary([jnp.asarray(leaf) for leaf in pick(others, dynamic)], varying_axes(*arrays))

    def flat(shared_leaves: Arrays, tiles: Arrays) -> tuple[Arrays, Any]:
        full = merge(tiles, merge(shared_leaves, static, dynamic), mapped)
        args, kwargs = jax.tree.unflatten(tree, full)
        return f(*args, **kwargs)

    if length == 0:
        return flat(shared_arrays, arrays)
    tile = _default_tile(length, arrays, axes) if options.tile is None else min(options.tile, length)
    if options.check:
        parts, tile = segments(length, arrays, axes, tile)
    else:
        parts = Segments(length, 1)
        for path, array, axis in zip(pick(paths, mapped), arrays, axes, strict=True):
            if shards(jax.typeof(array), axis) > 1:
                fix = (
                    "gather it with jax.sharding.reshard, or use check=True: tiles of a sharded axis are not contiguous"
                )
                raise _check.fail(ValueError, path, f"whole along axis {axis} with check=False", array, fix)
    hoisted = Hoisted(flat)
    states: list[State] = [*(shared(value.shape) for value in shared_arrays), *(Positions(axis, 1) for axis in axes)]

    def traced(size: int) -> _Program:
        tiles = _resized(arrays, axes, size)
        with call_errors("f", f, {"tiles": tiles}):
            return _Program(*hoisted.program(shared_arrays, tiles), states, size)

    program = traced(tile)
    out_axes = _per_leaf("out_axes", options.out_axes, jax.tree.unflatten(program.out_tree, program.out_types))
    out_axes = program.checked_axes(out_axes)
    if options.check:
        refuse_mixed_positions(f, traced, out_axes, tile, length)
    for size in (tile, length % tile or tile):
        hoisted.add(shared_arrays, _resized(arrays, axes, size))
    constants, count = vary(hoisted.constants, varying_axes(*arrays)), len(hoisted.constants)
    guarded = [reverse_only(value, _FORWARD_MODE) for value in (*constants, *shared_arrays, *arrays)]

    def body(shared_values: Arrays, tiles: Arrays) -> Arrays:
        return jax.tree.leaves(hoisted(shared_values[:count], shared_values[count:], tiles))

    types = [
        aval if axis is None else aval.update(shape=with_size(aval.shape, axis, length))
        for aval, axis in zip(program.out_types, out_axes, strict=True)
    ]
    tiles = Tiles(body, axes, out_axes, types, parts, tile, options.sum_dtype, hoisted.axes)
    outs = tiles(guarded[: count + len(shared_arrays)], guarded[count + len(shared_arrays) :])
    return jax.tree.unflatten(program.out_tree, outs)


def _path(path: Any) -> str:
    """The name of a leaf of (arguments, keyword arguments)."""
    return f"argument {jax.tree_util.keystr(path[1:2], simple=True)}{jax.tree_util.keystr(path[2:])}"


class _Program:
    """The function of tiles of `size` positions as JAX traces it, for arguments of these states."""

    def __init__(self, closed: Any, shapes: Any, states: Sequence[State], size: int):
        self.closed, self._states, self._size = closed, states, size
        self.out_tree = jax.tree.structure(shapes)
        self.out_types = [aval.update(weak_type=False) for aval in closed.out_avals]

    def checked_axes(self, out_axes: list[int | None]) -> list[int | None]:
        """The axes, counted from the first. Raises for one that a result does not have, or that is not as long as a tile."""
        checked: list[int | None] = []
        for aval, axis in zip(self.out_types, out_axes, strict=True):
            if axis is None:
                if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                    raise _check.fail(
                        ValueError, "out_axes", f"axes of keys, which cannot be added, {aval.str_short()}", axis
                    )
                checked.append(None)
                continue
            if not -aval.ndim <= axis < aval.ndim:
                raise _check.fail(ValueError, "out_axes", f"axes of the results, here {aval.str_short()}", axis)
            axis %= aval.ndim
            if aval.shape[axis] != self._size:
                wanted = f"the axes that hold positions ({self._size} in a tile), here of {aval.str_short()}"
                raise _check.fail(ValueError, "out_axes", wanted, axis, "None adds results of tiles up")
            checked.append(axis)
        return checked

    def check_results(self, out_axes: Sequence[int | None]) -> Seen:
        """Raises Mixed unless the results have their positions where `out_axes` say."""
        seen = Seen()
        states = Walk(self._size, None in out_axes, apply_rule, seen).program(self.closed.jaxpr, self._states)
        for i, (state, axis) in enumerate(zip(states, out_axes, strict=True)):
            check_result(i, state, axis)
        return seen


def _resized(arrays: Arrays, axes: Sequence[int], size: int) -> list[Any]:
    """The types of tiles of `size` positions."""
    return [
        jax.typeof(array).update(shape=with_size(array.shape, axis, size), weak_type=False)
        for array, axis in zip(arrays, axes, strict=True)
    ]


def _per_leaf(name: str, axes: Any, tree: Any) -> list[int | None]:
    """The axis of each leaf of `tree`, from a prefix of it in which None is an axis, too."""
    is_none = lambda x: x is None
    out: list[int | None] = []

    def spread(axis: Any, subtree: Any) -> None:
        out.extend([axis] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, axes, tree, is_leaf=is_none)
    except ValueError as error:
        raise ValueError(f"{name} must be a pytree prefix of what it describes, got {axes!r}: {error}") from None
    return out


_MULTIPLE = 128  # of which GPUs like rows to be


def _default_tile(length: int, arrays: Sequence[Any], axes: Sequence[int]) -> int:
    """Positions per tile, tiles as equal as can be.

    Dimensions before the positions are taken for examples, which multiply the rows. The rows of a device count.
    On a mesh of automatic axes examples and positions are taken to be spread over all of it.
    """
    types = list(map(jax.typeof, arrays))
    examples = max([math.prod(aval.shape[:axis]) for aval, axis in zip(types, axes, strict=True)], default=1)
    explicit = max(math.prod(shards(aval, i) for i in range(axis + 1)) for aval, axis in zip(types, axes, strict=True))
    rows = rows_of_tile(traced_device().platform).usual * explicit * (automatic_devices(types) or 1)
    wanted = max(1, rows // max(examples, 1))
    tiles = -(-length // wanted)
    tile = -(-length // max(tiles, 1))
    if tiles > 1 and tile > _MULTIPLE:
        tile = -(-tile // _MULTIPLE) * _MULTIPLE
    return max(1, min(tile, length))
