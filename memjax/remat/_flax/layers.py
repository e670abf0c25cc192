"""Layers of a `Sequential`: what they may be, and how one hands on what the layer before gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx

from memjax._core import check
from memjax._core.clear_errors import call_errors


def check_layers(layers: Any, module: type) -> None:
    """Raises unless all layers are functions or instances of modules."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise check.fail(TypeError, "layers", "a sequence of modules and functions", layers)
    if not layers:
        raise check.fail(ValueError, "layers", "at least one module or function", layers)
    for i, layer in enumerate(layers):
        is_other = isinstance(layer, nn.Module | nnx.Module) and not isinstance(layer, module)
        if is_other or not callable(layer):
            fix = "memjax.remat.Chain takes modules of NNX, memjax.remat.linen.Chain those of Linen" if is_other else ""
            raise check.fail(TypeError, f"layers[{i}]", "a module or a function", layer, fix)
        check.function(f"layers[{i}]", layer)


def call(layer: Callable[..., Any], x: Any) -> Any:
    """The output of a layer: a tuple gives its arguments, a dict its keyword arguments, anything else its one argument."""
    with call_errors("layers", layer, {"an input": x}):
        if isinstance(x, tuple):
            return layer(*x)
        return layer(**x) if isinstance(x, Mapping) else layer(x)
