"""The softmax inside the matmul that makes the logits, for Hopper GPUs.

`statistics` keeps, of each tile of 256 columns, what `rows.stats` would of a chunk, and writes nothing else.
`logit_gradient` multiplies once more and turns the logits into their gradient before they are written. Inside
they are float32, not rounded to x's dtype. Memory of the statistics: 12 N V / 256 bytes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from memjax._linear_cross_entropy.gpu.mosaic_matmul import Operand, Tile, Tiling, matmul, staging, store
from memjax._linear_cross_entropy.options import Array, Operands, Options, columns
from memjax._linear_cross_entropy.rows import Stats, from_sums

plgpu: Any = mosaic_gpu  # its interface differs between versions of JAX

_LOG2E = math.log2(math.e)
_PIECE = 64  # columns that the epilogue works on at a time: a whole tile's would not fit the registers
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def statistics(operands: Operands, options: Options) -> Stats:
    """Row statistics over this device's columns."""
    tokens, dim = operands.x.shape
    width = columns(operands, options)
    tiling = Tiling(band=16)
    size = tiling.columns
    m, n = tiling.grid(tokens, width)
    padded = m * tiling.rows
    names = ["max", "sum", "label", *(["plain"] if options.label_smoothing else []), *(["moment"] * options.aux)]

    def epilogue(products: Array, tile: Tile, inputs: Any, outputs: Any, scratch: Any) -> None:
        label = _load(inputs[0], tile.row, 64, _BY_ROW) - tile.column
        (staged,) = scratch

        def add(first: int, sums: dict[str, Array]) -> dict[str, Array]:
            """`sums` and the piece's columns together, relative to the largest logit so far."""
            bias = None if operands.bias is None else _load(inputs[1], tile.column + first, _PIECE, _BY_COLUMN)
            z = _logits(products[:, first : first + _PIECE], bias, options)
            new = {"max": z.max(axis=1), "label": jnp.where(_hits(label, first), z, 0.0).sum(axis=1)}
            if sums:
                new["max"] = jnp.maximum(sums["max"], new["max"])
            shift = jnp.where(new["max"] == -jnp.inf, 0.0, new["max"]) * _LOG2E
            e = jnp.exp2(z * _LOG2E - _rows(shift))
            new["sum"] = e.sum(axis=1)
            if options.label_smoothing:
                new["plain"] = z.sum(axis=1)
            if options.aux:
                new["moment"] = jnp.where(e == 0.0, 0.0, e * z).sum(axis=1)
            if sums:
                correction = jnp.exp2(sums["max"] * _LOG2E - shift)
                for name in new.keys() - {"max"}:
                    new[name] += sums[name] * correction if name in ("sum", "moment") else sums[name]
            return new

        sums: dict[str, Array] = {}
        for first in range(0, size, _PIECE):
            if first and width % size:
                sums = lax.cond(tile.column + first < width, partial(add, first), lambda sums: sums, sums)
            else:
                sums = add(first, sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, name in enumerate(names):
            staged[tile.warpgroup, i] = sums[name]
        plgpu.commit_smem()
        for i in range(len(names)):
            target = outputs[i].at[tile.column_index, pl.ds(tile.row, 64)]
            plgpu.copy_smem_to_gmem(staged.at[tile.warpgroup, i], target)

    by_tile = matmul(
        Operand(operands.x, 1),
        head(operands, options),
        epilogue,
        shape=(tokens, width, dim),
        inputs=[_pad(operands.labels, padded, -1), *_bias(operands, n * size)],
        outputs=[((n, padded), jnp.float32)] * len(names),
        scratch=[plgpu.SMEM((tiling.warpgroups, len(names), 64), jnp.float32)],
        tiling=tiling,
    )
    return _merge({name: a[:, :tokens] for name, a in zip(names, by_tile, strict=True)}, options)


def _merge(by_tile: dict[str, Array], options: Options) -> Stats:
    maximum = by_tile["max"].max(0)
    scale = jnp.exp(by_tile["max"] - jnp.where(maximum == -jnp.inf, 0.0, maximum))
    plain = by_tile["plain"].sum(0) if options.label_smoothing else None
    moment = (by_tile["moment"] * scale).sum(0) if options.aux else None
    return from_sums(maximum, (by_tile["sum"] * scale).sum(0), plain, moment, by_tile["label"].sum(0), options)


def logit_gradient(operands: Operands, lse: Array, scale: Array, start: Any, size: int, options: Options) -> Array:
    """`scale` times the gradient in `size` columns of the products from `start` on, in x's dtype."""
    tokens, dim = operands.x.shape
    tiling = Tiling(band=8)
    m, n = tiling.grid(tokens, size)
    padded = m * tiling.rows
    keep, spread = 1.0 - options.label_smoothing, options.label_smoothing / options.vocabulary

    def epilogue(products: Array, tile: Tile, inputs: Any, outputs: Any, scratch: Any) -> None:
        label = _load(inputs[0], tile.row, 64, _BY_ROW) - (tile.start + tile.column)
        log_sum = _load(inputs[1], tile.row, 64, _BY_ROW) * _LOG2E
        factor = _load(inputs[2], tile.row, 64, _BY_ROW)
        mass = _load(inputs[3], tile.row, 64, _BY_ROW) if options.z_loss else None

        def piece(first: int) -> Array:
            bias = None
            if operands.bias is not None:
                bias = _load(inputs[-1], tile.start + tile.column + first, _PIECE, _BY_COLUMN)
            z = _logits(products[:, first : first + _PIECE], bias, options)
            d = jnp.exp2(z * _LOG2E - _rows(log_sum))
            if mass is not None:
                d = d * _rows(mass)
            d = jnp.where(_hits(label, first), d - keep, d)
            if spread:
                d = d - spread
            if options.softcap is not None:
                d = d * (1.0 - (z / options.softcap) ** 2)
            return d * _rows(factor)

        store(piece, outputs[0], tile, tiling, *scratch)

    by_row = [_pad(operands.labels, padded, -1), _pad(lse, padded), _pad(scale * options.logit_scale, padded)]
    if options.z_loss:
        by_row.append(_pad(1.0 + 2.0 * options.z_loss * lse, padded))
    (d,) = matmul(
        Operand(operands.x, 1),
        head(operands, options),
        epilogue,
        shape=(tokens, size, dim),
        start=start,
        inputs=[*by_row, *_bias(operands, columns(operands, options) + n * tiling.columns)],
        outputs=[((tokens, size), operands.x.dtype)],
        scratch=[staging(operands.x.dtype, tiling)],
        tiling=tiling,
    )
    return d


def head(operands: Operands, options: Options, *, contract_vocabulary: bool = False) -> Operand:
    """The window of `w` that begins at an entry of the vocabulary."""
    v = options.layout.index("v")
    return Operand(operands.w, v if contract_vocabulary else 1 - v, axis=v)


def _logits(products: Array, bias: Array | None, options: Options) -> Array:
    z = products
    if bias is not None:
        z = z + lax.broadcast_in_dim(bias, z.shape, (1,))
    if options.logit_scale != 1.0:
        z = z * options.logit_scale
    if options.softcap is not None:
        # The hardware's own tanh has 11 bits.
        z = options.softcap * (1.0 - 2.0 / (jnp.exp2(z * (2.0 * _LOG2E / options.softcap)) + 1.0))
    return z


def _hits(labels: Array, first: int) -> Array:
    column = plgpu.broadcasted_iota(jnp.int32, (64, _PIECE), 1, layout=plgpu.Layout.WGMMA)
    return column == _rows(labels - first)


def _rows(vector: Array) -> Array:
    return lax.broadcast_in_dim(vector, (64, _PIECE), (0,))


def _load(ref: Any, start: Any, size: int, layout: Any) -> Array:
    return plgpu.load(ref.at[pl.ds(start, size)], layout=layout, optimized=False)


def _pad(vector: Array, size: int, value: Any = 0) -> Array:
    """The vector, padded: tiles reach over the last token and the last entry of the vocabulary."""
    return jnp.pad(vector, (0, size - vector.shape[0]), constant_values=value)


def _bias(operands: Operands, padded: int) -> list[Array]:
    return [] if operands.bias is None else [_pad(operands.bias.astype(jnp.float32), padded)]
