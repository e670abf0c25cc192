"""The codec of each array that a call encodes: one codec for all arrays, or `Layers`, with a codec for each of them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from memjax._core import check
from memjax._core.arrays import zeros
from memjax._core.lists import drop, merge
from memjax._core.platforms import traced_device
from memjax._core.program.costs import flops_of_coding
from memjax.compress._codecs.bits import widths_with
from memjax.compress._codecs.block_quantized import BlockQuantized, RectifiedBlocks
from memjax.compress._codecs.codec import Exact, OptionalMembers, StepErrors, with_optional_members
from memjax.compress._codecs.position_quantized import PositionQuantized
from memjax.compress._error_bounded.error_bounded import ErrorBounded, warn_of_overflow
from memjax.compress._training.array_bits import (
    CODED,
    WIDE,
    ArrayBits,
    BitsRecorder,
    Errors,
    base_of,
    check_bits,
    check_sigma,
    fewest_bits,
    gaussian_error,
    is_whole,
)
from memjax.compress._training.layers import Layers, Recorder, Statistics, Weighed
from memjax.compress._transform.statistics import Collector

_FINE = 2  # times the bits of others
_WHOLE = 16  # bits of a value that is not encoded
_REQUIRED = ("encode", "decode", "nbytes")  # of a codec


class Role(NamedTuple):
    """What the choice of an array's codec depends on.

    Attributes:
      aval: its type.
      is_fine: whether the backward pass subtracts two products from each other and this array is a factor of one:
        `Need.FINE`.
      is_wide: whether its values differ by orders of magnitude, as those of an exponential or a softmax do.
      by_channel: whether a convolution or a batch norm reads it, whose channels have scales of their own.
      share: its size as a share of the largest array's.
      is_source: whether other saved arrays are computed from it.
      is_rectified: whether it has the signs of max(x, 0): zeros, and no negative values.
    """

    aval: Any
    is_fine: bool
    is_wide: bool
    by_channel: bool
    share: float
    is_source: bool = False
    is_rectified: bool = False


def waits(codec: OptionalMembers) -> bool:
    """Whether decoding waits for the cotangent that meets the decoded array.

    On a GPU, decoding that is arithmetic on single values is fused into what reads the array, which waiting would prevent.
    XLA:CPU decodes such codes in the forward pass if they do not wait, and keeps the decoded arrays. So does XLA:GPU where a
    product reads what is computed from a decoded array: that always waits, see `run_late`.
    """
    return traced_device().platform != "gpu" or is_fused(codec) or not codec.elementwise


def is_fused(codec: Any) -> bool:
    """Whether compilers make codes in the pass over memory that reads the array next."""
    return isinstance(codec, PositionQuantized)


class ArrayCodecs:
    """One codec for all arrays, whose overflows are reported at run time.

    Attributes:
      name: the codec's class, for messages.
      reads_gradients: whether the backward pass finds the arrays that are multiplied into gradients, and calls `collector`.
      in_iterations: whether loops may encode in each iteration: not where each array of a call has something of its own.
      keeps_fine: whether arrays that have to be fine are not encoded.
      keeps_chains: whether outputs of residual blocks may be recomputed, one from the other.
      keeps_images: whether inputs of few channels that a convolution reads are not encoded.
      flops_of_coding: see `costs.flops_of_coding`; 0 where the user has chosen the codec. A product that takes fewer FLOPs for
        each byte of its result is rather repeated.
    """

    reads_gradients = False
    in_iterations = True
    keeps_fine = False
    keeps_images = False
    keeps_chains = False

    @property
    def flops_of_coding(self) -> int:
        return 0

    def __init__(self, codec: Any):
        self._codec = codec
        self._nbytes: dict[Any, int] = {}
        self.name = type(codec).__name__

    @property
    def keeps_zeros(self) -> bool:
        """Whether decoded values are zero exactly where the values are, for all arrays."""
        return with_optional_members(self._codec).keeps_zeros

    def keeps_zeros_of(self, role: Role) -> bool:
        """Whether `keeps_zeros` holds for an array with this role."""
        return self.keeps_zeros

    def each(self, roles: Sequence[Role]) -> list[Any]:
        """The codecs of arrays with these roles, with all optional members."""
        return [with_optional_members(self._codec)] * len(roles)

    def bits(self, arrays: Iterable[Any]) -> float:
        """Bits per value, about, of the code of the largest of some variables."""
        largest = max((var.aval for var in arrays), key=lambda aval: aval.size, default=None)
        return _WHOLE if largest is None else 8 * self.nbytes(largest) / largest.size or _WHOLE

    def nbytes(self, aval: Any, role: Role | None = None) -> int:
        """Bytes of the code of an array of this type."""
        if aval not in self._nbytes:  # cached: most codecs find the size by tracing `encode`
            self._nbytes[aval] = int(check.number("codec.nbytes", self._codec.nbytes(aval), least=0))
        return self._nbytes[aval]

    def encoded(self, names: Sequence[str], roles: Sequence[Role], codes: Sequence[Any]) -> None:
        """Called with the arrays that a forward pass encodes, and their codes. Reports at run time which codes overflow."""
        warn_of_overflow(names, codes)

    def collector(self, arrays: list[Weighed], cotangents_and_codes: Any) -> Collector | None:
        """The collector of these arrays' statistics in a backward pass; None: none are collected."""
        return None

    @property
    def settings(self) -> list[Any]:
        """The leaves of the codec that are JAX arrays, such as its bound; they are passed as inputs.

        Python numbers are compile-time constants.
        """
        return [leaf for leaf in jax.tree.leaves(self._codec) if _is_setting(leaf)]

    def with_settings(self, settings: list[Any]) -> ArrayCodecs:
        leaves, tree = jax.tree.flatten(self._codec)
        changed, mask = copy.copy(self), list(map(_is_setting, leaves))
        changed._codec = jax.tree.unflatten(tree, merge(settings, drop(leaves, mask), mask))
        return changed

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        """The "gradient" of `settings`: None for each, or statistics in their place."""
        return [None] * len(self.settings)


