"""Checks the random program of a seed: `python -m benchmarks.cases.fuzz.measure --case '{"seed": 3, "shares": [0.8]}'`."""

import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memjax
from benchmarks.cases.fuzz.programs import Program, program
from benchmarks.cases.fuzz.steps import Step, step
from memjax._jit.candidates import held_bytes
from memjax._plan.memory.alone import temporary

EXACT = 1e-10  # of the largest value in an array: so much results may be off
_LEAST = r"the least possible is ([\d.,]+ \w+)"
_OF_ROUNDING = 20  # times what moving the inputs by one unit in the last place changes

Made = tuple[Callable[..., Any], int]
"""A function under `jax.jit`, and the bytes that it takes when compiled."""


def error(found: Any, expected: Any) -> float:
    """The largest difference in any array, relative to its largest value, or to 1e-3 of the largest value in all."""
    pairs = [*zip(map(_values, jax.tree.leaves(found)), map(_values, jax.tree.leaves(expected)), strict=True)]
    # Of float16 to float64 alone: integers that differ are an error of 1.
    floats = [b for _, b in pairs if b.dtype.kind == "f"]
    floor = max(1e-3 * max(float(np.max(np.abs(b), initial=0)) for b in floats), 1e-12)
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TypeError(f"{a.dtype}{a.shape} where plain JAX has {b.dtype}{b.shape}")
        if a.dtype.kind != "f":
            worst = max(worst, float(not np.array_equal(a, b)))
        elif not np.isfinite(a).all():
            return float("inf")
        else:
            worst = max(worst, float(np.max(np.abs(a - b), initial=0) / np.max(np.abs(b), initial=floor)))
    return worst


def _values(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _moved(args: Any, has_narrow: bool) -> Any:
    """The arguments with every second float moved by one unit in the last place: of float32, where that is computed with."""

    def one(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        unit = jnp.finfo(jnp.float32 if has_narrow else leaf.dtype).eps
        second = (jnp.arange(leaf.size) % 2 == 0).reshape(leaf.shape)
        return leaf * (1 + jnp.where(second, unit, 0.0)).astype(leaf.dtype)

    return jax.tree.map(one, args)


def _copied(args: Any) -> Any:
    return jax.tree.map(jnp.copy, args)


class Planned:
    """`memjax.planned` on the value and gradients of a loss, by a plan made ahead or when it is traced."""

    def __init__(self, of: Program, seed: int):
        self._of, self.args = of, of.args
        self._argnums = (0, 1) if seed % 4 == 1 else 0
        self._ahead = seed % 2 == 0
        self._allow = ("recompute", "tile") if seed % 3 == 0 else ("recompute",)

    def _compiled(self, f: Callable[..., Any]) -> Made:
        options = memjax.remat_compiler_options()
        run = jax.jit(jax.value_and_grad(f, self._argnums, has_aux=self._of.has_aux), compiler_options=options)
        return run, temporary(run.lower(*self.args).compile())

    def plain(self) -> tuple[Made, int]:
        """The program as it is written, and bytes that no plan changes."""
        return self._compiled(self._of.loss), 0

    def within(self, budget: int | str) -> Made:
        how: dict[str, Any] = {"budget": budget, "allow": self._allow}
        if self._ahead:
            how = {"plan": memjax.plan(self._of.loss, *self.args, argnums=self._argnums, **how)}
        return self._compiled(memjax.planned(self._of.loss, **how))


class Jitted:
    """A training step under `memjax.jit`."""

    def __init__(self, of: Step, seed: int):
        self._of, self.args = of, of.args
        more = () if seed % 3 == 0 else ("tile", "microbatch") if seed % 3 == 1 else ("tile",)
        self._allow = ("recompute", *more)

    def plain(self) -> tuple[Made, int]:
        """The program as it is written, and bytes that no plan changes."""
        run = jax.jit(self._of.f, **self._of.options)
        nbytes = held_bytes(made := run.lower(*self.args).compile())
        return (run, nbytes), nbytes - temporary(made)

    def within(self, budget: int | str) -> Made:
        run = memjax.jit(self._of.f, budget=budget, allow=self._allow, **self._of.options)
        made = run.lower(*self.args).compile(compiler_options=memjax.remat_compiler_options())
        return run, held_bytes(made)


def row_of(way: Any, budget: int, expected: Any) -> dict[str, Any]:
    """One budget, which is kept, or refused with a least that is kept."""
    row: dict[str, Any] = {"budget": budget}
    asked: Any = budget
    try:
        try:
            run, nbytes = way.within(budget)
        except ValueError as refusal:
            if (least := re.search(_LEAST, str(refusal))) is None:
                raise
            row["refused"] = asked = least[1].replace(",", "").replace(" ", "")
            try:
                run, nbytes = way.within(asked)
            except ValueError as again:
                if (other := re.search(_LEAST, str(again))) is None:
                    raise
                return row | {"outcome": "untrue least", "then": other[1]}
        row |= {"compiled": nbytes, "error": error(run(*_copied(way.args)), expected)}
    except Exception as crash:
        frames = [frame for frame in traceback.extract_tb(crash.__traceback__) if "/memjax/" in frame.filename]
        where = f" ({frames[-1].filename.rsplit('/memjax/')[-1]}:{frames[-1].lineno})" if frames else ""
        return row | {"outcome": "crashed", "why": f"{type(crash).__name__}: {str(crash)[:300]}{where}"}
    if nbytes > memjax_bytes(asked):
        return row | {"outcome": "over the budget"}
    return row | {"outcome": "kept" if asked == budget else "refused"}


def memjax_bytes(budget: Any) -> int:
    """Bytes of a text as messages have it."""
    if isinstance(budget, int):
        return budget
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", budget).groups()  # type: ignore[union-attr]
    return int(float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit))


def measure(seed: int, shares: list[float], ways: list[str]) -> dict[str, Any]:
    """Rows of one program."""
    of = program(seed)
    result: dict[str, Any] = {"parts": of.parts, "rows": []}
    narrow = any("narrow" in part for part in of.parts)
    for name in ways:
        stepped = step(of, seed) if name == "jit" else None
        way: Any = Planned(of, seed) if stepped is None else Jitted(stepped, seed)
        (run, nbytes), beside = way.plain()
        expected = jax.device_get(run(*_copied(way.args)))
        rounding = error(run(*_moved(way.args, narrow)), expected)
        for share in shares:
            start = time.perf_counter()
            row = {"way": name, "share": share, "rounding": rounding, "plain": nbytes}
            row |= row_of(way, beside + int(share * (nbytes - beside)), expected)
            if row.get("error", 0.0) > max(EXACT, _OF_ROUNDING * rounding):
                row["outcome"] = "wrong"
            row["seconds"] = round(time.perf_counter() - start, 1)
            result["rows"].append(row)
        if stepped is not None:
            result["step"] = stepped.kind
    return result


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    case = json.loads(sys.argv[sys.argv.index("--case") + 1])
    print(json.dumps(measure(**case)))
