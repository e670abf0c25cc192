"""What a stack of decoder layers keeps and in what pieces it works: parsed from text such as "tiled+groups+slots=6"."""

import re
from dataclasses import dataclass, replace
from typing import Protocol

import jax.numpy as jnp

WORDS = """\
plain              all that the backward pass needs is kept
checkpoint         the input of every layer is kept, by jax.checkpoint
slots=N            N inputs of layers are kept, by memjax.remat.scan, which recomputes the others
budget=BYTES       as many bytes as that, by memjax.remat.scan: budget=64MiB
bits=8, bits=4     every layer's input, or with slots=N these, is kept in so many bits per value, with scales for each position
offload            every layer's input is kept in the host's memory
tiled, tiled=N     norms, projections and feed-forward layers run N positions at a time
groups, groups=N   attention takes its heads in N groups, by default as many as heads of keys
keep_attention     with groups: the attention's outputs and log-sum-exps are kept, so that it runs once less"""
GROUP = 256  # features that share a scale with bits=8 and bits=4
_KEPT = ("plain", "checkpoint", "slots", "budget", "offload")  # and bits, alone


class Sizes(Protocol):
    """What the formulas need of a model."""

    @property
    def dim(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Recipe:
    """See `WORDS`."""

    kept: str = "plain"
    slots: int | None = None
    budget: str | None = None
    bits: int | None = None
    tiled: bool = False
    tile: int | None = None
    groups: int | None = None
    """0: as many as heads of keys; None: all heads at once."""
    keep_attention: bool = False

    def __str__(self) -> str:
        value = getattr(self, self.kept, None)
        words = [self.kept if value is None else f"{self.kept}={value}"]
        if self.kept == "slots" and self.bits:
            words.append(f"bits={self.bits}")
        if self.groups is not None:
            words.insert(0, f"groups={self.groups}" if self.groups else "groups")
        if self.tiled:
            words.insert(0, f"tiled={self.tile}" if self.tile else "tiled")
        if self.keep_attention:
            words.append("keep_attention")
        return "+".join(words)

    def bytes_per_token(self, sizes: Sizes) -> float | None:
        """What a token takes in the backward pass, kept and worked with; None where it is no matter of the token.

        With D, H, F for features, features of a head and of the feed-forward layer, N and K heads of queries and of keys, b
        bytes of a value: inputs of layers take b D each; a layer at work 4 b D for input, middle and their cotangents, and
        the larger of 4 b H (N + K) for queries, keys, values, outputs and theirs, and 4 b F, nothing where tiled. With
        groups, attention has for itself 2 b D, for its input and the cotangent, b H (N + 2 K) for cotangents of all queries,
        keys and values, and 4 b H (N + K) / groups.
        """
        b = jnp.dtype(sizes.dtype).itemsize
        x, head = b * sizes.dim, b * sizes.head_dim
        attention: float = 4 * head * (sizes.heads + sizes.kv_heads)
        feed_forward = 4 * x + (0 if self.tiled else 4 * b * sizes.hidden)
        if self.groups is None:
            work = max(4 * x + attention, feed_forward)
        else:
            groups = self.groups or sizes.kv_heads
            attention = 2 * x + head * (sizes.heads + 2 * sizes.kv_heads) + attention / groups
            # Outputs are there until cotangents of queries take their place, log-sum-exps to the end.
            outputs, sums = (head * sizes.heads, 4 * sizes.heads) if self.keep_attention else (0, 0)
            work = max(attention, feed_forward + outputs) + sums
        code = (self.bits or 0) * sizes.dim / 8 + 8 * max(sizes.dim // GROUP, 1)
        kept = {
            "checkpoint": sizes.layers * x,
            "slots": (self.slots or 0) * (code if self.bits else x),
            "bits": sizes.layers * code,
            "offload": 0,
        }
        return kept[self.kept] + work if self.kept in kept else None


def parse(text: str) -> Recipe:
    """Raises ValueError for what is no recipe."""
    recipe = Recipe()
    seen: set[str] = set()
    for word in text.split("+"):
        name, equals, value = word.partition("=")
        what = "kept" if name in _KEPT else name
        if what in seen:
            raise ValueError(f"a recipe must say once what is kept and how it is cut, got {text!r}")
        seen.add(what)
        number = int(value) if re.fullmatch(r"[1-9]\d*", value) else None
        if name in ("plain", "checkpoint", "offload") and not equals:
            recipe = replace(recipe, kept=name)
        elif name == "slots" and number:
            recipe = replace(recipe, kept=name, slots=number)
        elif name == "budget" and value:
            recipe = replace(recipe, kept=name, budget=value)
        elif name == "bits" and number in (4, 8):
            recipe = replace(recipe, bits=number)
        elif name == "tiled" and (number or not equals):
            recipe = replace(recipe, tiled=True, tile=number)
        elif name == "groups" and (number or not equals):
            recipe = replace(recipe, groups=number or 0)
        elif word == "keep_attention":
            recipe = replace(recipe, keep_attention=True)
        else:
            words = ", ".join(line.split("  ")[0] for line in WORDS.splitlines())
            raise ValueError(f"a recipe must be words of {words}, joined by +, got {word!r} in {text!r}")
    if recipe.bits and "kept" not in seen:
        recipe = replace(recipe, kept="bits")
    if recipe.bits and recipe.kept not in ("bits", "slots"):
        raise ValueError(f"a recipe must have bits alone or with slots, got {text!r}")
    if recipe.keep_attention and recipe.groups is None:
        raise ValueError(f"keep_attention must come with groups, got {text!r}")
    return recipe