class _ByBits(ArrayCodecs):
    """A codec for each array by its role.

    What convolutions and batch norms read gets `RectifiedBlocks` if it is the output of a ReLU, whose mask then follows from
    the code, or else `BlockQuantized`. All else gets `PositionQuantized`. An array of these that is smaller than the largest
    gets more bits, half a bit each time that its size halves: so the sum of the errors is least for all bytes. With 4 bits, what
    other saved arrays are computed from gets one more: its errors are theirs, too. Values of a softmax have 8 bits or more,
    and what has to be fine twice as many as others: with 8 and 6 it is exact.

    Args:
      bits: what is encoded is decided as for so many bits.
      given: in place of a number of bits: a sigma, `ArrayBits`, or what stands for these.
    """

    keeps_zeros = False
    keeps_images = True

    def __init__(self, bits: int, given: float | ArrayBits | BitsRecorder | Errors | None = None):
        super().__init__(given)
        self._bits, self.name = bits, "PositionQuantized"
        self.in_iterations = not isinstance(given, ArrayBits | BitsRecorder) and getattr(given, "scales", None) is None
        self.keeps_fine = _FINE * bits > CODED[0]
        self.keeps_chains = given is None and bits == 8  # with fewer bits errors add up to much

    @property
    def flops_of_coding(self) -> int:
        # Of the device that is traced for, which may be another one than where the function was wrapped.
        return flops_of_coding(traced_device().platform)

    def each(self, roles: Sequence[Role]) -> list[Any]:
        given = self._codec
        if isinstance(given, float):
            return _by_sigma(given, roles)
        if isinstance(given, ArrayBits):
            given.check_count(len(roles))
            return list(map(_with_bits, roles, given.bits))
        by_role = list(map(self._codec_of, roles))
        if not isinstance(given, Errors):
            return by_role
        if given.scales is None:
            return [StepErrors(codec, given.seed, 1.0) for codec in by_role]
        return [StepErrors(_with_bits(role, 8), given.seed, given.scales[i]) for i, role in enumerate(roles)]

    def keeps_zeros_of(self, role: Role) -> bool:
        return role.by_channel and role.is_rectified

    def bits(self, arrays: Iterable[Any]) -> float:
        return self._bits

    def nbytes(self, aval: Any, role: Role | None = None) -> int:
        codec = PositionQuantized(self._bits) if role is None else self._codec_of(role)
        if (aval, codec) not in self._nbytes:
            self._nbytes[aval, codec] = codec.nbytes(aval)
        return self._nbytes[aval, codec]

    def encoded(self, names: Sequence[str], roles: Sequence[Role], codes: Sequence[Any]) -> None:
        """These codes cannot overflow."""
        if isinstance(self._codec, BitsRecorder):
            self._codec.record(names, [role.aval.size for role in roles], list(map(_choices, roles)))

    def _codec_of(self, role: Role) -> Any:
        if role.by_channel:
            return _by_channel(role, self._bits)
        more = role.is_source and self._bits == 4
        least = max(self._bits + more - math.log2(role.share) / 2, WIDE if role.is_wide else 0)
        least = max(least, _FINE * self._bits if role.is_fine else 0)
        return PositionQuantized(next((bits for bits in reversed(CODED) if bits >= least), CODED[0]))


