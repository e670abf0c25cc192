"""One gradient of a public ResNet-50, as it is and compressed: `python -m benchmarks.compressed_default --models-path PATH`.

PATH is a folder with Flax's `examples`: see `benchmarks.public_models`. The network, in bfloat16 and at initialisation, gets 256
random images of 224x224. Writes `results/compressed_default.json`; it takes about three minutes on a GPU.

With `--settle 300` it is trained for 300 steps, to the middle of a training, on photographs, with bounds that follow it.
Then all ways get its parameters, and one more has the bounds, and the capacities that the last 20 steps needed.

`--smoke --batch 4 --size 32 --rounds 1 --name scratch` tries it anywhere, with a small network.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import memjax
from benchmarks import record
from benchmarks.cases.gradients import compare, compile_way
from benchmarks.cases.public_models import Case, imagenet_resnet, make_data
from memjax import compress

_CONV = "ErrorBounded(2**-5, bits_per_value=12), where=conv"
_REST = "ChannelQuantized(4) for the rest"
_LAST = 20  # steps


@dataclasses.dataclass(frozen=True)
class Config:
    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples`."""
    batch: int = 256
    size: int = 224
    """Side of the images in pixels."""
    rounds: int = 7
    settle: int = 0
    """Steps of a training before the gradients; 0: none, and random images."""
    data: pathlib.Path | None = None
    """A file of photographs that `benchmarks.public_models --write-data` wrote; without it they are made anew."""
    smoke: bool = False
    """A small network."""
    name: str = "compressed_default"


def convolutions(model: Any, codec: Any = None) -> Any:
    codec = compress.ErrorBounded(2**-5, bits_per_value=12) if codec is None else codec
    return memjax.compressed(model, codec, where="conv")


def with_rest(model: Any, codec: Any = None) -> Any:
    return memjax.compressed(convolutions(model, codec), compress.ChannelQuantized(4))


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compressed(model)": memjax.compressed,
    "compressed(model, bits=4)": functools.partial(memjax.compressed, bits=4),
    _CONV: convolutions,
    f"{_CONV}; {_REST}": with_rest,
}


def main(config: Config) -> None:
    rng = np.random.default_rng(0)
    batch: Any = {
        "images": rng.integers(0, 256, (config.batch, config.size, config.size, 3), np.uint8),
        "labels": rng.integers(0, 16, config.batch, np.int32),
    }
    photos = (make_data() if config.data is None else dict(np.load(config.data))) if config.settle else None
    if photos is not None:
        batch = batch_of(photos, config.settle, config.batch, config.size)
    case = imagenet_resnet(config.models_path, batch, config.smoke)
    params, variables = jax.jit(case.init)(jnp.int32(0))
    args = (params, variables, jax.device_put(batch), jax.random.key(0))
    ways = {name: functools.partial(_gradient, case.loss(wrap)) for name, wrap in WRAPS.items()}
    measured = functools.partial(compare, rounds=config.rounds, gradient_of=lambda result: result[0], show=_show)
    rows: list[dict[str, Any]] = []

    def save(new: list[dict[str, Any]], **about: Any) -> None:
        settings = {"batch": config.batch, "size": config.size, "settle": config.settle}
        rows.extend(row | settings | about for row in new)
        record.save(config.name, rows)

    if photos is not None:
        params, variables, codec, about = settled(case, config, photos, params, variables)
        args = (params, variables, *args[2:])
        _show(about)
    plain = compile_way(args, ways["plain"])
    save(measured(ways | {"plain": plain}, args))
    if photos is not None:
        again = {
            "plain again": plain,
            f"adaptive, where=conv; {_REST}": functools.partial(_adaptive_gradient, case, codec),
        }
        plain, adaptive = measured(again, args)
        save([plain])
        save([adaptive], **about)


def _gradient(loss: Callable[..., Any], *args: Any) -> Any:
    return jax.grad(loss, has_aux=True)(*args)


def adaptive_loss(case: Case, codec: Any, *args: Any) -> Any:
    """The loss with inputs of convolutions in codes of `codec`, which `memjax.compress.layers` makes, and the rest in 4 bits."""
    return case.loss(functools.partial(with_rest, codec=codec))(*args)


def _adaptive_gradient(case: Case, codec: Any, *args: Any) -> Any:
    """As in training, statistics of the arrays are a part of the gradient."""
    loss = lambda params, codec, *rest: adaptive_loss(case, codec, params, *rest)
    (gradient, statistics), others = jax.grad(loss, (0, 1), has_aux=True)(args[0], codec, *args[1:])
    return gradient, (statistics, others)


def settled(
    case: Case, config: Config, photos: dict[str, np.ndarray], params: Any, variables: Any
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Parameters and other variables after a training, its codec, and what is known of it."""
    key = jax.random.key(0)
    batch = lambda step: batch_of(photos, step, config.batch, config.size)
    codec = compress.layers(functools.partial(adaptive_loss, case), params, variables, batch(0), key)
    optimizer = compress.adaptive(case.optimizer(2 * config.settle))
    weights = {"net": params, "codec": codec}

    def step(state: Any, batch: Any) -> Any:
        weights, variables, optimizer_state = state
        loss = lambda weights: adaptive_loss(case, weights["codec"], weights["net"], variables, batch, key)
        (value, variables), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, weights)
        return (optax.apply_updates(weights, updates), variables, optimizer_state), value

    run = compress.transactional(step, window=10**9, ahead=True, donate=False)
    state, losses = (weights, variables, jax.jit(optimizer.init)(weights)), []
    for i in range(config.settle):
        if i == max(config.settle - _LAST, 1):
            state = run.finish(state)
            run._needs = []
        state, value = run(state, batch(i))
        losses.append(value)
    state = run.finish(state)
    weights, variables, optimizer_state = state
    run._lower_capacities([weights["codec"]])
    assert run.capacities is not None
    codec = dataclasses.replace(weights["codec"], bits_per_value=run.capacities[0])
    values = np.array([np.prod(shape) for shape, _ in codec.shapes], float)
    needed = np.asarray(jax.device_get(optimizer_state.last[0].bits))
    return (
        weights["net"],
        variables,
        codec,
        {
            "losses": [round(float(value), 3) for value in losses[:: max(1, config.settle // 10)]],
            "needed_bits_per_value": round(float((needed * values).sum() / values.sum()), 3),
            "code_bits_per_value": round(8 * codec.nbytes() / values.sum(), 3),
            "code_mib": round(codec.nbytes() / 2**20, 1),
        },
    )


def batch_of(photos: dict[str, np.ndarray], step: int, count: int, size: int) -> dict[str, jax.Array]:
    """Crops of photographs, enlarged to `size` pixels a side."""
    chosen = np.random.default_rng(step).integers(len(photos["images"]), size=count)
    images = _enlarged(jnp.asarray(photos["images"][chosen]), size)
    return {"images": images, "labels": jnp.asarray(photos["labels"][chosen])}


@functools.partial(jax.jit, static_argnums=1)
def _enlarged(images: jax.Array, size: int) -> jax.Array:
    enlarged = jax.image.resize(images.astype(jnp.float32), (len(images), size, size, 3), "bicubic")
    return jnp.clip(enlarged, 0, 255).astype(jnp.uint8)


def _show(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
