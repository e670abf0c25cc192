"""One gradient of a public ResNet-50, as it is and compressed: `python -m benchmarks.compressed_default --models-path PATH`.

PATH is a folder with Flax's `examples`: see `benchmarks.public_models`. The network, in bfloat16 and at initialisation, gets 256
random images of 224x224. Writes `results/compressed_default.json`; it takes about three minutes on a GPU. `--smoke --batch 4
--size 32 --rounds 1 --name scratch` tries it anywhere, with a small network.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import memjax
from benchmarks import record
from benchmarks.cases.gradients import compare
from benchmarks.cases.public_models import imagenet_resnet
from memjax import compress

_CONV = "ErrorBounded(2**-5, bits_per_value=12), where=conv"


@dataclasses.dataclass(frozen=True)
class Config:
    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples`."""
    batch: int = 256
    size: int = 224
    """Side of the images in pixels."""
    rounds: int = 7
    smoke: bool = False
    """A small network."""
    name: str = "compressed_default"


def convolutions(model: Any) -> Any:
    codec = compress.ErrorBounded(2**-5, bits_per_value=12)
    return memjax.compressed(model, codec, where="conv")


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compressed(model)": memjax.compressed,
    _CONV: convolutions,
    f"{_CONV}; ChannelQuantized(4) for the rest": lambda model: memjax.compressed(
        convolutions(model), compress.ChannelQuantized(4)
    ),
}


def main(config: Config) -> None:
    rng = np.random.default_rng(0)
    batch = {
        "images": rng.integers(0, 256, (config.batch, config.size, config.size, 3), np.uint8),
        "labels": rng.integers(0, 16, config.batch, np.int32),
    }
    case = imagenet_resnet(config.models_path, batch, config.smoke)
    params, variables = jax.jit(case.init)(jnp.int32(0))

    def gradient(loss: Callable[..., Any], *args: Any) -> Any:
        return jax.grad(loss, has_aux=True)(*args)[0]

    ways = {name: functools.partial(gradient, case.loss(wrap)) for name, wrap in WRAPS.items()}
    rows = compare(ways, (params, variables, jax.device_put(batch), jax.random.key(0)), rounds=config.rounds)
    for row in rows:
        Console(width=150).print(row)
    record.save(config.name, [row | {"batch": config.batch, "size": config.size} for row in rows])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
