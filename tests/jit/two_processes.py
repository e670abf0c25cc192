"""Three steps over two devices, in one process or two: `python two_processes.py FOLDER CACHE ADDRESS COUNT NUMBER`."""

import pathlib
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax

WIDTH, LAYERS, BATCH = 64, 3, 512
TX = optax.adam(1e-3)


def loss(params, x):
    for w in params:
        x = jax.numpy.tanh(x @ w) + x
    # A parameter of this loss is a set of names, whose order is another in each process.
    labels = jax.numpy.argmax(x, -1)
    return jax.numpy.mean(x * x) + memjax.linear_cross_entropy(x, params[0], labels)


def train_step(params, state, x):
    grads = jax.grad(loss)(params, x)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def main(folder, cache, address, count, number):
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(number))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    put = lambda value, spec: jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index]
    )
    params = [put(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8, P()) for _ in range(LAYERS)]
    x = put(rng.normal(size=(BATCH, WIDTH)).astype(np.float32), P("data"))
    state = jax.jit(TX.init)(params)
    plain = memjax.jit(train_step, budget="1TiB").plan(params, state, x)
    step = memjax.jit(
        train_step, budget=int(0.85 * plain.nbytes), cache_dir=None if cache == "none" else f"{cache}{number}"
    )
    plan = step.plan(params, state, x)
    for _ in range(3):
        params, state = step(params, state, x)
    refusal = ""
    try:
        memjax.jit(train_step, budget="1KiB").plan(params, state, x)
    except ValueError as error:
        refusal = str(error)
    name = pathlib.Path(folder) / f"{jax.process_index()}_of_{jax.process_count()}"
    np.savez(f"{name}.npz", *map(np.asarray, params))
    name.with_suffix(".json").write_text(plan.to_json())
    name.with_suffix(".txt").write_text(refusal)


if __name__ == "__main__":
    main(*sys.argv[1:])
