"""The codec of each array that a call encodes: one codec for all arrays, or `Layers`, with a codec for each of them.

What the rest of this room asks of a codec it asks here: a user's codec needs `encode`, `decode` and `nbytes` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from memjax._core import check
from memjax._core.arrays import zeros
from memjax._core.lists import merge
from memjax.compress._training.layers import Layers, Recorder, Statistics
from memjax.compress._transform.overflow import warn_of_overflow
from memjax.compress._transform.statistics import Collector


class ArrayCodec:
    """A codec with all the optional members of `memjax.compress.Codec`; those that it lacks have their defaults.

    Attributes:
      encode, decode: of the codec.
      elementwise: whether decoding is arithmetic on single values, which the compiler may fuse into what reads them.
      measured: gives an elementwise encoder from an array, or is None.
      scaled: gives the codec with its bound in units of each channel's standard deviation, or is None.
      without_signs: gives what decodes the same codes where signs do not matter.
    """

    def __init__(self, codec: Any):
        self.encode, self.decode = codec.encode, codec.decode
        self.elementwise = getattr(codec, "elementwise", False)
        self.measured: Any = getattr(codec, "measured", None)
        self.scaled: Any = getattr(codec, "scaled", None)
        self.without_signs = getattr(codec, "without_signs", lambda: codec)


class ArrayCodecs:
    """One codec for all arrays. Its overflows are said.

    Attributes:
      name: of the codec, for messages.
      keeps_zeros: whether decoded values are zero exactly where the values are.
      reads_gradients: whether the backward pass has something to say of what is multiplied into gradients: see `record`
        and `collector`.
    """

    reads_gradients = False

    def __init__(self, codec: Any):
        self._codec = codec
        self._nbytes: dict[Any, int] = {}
        self.name = type(codec).__name__
        self.keeps_zeros = bool(getattr(codec, "keeps_zeros", False))

    def codec(self, i: int) -> ArrayCodec:
        """The codec of the i-th array."""
        return ArrayCodec(self._codec)

    def nbytes(self, aval: Any) -> int:
        """Bytes of the code of an array of this type."""
        if aval not in self._nbytes:  # which most codecs trace themselves for
            self._nbytes[aval] = int(check.number("codec.nbytes", self._codec.nbytes(aval), least=0))
        return self._nbytes[aval]

    def check_count(self, arrays: int) -> None:
        """Raise ValueError if there are no settings for so many arrays."""

    def report_overflows(self, names: Sequence[str], codes: Sequence[Any]) -> None:
        """Say at run time which of the arrays' codes overflow."""
        warn_of_overflow(names, codes)

    def record(self, names: list[str], weights: list[tuple[str, ...]], avals: list[Any]) -> None:
        """Note, by array, its name, the weights whose gradients it is multiplied into, and its type."""

    def collector(self, seen: Any) -> Collector | None:
        """What gathers statistics in a backward pass of the cotangents and codes `seen`."""
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


class _OfLayers(ArrayCodecs):
    """A codec for each array, and statistics. Overflows are among these, and lead to another try: see `transactional`."""

    reads_gradients = True

    def codec(self, i: int) -> ArrayCodec:
        return ArrayCodec(self._codec.layer(i))

    def nbytes(self, aval: Any) -> int:
        """Nothing: codes say what they need, so they are made even where they are larger than the array."""
        return 0

    def check_count(self, arrays: int) -> None:
        self._codec.check(arrays)

    def report_overflows(self, names: Sequence[str], codes: Sequence[Any]) -> None:
        pass

    def collector(self, seen: Any) -> Collector | None:
        return Collector(self._codec.statistics, self._codec.samples, seen)

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        assert statistics is not None
        bound = zeros(jax.typeof(self._codec.bound))
        return _OfLayers(dataclasses.replace(self._codec, bound=bound, statistics=statistics)).settings


class _OfRecorder(_OfLayers):
    """Notes what is encoded: see `memjax.compress.layers`."""

    def record(self, names: list[str], weights: list[tuple[str, ...]], avals: list[Any]) -> None:
        self._codec.record(names, weights, avals)

    def collector(self, seen: Any) -> Collector | None:
        return None

    def settings_cotangents(self, statistics: Statistics | None) -> list[Any]:
        return []


def array_codecs(codec: Any) -> ArrayCodecs:
    """The codecs of arrays that the argument `codec` of `memjax.compressed` stands for."""
    if isinstance(codec, Layers):
        return _OfLayers(codec)
    if isinstance(codec, Recorder):
        return _OfRecorder(codec)
    methods = ("encode", "decode", "nbytes")
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in methods):
        fix = "pass memjax.compress.BlockQuantized(8), or leave it out"
        raise check.fail(TypeError, "codec", "a codec", codec, fix)
    return ArrayCodecs(codec)


def _is_setting(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
