"""Time, memory and error of `memjax.linear_cross_entropy` on one GPU, and what its time is made of.

    python benchmarks/cross_entropy.py --out benchmarks/results/cross_entropy.json

At the default size (Gemma 2 2B's head, 8192 tokens) about five minutes and 30 GB of GPU memory. Variants are
in order of importance and dropped when `--seconds` have passed. `--tokens 64 --dim 32 --vocabulary 500` tries
it anywhere.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

import memjax
from memjax._linear_cross_entropy import check

BF16_PEAK = 789e12  # measured: bf16 8192^3 through XLA on an H200


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int = 8192
    dim: int = 2304
    vocabulary: int = 256128
    seconds: float = 300.0
    """Start nothing after this."""
    repeats: int = 10
    pieces: bool = True
    """Also time the matmuls and kernels by themselves."""
    out: pathlib.Path | None = None


def plain(x: Any, w: Any, labels: Any) -> Any:
    """What one writes without a library: logits in x's dtype, the softmax in at least float32."""
    z = jnp.einsum("nd,vd->nv", x, w)
    z = z.astype(jnp.float64 if z.dtype == jnp.float64 else jnp.float32)
    at_label = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(z, -1) - at_label).mean()


def both_gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(loss, argnums=(0, 1))


def inputs(tokens: int, dim: int, vocabulary: int, dtype: Any) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, dim), dtype)
    w = (jax.random.normal(keys[1], (vocabulary, dim), jnp.float32) * (1 / dim**0.5)).astype(dtype)
    return x, w, jax.random.randint(keys[2], (tokens,), 0, vocabulary)


class Bench:
    """Runs what fits in the time, keeps records, writes them after each."""

    def __init__(self, config: Config):
        self.config = config
        self.start = time.monotonic()
        self.records: list[dict[str, Any]] = []
        device = jax.devices()[0]
        self.machine = {"device": device.device_kind, "jax": jax.__version__}

    def time(
        self, name: str, function: Callable[..., Any], arrays: tuple[Any, ...], flops: float = 0.0, **jit: Any
    ) -> None:
        if time.monotonic() - self.start > self.config.seconds:
            self.add({"name": name, "error": "no time left"})
            return
        donated = jit.get("donate_argnums")
        began = time.monotonic()
        try:
            compiled = jax.jit(function, **jit).lower(*arrays).compile()
            compile_s = time.monotonic() - began
            if donated is not None:
                arrays = (jnp.copy(arrays[0]), *arrays[1:])

            def step(arrays: tuple[Any, ...]) -> tuple[Any, Any]:
                out = compiled(*arrays)
                return out, (arrays if donated is None else (out, *arrays[1:]))

            for _ in range(2):
                out, arrays = step(arrays)
            jax.block_until_ready(out)
            began = time.monotonic()
            for _ in range(self.config.repeats):
                out, arrays = step(arrays)
            jax.block_until_ready(out)
            ms = (time.monotonic() - began) / self.config.repeats * 1e3
            memory: Any = compiled.memory_analysis()
            record = {
                "name": name,
                "ms": round(ms, 3),
                "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
                "output_mb": round(memory.output_size_in_bytes / 1e6, 1),
                "compile_s": round(compile_s, 1),
            }
            if flops:
                record["tflops"] = round(flops / ms / 1e9, 1)
                record["floor_ms"] = round(flops / BF16_PEAK * 1e3, 2)
            self.add(record)
        except Exception as error:  # one variant that fails must not hide the others
            self.add({"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print(json.dumps(record), flush=True)
        if self.config.out is not None:
            settings = {k: str(v) for k, v in dataclasses.asdict(self.config).items()}
            document = {"machine": self.machine, "settings": settings, "records": self.records}
            self.config.out.write_text(json.dumps(document, indent=1) + "\n")

    def table(self) -> None:
        keys = ["name", "ms", "floor_ms", "tflops", "temp_mb", "compile_s", "error"]
        table = Table(*keys)
        for record in self.records:
            table.add_row(*(str(record.get(k, "")) for k in keys))
        Console(width=160).print(table)


def errors(bench: Bench) -> None:
    """Relative errors of loss, dx and dW against float64, beside those of plain bf16 code with the same
    inputs."""
    config = bench.config
    tokens, vocabulary = min(config.tokens, 4096 + 5), min(config.vocabulary, 16384 + 3)
    x, w, labels = inputs(tokens, config.dim, vocabulary, jnp.bfloat16)
    with jax.enable_x64(True):
        exact = jax.jit(both_gradients(plain))(x.astype(jnp.float64), w.astype(jnp.float64), labels)
        exact = jax.tree.map(np.asarray, exact)
    loss = memjax.linear_cross_entropy

    def report(name: str, function: Callable[..., Any], expected: Any, **compiler_options: Any) -> None:
        try:
            actual = jax.jit(function).lower(x, w, labels).compile(compiler_options)(x, w, labels)
            norms = [
                float(np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e).clip(1e-300))
                for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
            ]
            bench.add({"name": f"error: {name}", "relative": [float(f"{n:.4g}") for n in norms]})
        except Exception as error:
            bench.add({"name": f"error: {name}", "error": f"{type(error).__name__}: {str(error)[:300]}"})

    # XLA may skip the rounding of logits to bf16 where it fuses; without that leave, plain code rounds where
    # it says so.
    report("plain bf16", both_gradients(plain), exact)
    report("plain bf16, rounded", both_gradients(plain), exact, xla_allow_excess_precision=False)
    for algorithm, chunks in (("forward_grad", (64, None, 4096)), ("recompute", (512, None))):
        for chunk in chunks:
            chunked = functools.partial(loss, implementation=algorithm, chunk=chunk)
            report(f"{algorithm} chunk={chunk}", both_gradients(chunked), exact)

    # Every branch of the kernels against the same in plain jax.numpy.
    options: dict[str, Any] = {
        "bias": jnp.linspace(-1, 1, vocabulary, dtype=jnp.bfloat16),
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 3.0,
        "logit_scale": 0.7,
        "weights": jnp.linspace(0, 2, tokens),
    }
    for algorithm in ("forward_grad", "recompute"):

        def with_aux(x: Any, w: Any, labels: Any, implementation: str) -> Any:
            return jax.value_and_grad(
                lambda x, w, bias: loss(
                    x, w, labels, return_aux=True, implementation=implementation, **{**options, "bias": bias}
                ),
                argnums=(0, 1, 2),
                has_aux=True,
            )(x, w, options["bias"])

        reference = functools.partial(with_aux, implementation=f"{algorithm}/jnp")
        expected = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.jit(reference)(x, w, labels))
        names = "loss, log_sum_exp, accuracy, entropy, count, dx, dw, dbias"
        actual = functools.partial(with_aux, implementation=algorithm)
        report(f"{algorithm}, all options, against jnp: {names}", actual, expected)


