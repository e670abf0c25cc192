"""Linear + cross-entropy on one GPU, measured: `python -m benchmarks.cross_entropy`, about two minutes.

Forward + backward with dx and dW at the size of Gemma 2 2B's head with 8192 tokens, bfloat16, every implementation of
`memjax.linear_cross_entropy` beside plain JAX and, where they are installed, PyTorch, Cut Cross-Entropy and Liger; and
the errors of the gradients against float64. `--tokens 64 --dim 64 --vocabulary 512` tries it anywhere.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the other half is PyTorch's

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import memjax
from benchmarks import record

loss = memjax.linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int = 8192
    dim: int = 2304
    vocabulary: int = 256128
    seconds: float = 0.5
    """How long calls are timed for each row, after half as long a time of calls that warm up."""
    time_limit: float = 600.0
    """Start no row after this many seconds."""
    torch: bool = True
    name: str = "cross_entropy"

    def inputs(self, tokens: int, vocabulary: int) -> tuple[Any, Any, Any]:
        """(x, w, labels), with logits of standard deviation one."""
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (tokens, self.dim), jnp.bfloat16)
        w = jax.random.normal(keys[1], (vocabulary, self.dim), jnp.float32) / self.dim**0.5
        return x, w.astype(jnp.bfloat16), jax.random.randint(keys[2], (tokens,), 0, vocabulary)


def plain(x: Any, w: Any, labels: Any) -> Any:
    """The loss without a library: logits in x's dtype, the softmax in at least float32."""
    z = jnp.einsum("nd,vd->nv", x, w)
    z = z.astype(jnp.float64 if z.dtype == jnp.float64 else jnp.float32)
    at_label = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(z, -1) - at_label).mean()


def both_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(function, argnums=(0, 1))


def timed(config: Config, name: str, function: Callable[..., Any], arrays: tuple[Any, ...], matmuls: int) -> dict:
    """Compiled memory, and the median time of one call."""
    try:
        began = time.perf_counter()
        compiled = jax.jit(function).lower(*arrays).compile()
        compile_s = time.perf_counter() - began

        def call() -> float:
            began = time.perf_counter()
            jax.block_until_ready(compiled(*arrays))
            return time.perf_counter() - began

        end = time.perf_counter() + config.seconds / 2
        while time.perf_counter() < end:
            call()
        times: list[float] = []
        while sum(times) < config.seconds or len(times) < 3:
            times.append(call())
        ms = statistics.median(times) * 1e3
        memory: Any = compiled.memory_analysis()
        return {
            "name": name,
            "ms": round(ms, 2),
            "temp_bytes": memory.temp_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "tflops": round(2e-9 * matmuls * config.tokens * config.dim * config.vocabulary / ms, 1),
            "calls": len(times),
            "compile_s": round(compile_s, 1),
        }
    except Exception as error:  # one implementation that fails must not hide the others
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def times(config: Config) -> list[dict]:
    arrays = config.inputs(config.tokens, config.vocabulary)
    recompute = functools.partial(loss, implementation="recompute")
    cases: dict[str, tuple[Callable[..., Any], int]] = {
        "forward_grad": (both_gradients(loss), 3),
        "recompute": (both_gradients(recompute), 4),
        "forward only": (loss, 1),
        "plain JAX": (both_gradients(plain), 3),
        "recompute, chunk=14528": (both_gradients(functools.partial(recompute, chunk=14528)), 4),
        "recompute, chunk=3072": (both_gradients(functools.partial(recompute, chunk=3072)), 4),
        "frozen head": (jax.value_and_grad(loss), 2),
        "frozen input": (jax.value_and_grad(loss, argnums=1), 2),
        "forward only, plain JAX": (plain, 1),
    }
    for kernels in ("triton", "jnp"):
        for algorithm, matmuls in (("forward_grad", 3), ("recompute", 4)):
            named = functools.partial(loss, implementation=f"{algorithm}/{kernels}")
            cases[f"{algorithm}/{kernels}"] = both_gradients(named), matmuls
    began = time.perf_counter()
    rows = []
    for name, (function, matmuls) in cases.items():
        if time.perf_counter() - began < config.time_limit:
            rows.append(timed(config, name, function, arrays, matmuls))
            print(rows[-1], flush=True)
    return rows


def errors(config: Config) -> list[dict]:
    """Relative errors of loss, dx and dW against float64, beside those of plain bf16 code with the same inputs."""
    arrays = config.inputs(min(config.tokens, 4096), min(config.vocabulary, 16384))
    with jax.enable_x64(True):
        exact = jax.jit(both_gradients(plain))(*(a.astype(jnp.float64) for a in arrays[:2]), arrays[2])
        exact = [np.asarray(a) for a in jax.tree.leaves(exact)]
    functions: dict[str, Callable[..., Any]] = {"plain JAX": plain, "forward_grad": loss}
    for name, options in {
        "recompute": {"implementation": "recompute"},
        "forward_grad/triton": {"implementation": "forward_grad/triton"},
        "recompute/triton": {"implementation": "recompute/triton"},
        "forward_grad, chunk=64": {"chunk": 64},
        "forward_grad, chunk=4096": {"chunk": 4096},
    }.items():
        functions[name] = functools.partial(loss, **options)  # type: ignore[arg-type]
    rows = []
    for name, function in functions.items():
        try:
            # XLA may skip the rounding of logits where it fuses; plain code is to round where it says so.
            lowered = jax.jit(both_gradients(function)).lower(*arrays)
            results = jax.tree.leaves(lowered.compile({"xla_allow_excess_precision": False})(*arrays))
            relative = [
                float(np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e))
                for a, e in zip(results, exact, strict=True)
            ]
            rows.append({"name": name, **dict(zip(("loss", "dx", "dw"), relative, strict=True))})
        except ValueError as error:  # kernels that do not run here
            rows.append({"name": name, "error": str(error)[:300]})
        print(rows[-1], flush=True)
    return rows


def main(config: Config) -> None:
    rows = [{"what": "time", "library": "jax", **row} for row in times(config)]
    print(record.save(config.name, rows))
    if config.torch and importlib.util.find_spec("torch") is not None:
        sizes = {"tokens": config.tokens, "dim": config.dim, "vocabulary": config.vocabulary}
        # jax_triton switches Triton's cache off for this process and its children; PyTorch cannot do without.
        cache = {"TRITON_CACHE_DIR": str(pathlib.Path.home() / ".triton" / "cache")}
        case = {**sizes, "seconds": config.seconds}
        result = record.in_fresh_process("benchmarks.cases.cross_entropy_torch", case, cache)
        print(result, flush=True)
        rows += [{"what": "time", "library": "torch", **row} for row in result.get("rows", [result])]
        print(record.save(config.name, rows))
    rows += [{"what": "error", "library": "jax", **row} for row in errors(config)]
    print(record.save(config.name, rows))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
