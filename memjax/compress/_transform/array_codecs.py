"""The codec of each array that a call encodes: one codec for all arrays, or `Layers`, with a codec for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from memjax._core import check
from memjax._core.arrays import zeros
from memjax._core.lists import merge
from memjax.compress._codecs.codec import OptionalMembers, with_optional_members
from memjax.compress._error_bounded.error_bounded import ErrorBounded
from memjax.compress._training.layers import EncodedArray, Layers, Recorder, Statistics
from memjax.compress._transform.overflow import warn_of_overflow
from memjax.compress._transform.statistics import Collector


@runtime_checkable
class _Required(Protocol):
    """What `compressed` needs of a codec."""

    def encode(self, x: Any) -> Any: ...
    def decode(self, code: Any) -> Any: ...
    def nbytes(self, aval: Any) -> int: ...


def waits(codec: OptionalMembers) -> bool:
    """Whether decoding waits for the cotangent that meets the decoded array.

    On a GPU, decoding that is arithmetic on single values is fused into what reads the array, which waiting would prevent.
    XLA:CPU decodes such codes in the forward pass if they do not wait, and keeps the decoded arrays.
    """
    return jax.default_backend() != "gpu" or not codec.elementwise


class ArrayCodecs:
    """One codec for all arrays, whose overflows are reported at run time.

    Attributes:
      name: the codec's class, for messages.
      reads_gradients: whether the backward pass looks for what it multiplies into gradients, and calls `collector`.
    """

    reads_gradients = False

    def __init__(self, codec: Any):
        self._codec = codec
        self._nbytes: dict[Any, int] = {}
        self.name = type(codec).__name__

    @property
    def keeps_zeros(self) -> bool:
        """Whether decoded values are zero exactly where the values are."""
        return with_optional_members(self._codec).keeps_zeros

    def each(self, count: int) -> list[Any]:
        """The codec of each of so many arrays, with all optional members."""
        return [with_optional_members(self._codec)] * count

    def nbytes(self, aval: Any) -> int:
        """Bytes of the code of an array of this type."""
        if aval not in self._nbytes:  # most codecs trace themselves to tell
            self._nbytes[aval] = int(check.number("codec.nbytes", self._codec.nbytes(aval), least=0))
        return self._nbytes[aval]

    def report_overflows(self, names: Sequence[str], codes: Sequence[Any]) -> None:
        """Say at run time which of the arrays' codes overflow."""
        warn_of_overflow(names, codes)

    def collector(self, arrays: list[EncodedArray], cotangents_and_codes: Any) -> Collector | None:
        """What gathers statistics of these arrays in a backward pass."""
        return None

    @property
    def settings(self) -> list[Any]:
        """The codec's leaves that are arrays: its bound, perhaps. What is a Python number is part of the program."""
        return [leaf for leaf in jax.tree.leaves(self._codec) if _is_setting(leaf)]

    def with_settings(self, settings: list[Any]) -> ArrayCodecs:
        leaves, tree = jax.tree.flatten(self._codec)
        others = [leaf for leaf in leaves if not _is_setting(leaf)]
        return type(self)(jax.tree.unflatten(tree, merge(settings, others, [_is_setting(leaf) for leaf in leaves])))

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        """The "gradient" of `settings`: None for each, or statistics in their place."""
        return [None] * len(self.settings)


class _LayersCodecs(ArrayCodecs):
    """A codec for each array, and statistics. These have the overflows, which lead to another try: see `transactional`."""

    reads_gradients = True
    keeps_zeros = True

    def each(self, count: int) -> list[Any]:
        self._codec.check_count(count)
        return [self._codec.layer(i) for i in range(count)]

    def nbytes(self, aval: Any) -> int:
        """Nothing: codes say what they need, so they are made even where they are larger than the array."""
        return 0

    def report_overflows(self, names: Sequence[str], codes: Sequence[Any]) -> None:
        pass

    def collector(self, arrays: list[EncodedArray], cotangents_and_codes: Any) -> Collector | None:
        return Collector(self._codec.statistics, self._codec.samples, cotangents_and_codes)

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        assert statistics is not None
        bound = zeros(jax.typeof(self._codec.bound))
        return _LayersCodecs(dataclasses.replace(self._codec, bound=bound, statistics=statistics)).settings


class _RecorderCodecs(_LayersCodecs):
    """Records which arrays are encoded: see `memjax.compress.layers`."""

    def each(self, count: int) -> list[Any]:
        return [ErrorBounded(1.0)] * count

    def collector(self, arrays: list[EncodedArray], cotangents_and_codes: Any) -> Collector | None:
        self._codec.arrays.extend(arrays)
        return None

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        return []


def array_codecs(codec: Any) -> ArrayCodecs:
    """The codecs of arrays that the argument `codec` of `memjax.compressed` stands for."""
    if isinstance(codec, Layers):
        return _LayersCodecs(codec)
    if isinstance(codec, Recorder):
        return _RecorderCodecs(codec)
    if isinstance(codec, type) or not isinstance(codec, _Required):
        fix = "pass memjax.compress.BlockQuantized(8), or leave it out"
        raise check.fail(TypeError, "codec", "a codec", codec, fix)
    return ArrayCodecs(codec)


def _is_setting(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