def _by_sigma(sigma: float, roles: Sequence[Role]) -> list[Any]:
    """The bits with which the fewest bytes are kept if gradients are off by `sigma` where arrays are, on average.

    So it is if arrays and cotangents are independent and normally distributed: the gradient of a weight is a sum over positions,
    and its relative error is that of the array that it is a product with. Errors of arrays that others are computed from count
    twice.
    """
    squares = [(gaussian_error(8) * (2 if role.is_source else 1)) ** 2 for role in roles]
    chosen = fewest_bits(squares, [role.aval.size for role in roles], sigma**2 * len(roles), list(map(_choices, roles)))
    return list(map(_with_bits, roles, chosen))


def _choices(role: Role) -> tuple[int, ...]:
    """The bits that an array may have, most first."""
    coded = widths_with("number") if role.by_channel else CODED
    least = WIDE if role.is_fine or role.is_wide else 0
    return (8 * role.aval.dtype.itemsize, *(bits for bits in coded if bits >= least))


def _with_bits(role: Role, bits: int) -> Any:
    if is_whole(bits):
        return Exact()
    return _by_channel(role, bits) if role.by_channel else PositionQuantized(bits)


def _by_channel(role: Role, bits: int) -> Any:
    fewest = min(own for own in widths_with("number") if own >= bits)
    return (RectifiedBlocks if role.is_rectified else BlockQuantized)(fewest)


class _LayersCodecs(ArrayCodecs):
    """A codec for each array, and statistics. These have the overflows, which lead to another try: see `transactional`."""

    reads_gradients = True
    in_iterations = False
    keeps_zeros = True

    def each(self, roles: Sequence[Role]) -> list[Any]:
        self._codec.check_count(len(roles))
        return [self._codec.layer(i) for i in range(len(roles))]

    def nbytes(self, aval: Any, role: Role | None = None) -> int:
        """Nothing: codes say what they need, so they are made even where they are larger than the array."""
        return 0

    def encoded(self, names: Sequence[str], roles: Sequence[Role], codes: Sequence[Any]) -> None:
        pass

    def collector(self, arrays: list[Weighed], cotangents_and_codes: Any) -> Collector | None:
        return Collector(self._codec.statistics, self._codec.samples, cotangents_and_codes)

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        assert statistics is not None
        bound = zeros(jax.typeof(self._codec.bound))
        return _LayersCodecs(dataclasses.replace(self._codec, bound=bound, statistics=statistics)).settings


class _RecorderCodecs(_LayersCodecs):
    """Records which arrays are encoded: see `memjax.compress.layers`."""

    def each(self, roles: Sequence[Role]) -> list[Any]:
        return [ErrorBounded(1.0)] * len(roles)

    def collector(self, arrays: list[Weighed], cotangents_and_codes: Any) -> Collector | None:
        self._codec.arrays.extend(arrays)
        return None

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        return []


def array_codecs(codec: Any, bits: Any = None, sigma: float | None = None) -> ArrayCodecs:
    """The codecs of arrays that the arguments `codec`, `bits` and `sigma` of `memjax.compressed` stand for."""
    if codec is None:
        if sigma is not None and bits is not None:
            raise check.fail(ValueError, "sigma", "left out beside bits", sigma, "one of them says what errors may be")
        if sigma is not None:
            return _ByBits(base_of(check_sigma(sigma)), float(sigma))
        if isinstance(bits, ArrayBits | BitsRecorder | Errors):
            return _ByBits(check_bits(bits.base), bits)
        return _ByBits(8 if bits is None else check_bits(bits))
    if bits is not None:
        raise check.fail(ValueError, "bits", "left out beside a codec", bits, "give the codec its bits")
    if sigma is not None:
        raise check.fail(ValueError, "sigma", "left out beside a codec", sigma, "its errors are what they are")
    if isinstance(codec, Layers):
        return _LayersCodecs(codec)
    if isinstance(codec, Recorder):
        return _RecorderCodecs(codec)
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in _REQUIRED):
        fix = "pass memjax.compress.BlockQuantized(8), or leave it out"
        raise check.fail(TypeError, "codec", "a codec", codec, fix)
    return ArrayCodecs(codec)


def _is_setting(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
