"""Memory and time of long sequences by recipe: `python -m benchmarks.long_context`, about half an hour on one H200.

Five parts, each with a file of results of its own; `--parts` picks some of them.

stack         loss and gradient of the 1B shape, whole, by recipe
layer         one layer of the 8B shape forward and backward, input and cotangent given
feed_forward  half a layer of two shapes, tiled and not, in turns in one process
real          one step of whole shapes at great length: six minutes for each; `--real-cases` picks some
longest       the longest sequence that compiles within the memory of the GPU, by recipe, in one process; nothing is run

`--smoke` tries it on a CPU in about two minutes and saves nothing. On a ring of four GPUs:

    python -m benchmarks.long_context --devices 4 --parts real --real-cases "8B 524288 tiled+groups+slots=32+keep_attention"

A number of layers may follow the shape, as in "8B:2".
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

import memjax
from benchmarks import record
from benchmarks.cases.gradients import compare
from experiments.context import measure
from experiments.data.text import standard_library
from experiments.models import llama
from experiments.models.llama import LlamaConfig
from experiments.models.recipe import parse
from memjax._core import check

Part = Literal["stack", "layer", "feed_forward", "real", "longest"]

_ENVIRON = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}  # of a GPU's memory; by itself JAX takes three quarters


@dataclasses.dataclass(frozen=True)
class Config:
    parts: tuple[Part, ...] = ("stack", "layer", "feed_forward", "real", "longest")
    recipes: tuple[str, ...] = ("checkpoint", "tiled+slots=6", "tiled+groups+slots=6", "tiled+groups+slots=4")
    """The recipes that the part "stack" compares."""
    lengths: tuple[int, ...] = (65536, 131072)
    """The lengths of its sequences."""
    shape: str = "1B"
    """The shape of its decoder."""
    layer_shape: str = "8B"
    layer_length: int = 65536
    layer_recipes: tuple[str, ...] = ("plain", "tiled+plain", "tiled+groups+plain", "tiled+groups+plain+keep_attention")
    """The recipes that the part "layer" compares."""
    feed_forward_cases: tuple[str, ...] = ("8B 65536", "8B 131072", "1B 131072")
    """Shape and tokens of each comparison of the part "feed_forward"."""
    real_cases: tuple[str, ...] = (
        "8B 401408 tiled+groups+slots=24+keep_attention",
        "1B 753664 tiled+groups+slots=16+keep_attention",
    )
    """Shape, tokens and recipe of each step of the part "real"."""
    longest_cases: tuple[str, ...] = (
        "8B tiled+groups+slots=4",
        "8B tiled+groups+slots=3",
        "8B tiled+groups+slots=8+bits=4",
    )
    """Shape and recipe of each search of the part "longest"."""
    memory_limit: str | None = None
    """What parameters, gradients and all else may take in that search, such as 70GiB. Default: the device's."""
    devices: int = 1
    """The size of the ring. "real" and "longest" split the sequence and the parameters over it. With several devices the names
    of results have their number."""
    repeats: int = 2
    """Steps that are timed, after one that is not."""
    smoke: bool = False


_UNIT = 16384  # lengths in the search for the longest are multiples

_SMOKE: dict[str, Any] = {
    "recipes": ("checkpoint", "tiled=32+groups+slots=2"),
    "lengths": (128,),
    "shape": "tiny",
    "layer_shape": "tiny",
    "layer_length": 128,
    "layer_recipes": ("plain", "tiled=32+groups+plain+keep_attention"),
    "feed_forward_cases": ("tiny 128",),
    "real_cases": ("tiny 256 tiled=32+groups+slots=2",),
    "longest_cases": ("tiny tiled=32+groups+slots=2",),
    "memory_limit": "64MiB",
}


def main(config: Config) -> None:
    if config.smoke:
        config = dataclasses.replace(config, **_SMOKE)
    cases: dict[Part, list[dict]] = {
        "stack": [{"shape": config.shape, "recipe": r, "length": n} for n in config.lengths for r in config.recipes],
        "layer": [
            {"shape": config.layer_shape, "recipe": r, "length": config.layer_length} for r in config.layer_recipes
        ],
        "feed_forward": [
            {"shape": shape, "length": int(length)} for shape, length in map(str.split, config.feed_forward_cases)
        ],
        "real": [
            {"shape": shape, "length": int(length), "recipe": recipe}
            for shape, length, recipe in map(str.split, config.real_cases)
        ],
        "longest": [
            {"shape": shape, "recipe": recipe, "memory_limit": config.memory_limit}
            for shape, recipe in map(str.split, config.longest_cases)
        ],
    }
    for part in config.parts:
        rows = []
        for case in cases[part]:
            case = {"part": part, **case, "repeats": config.repeats}
            case |= {"devices": config.devices} if config.devices > 1 else {}
            found = record.in_fresh_process("benchmarks.long_context", case, environ=_ENVIRON, timeout=1800)
            new = found.get("rows", [found])
            rows += new
            print(*map(json.dumps, new), sep="\n", flush=True)
            if not config.smoke:
                record.save(f"long_context_{part}" + (f"_{config.devices}" if config.devices > 1 else ""), rows)


def case(case: dict) -> dict:
    """One measurement, in a process of its own."""
    part = case["part"]
    if case.get("devices", 1) > 1:
        memjax.shard.hide_hops()  # before the first use of a device
    decoder = shape(case["shape"])
    if jax.default_backend() == "cpu":
        decoder = dataclasses.replace(decoder, dtype="float32")
    if part == "stack":
        return _stack(decoder, case)
    if part == "longest":
        return _longest(decoder, case)
    if part == "feed_forward":
        return {"rows": _feed_forward(decoder, case)}
    return _real(decoder, case) if part == "real" else _layer(decoder, case)