def losses(bench: Bench, triton: bool) -> None:
    config = bench.config
    arrays = inputs(config.tokens, config.dim, config.vocabulary, jnp.bfloat16)
    matmul = 2.0 * config.tokens * config.dim * config.vocabulary
    loss = memjax.linear_cross_entropy
    run = functools.partial(bench.time, arrays=arrays)

    def gradients(implementation: str | None, **options: Any) -> Callable[..., Any]:
        return both_gradients(functools.partial(loss, implementation=implementation, **options))

    run("default", gradients(None), flops=3 * matmul)
    run("recompute", gradients("recompute"), flops=4 * matmul)
    run("forward only", loss, flops=matmul)
    for chunk in (1024, 2731):
        run(f"forward_grad chunk={chunk}", gradients("forward_grad", chunk=chunk), flops=3 * matmul)
    # 1856 keeps within 128 MB; 8832 divides this vocabulary; 10672 does, and takes about 270 MB.
    for chunk in (1856, 4096, 8832, 10672):
        run(f"recompute chunk={chunk}", gradients("recompute", chunk=chunk), flops=4 * matmul)
    run("frozen head", jax.grad(loss), flops=2 * matmul)
    run("frozen input", jax.grad(loss, argnums=1), flops=2 * matmul)
    if triton:
        tiles(bench, run, gradients("forward_grad"), matmul)
        run("forward_grad/jnp", gradients("forward_grad/jnp"), flops=3 * matmul)
        run("recompute/jnp", gradients("recompute/jnp"), flops=4 * matmul)
    run("plain jax, full logits", both_gradients(plain), flops=3 * matmul)


def tiles(bench: Bench, run: Any, function: Callable[..., Any], matmul: float) -> None:
    from memjax._linear_cross_entropy import kernels

    chosen = kernels.TILES
    for block, warps in ((8192, 8), (8192, 16), (16384, 8), (16384, 32), (32768, 32)):
        kernels.TILES = dataclasses.replace(chosen, row_block=block, row_warps=warps)
        # A new function object, or the program traced with the other tiles is used again.
        run(f"forward_grad row tile {block} x {warps} warps", lambda *a: function(*a), flops=3 * matmul)
    kernels.TILES = chosen


