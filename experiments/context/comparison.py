"""Measurements of recipes, row by row in a file, so that a run that was stopped goes on where it was."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from experiments.context import measure
from experiments.data.text import standard_library
from experiments.harness import files
from experiments.models import llama
from experiments.models.recipe import Recipe

_UNITS = {"cpu": 64}  # of which lengths that are searched are multiples
_UNIT = 1024  # of other devices


class Comparison:
    """Rows of measurements of a decoder in the file `path`; those that are there are not measured again."""

    def __init__(self, decoder: llama.LlamaConfig, path: Path, console: Console):
        self._decoder, self._path, self._console = decoder, path, console
        self._text = standard_library().train
        fix = "delete it, and measure again with --resume"
        self.rows: list[dict] = files.read_json(path, list, fix) if path.exists() else []

    def complete(
        self, recipes: Sequence[Recipe], lengths: Sequence[int], limit: int | None, longest: int, seed: int
    ) -> None:
        """Measures gradients of `lengths` by each recipe and, unless `longest` is 0 or there is no `limit`, searches for the
        longest sequence within `limit` bytes, up to `longest`."""
        self._params = jax.jit(functools.partial(llama.init, self._decoder))(jax.random.key(seed))
        for recipe in recipes:
            for length in lengths:
                self._keep("length", str(recipe), functools.partial(self._at, recipe, length), length=length)
            if longest and limit:
                found = functools.partial(self._longest, recipe, limit, longest)
                self._keep("longest", str(recipe), found, limit=limit, upto=longest)
            if recipe.bits:
                self._keep("error", str(recipe), functools.partial(self._error, recipe, lengths[0]), length=lengths[0])

    def _keep(self, kind: str, name: str, find: Callable[[], dict], **key: int) -> None:
        wanted = {"kind": kind, "recipe": name, **key}
        if any(wanted.items() <= row.items() for row in self.rows):
            return
        row = {**wanted, **find()}
        self.rows.append(row)
        files.write_text(self._path, json.dumps(self.rows, indent=1) + "\n")
        self._console.print(_in_words(row))

    def _at(self, recipe: Recipe, length: int) -> dict:
        gradient = measure.Gradient(self._decoder, recipe, length)
        formula = recipe.bytes_per_token(self._decoder)
        row = {
            "kib": gradient.bytes.temp / 1024 / length,
            "formula": None if formula is None else formula / 1024,
        }
        seconds = self._seconds(gradient)
        return row if seconds is None else {**row, "seconds": seconds}

    def _longest(self, recipe: Recipe, limit: int, longest: int) -> dict:
        """By compiled bytes, then shorter until a real step fits."""
        unit = _UNITS.get(jax.default_backend(), _UNIT)
        fixed = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))
        last = max(longest // unit * unit, unit)
        bytes_of = lambda length: measure.Gradient(self._decoder, recipe, length, quick=True).bytes.total
        length = measure.longest(bytes_of, limit, fixed=fixed, unit=unit, first=min(2 * unit, last), last=last)
        compiled = length
        while length:
            seconds = self._seconds(measure.Gradient(self._decoder, recipe, length), steps=1)
            if seconds is not None:
                return {"length": length, "compiled": compiled, "seconds": seconds}
            length = length * 15 // 16 // unit * unit
        return {"length": 0, "compiled": compiled}

    def _seconds(self, gradient: measure.Gradient, steps: int = 2) -> float | None:
        """None if it does not fit into the device's memory."""
        try:
            return min(gradient.seconds(self._params, self._text, steps))
        except Exception as error:
            if not measure.out_of_memory(error):
                raise
            return None

    def _error(self, recipe: Recipe, length: int) -> dict:
        return measure.gradient_error(self._decoder, recipe, self._params, self._text, length)


def _in_words(row: dict) -> str:
    seconds = f", {row['seconds']:.2f} s" if "seconds" in row else ""
    if row["kind"] == "longest":
        return f"{row['recipe']}: longest sequence {row['length']:,}{seconds}"
    if row["kind"] == "error":
        expected = "" if row["at_most"] is None else f", expected at most {row['at_most']:.2%}"
        return f"{row['recipe']}: error of the gradient {row['measured']:.2%}{expected}"
    return f"{row['recipe']}, {row['length']:,} tokens: {row['kib']:.2f} KiB per token{seconds or ', out of memory'}"