def shape(name: str) -> LlamaConfig:
    """A shape by name; "8B:2" has two layers of it."""
    known, _, layers = name.partition(":")
    decoder = llama.SHAPES[known]
    return dataclasses.replace(decoder, layers=int(layers)) if layers else decoder


def _stack(decoder: LlamaConfig, case: dict) -> dict:
    recipe, length = parse(case["recipe"]), case["length"]
    gradient = measure.Gradient(decoder, recipe, length)
    formula = recipe.bytes_per_token(decoder)
    found = {
        "kib_per_token": gradient.bytes.temp / 1024 / length,
        "formula": None if formula is None else formula / 1024,
    }
    seconds = gradient.seconds(_params(decoder), standard_library().train, case["repeats"] + 1)
    return {**found, "temp_bytes": gradient.bytes.temp, "seconds": seconds[1:]}


def gradient_of_layer(
    decoder: LlamaConfig, part: Literal["layer", "feed_forward"], recipe: str, length: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradients of parameters and input of a layer, or of its second half, for a cotangent of the result; and arguments."""
    run = functools.partial(llama.layer, decoder, parse(recipe))
    if part == "feed_forward":
        run = functools.partial(llama.feed_forward, parse(recipe))
    one = dataclasses.replace(decoder, layers=1, vocabulary=2)
    p = jax.tree.map(lambda a: a[0], _params(one)["layers"])
    x, ct = (
        jax.random.normal(key, (1, length, decoder.dim), decoder.dtype) for key in jax.random.split(jax.random.key(1))
    )
    return (lambda p, x, ct: jax.vjp(run, p, x)[1](ct)), (p, x, ct)


def _layer(decoder: LlamaConfig, case: dict) -> dict:
    length = case["length"]
    step, args = gradient_of_layer(decoder, case["part"], case["recipe"], length)
    compiled = jax.jit(step).lower(*args).compile({**memjax.remat_compiler_options()})
    memory: Any = compiled.memory_analysis()
    ms = []
    for _ in range(5 * case["repeats"] + 1):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        ms.append(1e3 * (time.perf_counter() - begin))
    temp = memory.temp_size_in_bytes
    return {
        "kib_per_token": temp / 1024 / length,
        "temp_bytes": temp,
        "ms": statistics.median(ms[1:]),
        "all_ms": ms[1:],
    }


def _feed_forward(decoder: LlamaConfig, case: dict) -> list[dict]:
    """They take turns on a card that is warm: a hundredth is less than the difference to one that has rested.

    The cotangent is made in the program, as in a network: what is written over an argument would be a copy.
    """
    made = {r: gradient_of_layer(decoder, "feed_forward", r, case["length"]) for r in ("plain", "tiled+plain")}
    ways = {r: lambda p, x, ct, f=f: f(p, x, -ct) for r, (f, _) in made.items()}
    settle = 10 if jax.default_backend() == "gpu" else 0
    rows = compare(ways, made["plain"][1], rounds=6 * case["repeats"], calls=3, settle=settle)
    return [case | {"recipe": row.pop("case")} | row for row in rows]


def _real(decoder: LlamaConfig, case: dict) -> dict:
    """One step, from compiled program to gradient, without another before it."""
    begin, mesh = time.perf_counter(), _ring(case)
    gradient = measure.Gradient(decoder, parse(case["recipe"]), case["length"], mesh=mesh)
    compiling = time.perf_counter() - begin
    found = {
        "total_bytes": gradient.bytes.total,
        "kib_per_token": gradient.bytes.temp / 1024 / (case["length"] / case.get("devices", 1)),
        "compile_seconds": compiling,
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    seconds, loss, norm = gradient.step(_params(decoder, mesh), standard_library().train)
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
    return found | {"seconds": seconds, "loss": loss, "gradient_norm": norm, "peak_bytes": peak}


def _longest(decoder: LlamaConfig, case: dict) -> dict:
    """By compiled bytes of loss and gradient, with parameters and their gradients."""
    recipe, given = parse(case["recipe"]), case["memory_limit"]
    limit = (
        int(check.byte_count("memory_limit", given))
        if given
        else (jax.local_devices()[0].memory_stats() or {})["bytes_limit"]
    )
    found: dict[int, measure.Bytes] = {}
    mesh = _ring(case)

    def total(length: int) -> int:
        found[length] = measure.Gradient(decoder, recipe, length, quick=True, mesh=mesh).bytes
        return found[length].total

    params = jax.eval_shape(functools.partial(llama.init, decoder), jax.random.key(0))
    devices = case.get("devices", 1)
    fixed = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) // devices
    unit = devices * (_UNIT if jax.default_backend() == "gpu" else 32)
    length = measure.longest(total, limit, fixed=fixed, unit=unit, first=2 * unit, last=devices * 2**22)
    if not length:
        return {"limit": limit, "length": 0}
    kib = found[length].temp / 1024 / (length / devices)
    return {"limit": limit, "length": length, "total_bytes": found[length].total, "kib_per_token": kib}


def _params(decoder: LlamaConfig, mesh: Mesh | None = None) -> Any:
    at = None if mesh is None else measure.params_at(decoder, mesh)
    return jax.jit(functools.partial(llama.init, decoder), out_shardings=at)(jax.random.key(0))


def _ring(case: dict) -> Mesh | None:
    size = case.get("devices", 1)
    return Mesh(np.asarray(jax.devices()[:size]), ("ring",)) if size > 1 else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(json.loads(sys.argv[2]))))
    else:
        main(tyro.cli(Config, description=__doc__))