def pieces(bench: Bench, triton: bool) -> None:
    """The matmuls of one chunk of 2048 tokens, or of 8192 entries of the vocabulary, and the row kernels."""
    config = bench.config
    dim, vocabulary, tokens = config.dim, config.vocabulary, config.tokens
    chunk, width = min(2048, tokens), min(8192, vocabulary)
    x, w, labels = inputs(tokens, dim, vocabulary, jnp.bfloat16)
    part, d = x[:chunk], jnp.ones((chunk, vocabulary), jnp.bfloat16)
    per_token_chunk = 2.0 * chunk * dim * vocabulary
    run = bench.time
    run(
        "piece: logits of a token chunk",
        lambda x, w: jnp.einsum("nd,vd->nv", x, w),
        (part, w),
        per_token_chunk,
    )
    for splits in (1, 2, 3, 4, 6):
        if vocabulary % splits:
            continue

        def input_gradient(d: Any, w: Any, splits: int = splits) -> Any:
            if splits == 1:
                return jnp.einsum("nv,vd->nd", d, w)
            d = d.reshape(chunk, splits, -1)
            w = w.reshape(splits, -1, dim)
            partial = jnp.einsum("nkv,kvd->knd", d, w, preferred_element_type=jnp.float32)
            return partial.sum(0).astype(jnp.bfloat16)

        run(f"piece: dx of a token chunk, {splits} splits", input_gradient, (d, w), per_token_chunk)
    total = jnp.zeros((vocabulary, dim), jnp.float32)

    def head_gradient(total: Any, d: Any, x: Any) -> Any:
        return total + jnp.einsum("nv,nd->vd", d, x, preferred_element_type=jnp.float32)

    run("piece: dW += of a token chunk", head_gradient, (total, d, part), per_token_chunk, donate_argnums=0)
    run(
        "piece: dW of a token chunk, not added",
        lambda d, x: jnp.einsum("nv,nd->vd", d, x, preferred_element_type=jnp.float32),
        (d, part),
        per_token_chunk,
    )
    run("piece: dW to bfloat16", lambda a: (a * 0.5).astype(jnp.bfloat16), (total,))
    del total

    head = w[:width]
    per_width = 2.0 * tokens * dim * width
    z = jnp.ones((tokens, width), jnp.bfloat16)
    run(
        "piece: logits of a vocabulary chunk",
        lambda x, w: jnp.einsum("nd,vd->nv", x, w),
        (x, head),
        per_width,
    )
    run("piece: dW of a vocabulary chunk", lambda d, x: jnp.einsum("nv,nd->vd", d, x), (z, x), per_width)
    add_dx = jnp.zeros((tokens, dim), jnp.float32)
    run(
        "piece: dx += of a vocabulary chunk",
        lambda a, d, w: a + jnp.einsum("nv,vd->nd", d, w, preferred_element_type=jnp.float32),
        (add_dx, z, head),
        per_width,
        donate_argnums=0,
    )
    run(
        "piece: slice of w",
        lambda w, i: lax.dynamic_slice_in_dim(w, i, width, 0),
        (w, jnp.asarray(0, jnp.int32)),
    )
    if not triton:
        return
    from memjax._linear_cross_entropy import kernels
    from memjax._linear_cross_entropy.options import Options

    options = Options("vd", vocabulary, 0.0, 0.0, None, 1.0, None, None, False, "triton")
    scale = jnp.ones((tokens,), jnp.float32)
    run(
        "piece: row kernel, a token chunk",
        lambda d, y, s: kernels.stats_and_gradient(d, None, y, s, options)[1],
        (d, labels[:chunk], scale[:chunk]),
        donate_argnums=0,
    )
    run(
        "piece: stats kernel, a vocabulary chunk",
        lambda z, y: kernels.stats(z, None, y, options),
        (z, labels),
    )
    run(
        "piece: gradient kernel, a vocabulary chunk",
        lambda z, y, s: kernels.gradient(z, None, y, s, s, options),
        (z, labels, scale),
        donate_argnums=0,
    )


def main(config: Config) -> None:
    bench = Bench(config)
    triton = check.implementation(None, "mean", jnp.bfloat16)[1] == "triton"
    bench.machine["kernels"] = "triton" if triton else "jnp"
    errors(bench)
    losses(bench, triton)
    if config.pieces:
        pieces(bench, triton)
    bench.table()


if __name__ == "__main__":
    main(tyro.cli(Config))
