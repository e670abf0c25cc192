"""How far gradients of a public ResNet-50 are from those of float32: `python -m benchmarks.compressed_error --models-path PATH`.

PATH is a folder with Flax's `examples`: see `benchmarks.public_models`. In bfloat16 the plain step itself is off, and any other
order of operations changes its rounding. So each way is compared with the plain step in float32, after a training in bfloat16 of
80 steps on photographs. Writes `results/compressed_error.json`; about two and a half minutes on a GPU.

`--smoke --batch 4 --size 32 --steps 2 --name scratch` tries it anywhere, with a small network.
"""

import dataclasses
import functools
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks import record
from benchmarks.cases.gradients import relative_distance
from benchmarks.cases.public_models import Case, imagenet_resnet, make_data
from benchmarks.compressed_default import WRAPS, batch_of

_KEY = 0


@dataclasses.dataclass(frozen=True)
class Config:
    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples`."""
    batch: int = 256
    size: int = 224
    """Side of the images in pixels."""
    steps: int = 80
    """How long the network is trained before, in steps."""
    data: pathlib.Path | None = None
    """A file of photographs that `benchmarks.public_models --write-data` wrote; without it they are made anew."""
    smoke: bool = False
    """A small network."""
    name: str = "compressed_error"


NAMES = ("plain", "compressed(model)", "compressed(model, bits=4)")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def main(config: Config) -> None:
    photos = make_data() if config.data is None else dict(np.load(config.data))
    case = imagenet_resnet(config.models_path, photos, config.smoke)
    params, variables = trained(case, config, photos)
    args = (params, variables, batch_of(photos, config.steps, config.batch, config.size), jax.random.key(_KEY))

    ways = {(dtype, name): functools.partial(_gradient, case, dtype, name) for dtype in DTYPES for name in NAMES}
    with ThreadPoolExecutor(len(ways)) as pool:
        programs = pool.map(lambda way: jax.jit(way).lower(*args).compile(), ways.values())
        compiled = dict(zip(ways, programs, strict=True))

    rows: list[dict[str, Any]] = []
    plain: dict[str, Any] = {}
    for (dtype, name), program in compiled.items():
        gradient = program(*args)
        if name == "plain":
            plain[dtype] = gradient
        rows.append(
            {
                "dtype": dtype,
                "case": name,
                "from_float32": float(relative_distance(gradient, plain["float32"])),
                "from_plain": float(relative_distance(gradient, plain[dtype])),
                "batch": config.batch,
                "size": config.size,
                "steps": config.steps,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    record.save(config.name, rows)


def _gradient(case: Case, dtype: str, name: str, *args: Any) -> Any:
    loss = case.loss(lambda model: WRAPS[name](model.clone(dtype=DTYPES[dtype])))
    # Otherwise GPUs multiply float32 with the digits of bfloat16, or few more.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        return jax.grad(lambda *args: loss(*args)[0])(*args)


def trained(case: Case, config: Config, photos: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Parameters and other variables after a training without codes."""
    params, variables = jax.jit(case.init)(jnp.int32(0))
    loss, optimizer, key = case.loss(WRAPS["plain"]), case.optimizer(2 * config.steps), jax.random.key(_KEY)

    @jax.jit
    def step(params: Any, variables: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        gradient, variables = jax.grad(loss, has_aux=True)(params, variables, batch, key)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), variables, state

    state = optimizer.init(params)
    for i in range(config.steps):
        params, variables, state = step(params, variables, state, batch_of(photos, i, config.batch, config.size))
    return params, variables


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
