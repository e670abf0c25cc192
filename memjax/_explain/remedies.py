"""What would remove an array that is kept, what it saves, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from memjax._core.compat import call_site, primitive_name
from memjax._core.program.costs import Device, coding_seconds, flops, fused_seconds, moving_seconds
from memjax._core.program.primitives import ALIASES, ELEMENTWISE, PRODUCTS, RANDOM, REDUCTIONS, SOURCES
from memjax._core.program.scopes import Paths, runs_in_loop
from memjax._explain.kept import Group, Pass, collapsed
from memjax._explain.parts import Remedy
from memjax._residuals import Equation, Value
from memjax.compress._codecs.block_quantized import BlockQuantized

# One checkpoint round nearly everything keeps nothing, and computes everything at once: the peak is then there.
_MOST = 0.6
_OFFLOADS = 1 << 20
_LONG = 64  # iterations of a loop: over time, as layers are fewer
_MORE = 1.05
_LEAST = 0.5
_NARROW = {"float64": "float32", "float32": "bfloat16"}


class Remedies:
    """Remedies for the rows of one function.

    Args:
      paths: of its modules.
      residual_bytes: all it keeps.
      of: the rates of the device.
    """

    def __init__(self, paths: Paths, residual_bytes: int, of: Device):
        self._paths, self._residual_bytes, self._of = paths, residual_bytes, of
        self._effects: dict[tuple, dict[str, _Effect]] = {}

    def of(self, group: Group) -> tuple[Remedy, ...]:
        """For the arrays of a row: exact ones first, the cheapest before others; each checkpoint that follows saves more."""
        worth: list[Remedy] = list(_scheduled(group, self._paths, self._of))
        for remedy in sorted(self._checkpoints(group), key=lambda one: (one.milliseconds, -one.saves)):
            if not worth or worth[-1].kind == "schedule" or remedy.saves > _MORE * worth[-1].saves:
                worth.append(remedy)
        return (*worth, *self._tiled(group), *_offload(group, self._of), *_narrower(group, self._of))

    def _checkpoints(self, group: Group) -> Iterator[Remedy]:
        """`jax.checkpoint` round the module, or one of those around it; keeping the results of products, or nothing."""
        passes = _passes(group)
        loops = {self._paths.of(forward.program[0].outer) for forward in passes if forward.iterations > 1}
        for prefixes in self._around(group):
            # What is around a loop cannot be checkpointed in its body.
            if any(_inside(loop, one) and loop != one for loop in loops for one in prefixes):
                return
            where = collapsed(prefixes)
            where = f"the body of the loop in {where}" if loops & set(prefixes) else where
            for kind, effect in self._effect(prefixes, passes).items():
                too_much = effect.instances == 1 and effect.saves > _MOST * self._residual_bytes
                removes = all(array.value in effect.removed for array in group.arrays)
                if effect.saves > _LEAST * group.nbytes and removes and not too_much:
                    policy = "(policy=jax.checkpoint_policies.dots_saveable)" if kind == "free" else ""
                    times = f", {effect.instances} times" if effect.instances > 1 else ""
                    how = f"jax.checkpoint{policy} (or nn.remat, nnx.remat) round {where}{times}"
                    yield Remedy(kind, effect.saves, 1000 * effect.seconds, effect.flops, True, how)

    def _tiled(self, group: Group) -> Iterator[Remedy]:
        """The smallest module around that treats positions alone: what a checkpoint saves, and no peak while it is recomputed."""
        for prefixes in self._around(group):
            effect = self._effect(prefixes, _passes(group))["recompute"]
            if effect.is_by_position and all(array.value in effect.removed for array in group.arrays):
                how = f"memjax.remat.tiled round {collapsed(prefixes)}"
                yield Remedy("tile", effect.saves, 1000 * effect.seconds, effect.flops, True, how)
                return

    def _around(self, group: Group) -> Iterator[tuple[str, ...]]:
        """The modules of a row, then those around these, and so on, as far as they are not the function itself."""
        for size in range(min(path.count("/") + 1 for path in group.paths), 0, -1):
            prefixes = tuple(dict.fromkeys("/".join(path.split("/")[:size]) for path in group.paths))
            if self._paths.name in prefixes:
                return
            yield prefixes

    def _effect(self, prefixes: tuple[str, ...], passes: Sequence[Pass]) -> dict[str, _Effect]:
        """What checkpoints round these modules do, by kind. Rows of one module ask for the same."""
        key = (prefixes, *map(id, passes))
        if key in self._effects:
            return self._effects[key]
        regions = [(forward, _regions(forward, prefixes, self._paths)) for forward in passes]
        self._effects[key] = {}
        for kind in ("free", "recompute"):
            effect = _Effect(instances=sum(forward.iterations * len(calls) for forward, calls in regions))
            effect.is_by_position = all(_by_position(call.equations()) for _, calls in regions for call in calls)
            for forward, calls in regions:
                found = _checkpointed(forward, calls, self._paths, keeps_products=kind == "free")
                new = [
                    value for value in found.inputs if value not in forward.kept and value.program is forward.program
                ]
                eqns = [equation.eqn for equation in found.equations]
                effect.saves += forward.iterations * (_nbytes(found.dropped) - _nbytes(new))
                effect.seconds += forward.iterations * fused_seconds(eqns, self._of)
                effect.flops += forward.iterations * sum(map(flops, eqns))
                effect.removed |= found.dropped
            self._effects[key][kind] = effect
        return self._effects[key]


def _passes(group: Group) -> list[Pass]:
    """Those that the arrays of a row are made in."""
    return list({id(array.forward): array.forward for array in group.arrays}.values())


@dataclass
class _Effect:
    """What checkpoints round modules save and cost, what is no longer kept, and how many there are."""

    instances: int
    saves: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    removed: set[Value] = field(default_factory=set)
    is_by_position: bool = False


def _scheduled(group: Group, paths: Paths, of: Device) -> Iterator[Remedy]:
    """A schedule for a long loop: of the states of all iterations about twice the square root stays, at one more forward pass."""
    forward = group.arrays[0].forward
    if forward.iterations < _LONG or any(array.forward is not forward for array in group.arrays):
        return
    eqns = [equation.eqn for equation in forward.program]
    saves = int(group.nbytes * (1 - 2 / math.sqrt(forward.iterations)))
    where = paths.of(forward.program[0].outer)
    how = f"memjax.remat.scan(..., budget=) in place of the loop of {forward.iterations} iterations in {where}"
    how += ", or memjax.planned(loss, budget=)"
    recomputed_flops = forward.iterations * sum(map(flops, eqns))
    yield Remedy("schedule", saves, 1000 * forward.iterations * fused_seconds(eqns, of), recomputed_flops, True, how)


def _offload(group: Group, of: Device) -> list[Remedy]:
    if group.nbytes < _OFFLOADS or of.platform == "cpu":  # which has no memory besides the host's
        return []
    how = "name it with jax.ad_checkpoint.checkpoint_name, and memjax.remat.checkpoint(policy=policies.offload(name))"
    return [Remedy("offload", group.nbytes, 1000 * moving_seconds(group.nbytes, of), 0.0, True, how)]


def _narrower(group: Group, of: Device) -> list[Remedy]:
    aval = group.arrays[0].value.aval
    found: list[Remedy] = []
    if group.why:  # it is compressed already
        return found
    if jnp.issubdtype(aval.dtype, jnp.floating):
        code = min(BlockQuantized(8).nbytes(aval) / (aval.dtype.itemsize * aval.size), 1) if aval.size else 1
        saves = group.nbytes - round(code * group.nbytes)
        if saves > 0:
            cost = 1000 * coding_seconds(group.nbytes, of)
            found.append(Remedy("8 bits", saves, cost, 0.0, False, f"memjax.compressed round {group.path}"))
        narrow = _NARROW.get(str(aval.dtype))
        if narrow is not None:
            how = f"compute {group.path} in {narrow}"
            found.append(Remedy("dtype", group.nbytes // 2, 0.0, 0.0, False, how))
    return found


@dataclass(frozen=True)
class _Checkpointed:
    """What checkpoints change: what is no longer kept, what they need instead, and the equations that are recomputed."""

    dropped: set[Value]
    inputs: set[Value]
    equations: list[Equation]


@dataclass(eq=False)
class _Region:
    """One call of a module: its path, what it makes and how, and whether no other call has this path."""

    path: str
    makers: dict[Value, Equation]
    is_only: bool

    def equations(self) -> list[Equation]:
        """In their order."""
        return list({id(equation): equation for equation in self.makers.values()}.values())


def _regions(forward: Pass, prefixes: Sequence[str], paths: Paths) -> list[_Region]:
    """Each call of the modules at these paths. All paths have the same number of names."""
    size = prefixes[0].count("/") + 1
    inside: dict[str, list[tuple[Equation, tuple]]] = {prefix: [] for prefix in prefixes}
    for equation in forward.program:
        place = (*equation.outer, equation.eqn)
        prefix = "/".join(paths.of(place).split("/")[:size])
        if prefix in inside:
            inside[prefix].append((equation, place))
    regions: list[_Region] = []
    for prefix, found in inside.items():
        function = prefix.rpartition("/")[2]
        is_body = bool(found) and forward.iterations > 1 and paths.of(found[0][0].outer) == prefix
        is_only = is_body or any(paths.has_scopes(place) or runs_in_loop(place, function) for _, place in found[:1])
        starts = [False] * len(found) if is_only else _starts([place for _, place in found])
        for (equation, _), begins in zip(found, starts, strict=True):
            if not regions or regions[-1].path != prefix or begins:
                regions.append(_Region(prefix, {}, is_only))
            regions[-1].makers.update((value, equation) for value in equation.outputs if isinstance(value, Value))
    return regions


def _starts(places: Sequence[tuple]) -> list[bool]:
    """Which equations begin a call of a function whose calls all have the same path: where its first line comes once more.

    The first line may itself be run several times in a call: as often as it is run more than most lines are.
    """
    sites = [tuple(map(call_site, place)) for place in places]
    counts = Counter(sites)
    usual = Counter(counts.values()).most_common(1)[0][0] if counts else 1
    every = max(1, round(counts[sites[0]] / usual)) if sites else 1
    seen = itertools.count()
    return [site == sites[0] and next(seen) % every == 0 for site in sites]


def _inside(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _checkpointed(forward: Pass, regions: Sequence[_Region], paths: Paths, *, keeps_products: bool) -> _Checkpointed:
    """The effect of a checkpoint round each region."""
    home = {value: region for region in regions for value in region.makers}
    stays = lambda value: keeps_products and primitive_name(forward.makers[value].eqn) in PRODUCTS
    # Read by another call: whose backward pass reads it cannot be told where calls have the same path.
    shared: set[Value] = set()
    for equation in forward.program:
        own = next((home.get(out) for out in equation.outputs if isinstance(out, Value)), None)
        shared |= {read for read in equation.inputs if isinstance(read, Value) and home.get(read) is not own}

    def read_by_itself(value: Value) -> bool:
        region = home[value]
        inside = all(_inside(paths.of(reader), region.path) for reader in forward.kept[value])
        return inside and (region.is_only or value not in shared)

    dropped = {value for value in forward.kept if value in home and not stays(value) and read_by_itself(value)}
    # What one call makes can be what the next begins with.
    while True:
        inputs: set[Value] = set()
        equations: dict[int, Equation] = {}
        pending, seen = list(dropped), set(dropped)
        while pending:
            region = home[value := pending.pop()]
            equation = region.makers[value]
            equations[id(equation)] = equation
            for read in equation.inputs:
                if not isinstance(read, Value) or read in seen:
                    continue
                if home.get(read) is region and not stays(read):
                    seen.add(read)
                    pending.append(read)
                else:
                    inputs.add(read)
        if not inputs & dropped:
            return _Checkpointed(dropped, inputs, list(equations.values()))
        dropped -= inputs


def _nbytes(values: Iterable[Value]) -> int:
    return sum(value.nbytes for value in values)


# Which modules treat each position of a sequence alone, as `memjax.remat.tiled` wants them.
#
# Not the regions that plans look for (`memjax._core.positions.regions`): those need a result much larger than what goes
# in and comes out, which gated feed-forward layers of up to four times their width do not have, while tiles save there,
# too.

_LEAST_DIMS = 3  # batch, positions, features
_ALONE = (ELEMENTWISE - RANDOM) | ALIASES | SOURCES


def _by_position(equations: Iterable[Equation]) -> bool:
    """Whether no equation mixes positions: products with weights, operations on elements, sums over features.

    A quick look: `memjax.remat.tiled` itself checks the function, and refuses what mixes.
    """
    weights: set[Value] = set()
    has_products = False
    for equation in equations:
        eqn, name = equation.eqn, primitive_name(equation.eqn)
        if all(not isinstance(read, Value) or read in weights for read in equation.inputs):
            outputs = [value for value in equation.outputs if isinstance(value, Value)]
            weights.update(value for value in outputs if value.aval.ndim < _LEAST_DIMS)
        if name == "dot_general":
            has_products = True
            if not _of_weights(equation, weights):
                return False
        elif name in REDUCTIONS:
            if tuple(eqn.params["axes"]) != (eqn.invars[0].aval.ndim - 1,):
                return False
        elif name not in _ALONE:
            return False
    return has_products


def _of_weights(equation: Equation, weights: set[Value]) -> bool:
    """Whether a product sums over features alone, and one operand is the same for all positions."""
    contracted, batch = equation.eqn.params["dimension_numbers"]
    fixed = lambda read: not isinstance(read, Value) or read in weights
    sides: list[tuple[Any, Any, Any]] = list(
        zip(equation.inputs, (atom.aval for atom in equation.eqn.invars), contracted, strict=True)
    )
    for (_, aval, axes), (other, *_) in (sides, sides[::-1]):
        if aval.ndim >= _LEAST_DIMS and tuple(axes) == (aval.ndim - 1,) and fixed(other):
            return not any(batch)
    return False
