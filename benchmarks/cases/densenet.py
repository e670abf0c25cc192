"""One DenseNet training step, in JAX or in torchvision, measured in this process.

`python -m benchmarks.cases.densenet --case JSON`.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any


def jax_step(
    *,
    keep: str,
    batch: int,
    depth: int = 264,
    growth_rate: int = 48,
    size: int = 224,
    dtype: str = "bfloat16",
    network: str = "imagenet",
    implementation: str | None = None,
    optimizer: bool = False,
    repeats: int = 10,
) -> dict:
    """Bytes, compile seconds and, if `repeats`, milliseconds of forward + backward (+ SGD with momentum)."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from experiments.models.densenet import densenet, densenet_bc
    from memjax import remat_compiler_options

    make, classes = (densenet, 1000) if network == "imagenet" else (densenet_bc, 10)
    build = lambda: make(
        depth,
        classes,
        growth_rate=growth_rate,
        keep=keep,
        dtype=jnp.dtype(dtype),
        implementation=implementation,
        rngs=nnx.Rngs(0),
    )
    model = build() if repeats else nnx.eval_shape(build)
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, state = parts
    sgd = optax.sgd(0.1, momentum=0.9, nesterov=True)
    momentum = (sgd.init(params) if repeats else jax.eval_shape(sgd.init, params)) if optimizer else None

    def loss(params, state, images, labels):
        network = nnx.merge(graph, params, state, copy=True)
        logits = network(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        parts: Any = nnx.split(network, nnx.Param, ...)
        return jnp.mean(losses), parts[2]

    def step(params, state, momentum, images, labels):
        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(params, state, images, labels)
        if momentum is None:
            return value, state, gradient
        updates, momentum = sgd.update(gradient, momentum, params)
        return value, state, optax.apply_updates(params, updates), momentum

    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.dtype(dtype))
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    start = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=(0, 1, 2) if optimizer else ())
    options: Any = remat_compiler_options() if jax.default_backend() == "cpu" else None
    compiled = jitted.lower(params, state, momentum, images, labels).compile(options)
    memory: Any = compiled.memory_analysis()
    result = {
        "compile_s": round(time.perf_counter() - start, 1),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
    }
    if not repeats:
        return result
    key = jax.random.key(1)
    pictures = jax.random.normal(key, images.shape, images.dtype)
    classed = jax.random.randint(key, labels.shape, 0, classes)
    held = (params, state, momentum)

    def run():
        nonlocal held
        out = compiled(*held, pictures, classed)
        if optimizer:
            held = (out[2], out[1], out[3])
        return out[0]

    first = float(run())
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    # A second figure without a wait after every step: what a training loop sees.
    start = time.perf_counter()
    for _ in range(repeats):
        value = run()
    jax.block_until_ready(value)
    streamed = (time.perf_counter() - start) / repeats
    statistics = jax.devices()[0].memory_stats() or {}
    result |= {
        "ms": round(1e3 * sorted(times)[repeats // 2], 2),
        "ms_streamed": round(1e3 * streamed, 2),
        "images_per_s": round(batch / streamed, 1),
        "loss": first,
        "peak_bytes": statistics.get("peak_bytes_in_use"),
    }
    return result


def torch_step(*, memory_efficient: bool, batch: int, limit_gib: float | None = None, repeats: int = 10) -> dict:
    """torchvision's DenseNet with D264's sizes: channels last, autocast to bfloat16, cuDNN's benchmark mode."""
    import torch
    import torchvision

    if limit_gib is not None:
        torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = torchvision.models.DenseNet(48, (6, 12, 64, 48), 96, memory_efficient=memory_efficient)
    model = model.cuda().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    return {
        "ms_streamed": round(1e3 * seconds, 2),
        "images_per_s": round(batch / seconds, 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    case = json.loads(sys.argv[sys.argv.index("--case") + 1])
    steps: dict[str, Callable] = {"jax": jax_step, "torch": torch_step}
    print(json.dumps(steps[case.pop("library")](**case)))
