"""Layers of a `Sequential`: what they may be, and how one hands on what the layer before gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memjax._core import check


def check_layers(layers: Any, module: type) -> None:
    """That all layers are functions or instances of modules."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise check.fail(TypeError, "layers", "a sequence of modules and functions", layers)
    for i, layer in enumerate(layers):
        if not callable(layer) or (isinstance(layer, type) and issubclass(layer, module)):
            raise check.fail(TypeError, f"layers[{i}]", "a module or a function", layer)


def call(layer: Callable[..., Any], x: Any) -> Any:
    """The output of a layer: a tuple gives its arguments, a dict its keyword arguments, anything else its one argument."""
    if isinstance(x, tuple):
        return layer(*x)
    return layer(**x) if isinstance(x, Mapping) else layer(x)
