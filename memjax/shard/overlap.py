"""When hops round a ring are hidden: functions of shapes, matmul rate and bandwidth.

A hop is hidden if it takes no longer than the step it runs beside:

    message bytes / bandwidth(message bytes) <= step FLOP / (FLOP/s)

`full_overlap_tokens` solves this for the tokens per device, the paper's condition of full overlap (Liang et al. 2025,
abstract). `measure_matmul` and `measure_link` give the two rates of the available machine; bandwidth grows with the message.

    >>> link = Link((2**20, 2**29), (26e9, 350e9))
    >>> full_overlap_tokens(lambda t: mlp_step(t, dim=4096, hidden=16384, size=8), 789e12, link)
    8165
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax._core import check
from memjax._core.barriers import barrier
from memjax._core.timing import seconds
from memjax.shard import ring

_ROUNDS = 4


@dataclass(frozen=True)
class Step:
    """What one device does in one step of a ring."""

    flops: float
    """FLOPs of the matmuls."""
    message_bytes: float
    """Bytes that are sent, and as many received."""

    def __post_init__(self) -> None:
        check.number("flops", self.flops, positive=True)
        check.number("message_bytes", self.message_bytes, positive=True)


@dataclass(frozen=True)
class Link:
    """Bandwidth of a hop by the size of its message."""

    sizes: tuple[int, ...]
    """Sizes of messages in bytes, rising."""
    bandwidths: tuple[float, ...]
    """Bytes per second."""

    def __post_init__(self) -> None:
        for name in ("sizes", "bandwidths"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values:
                raise check.fail(TypeError, name, "a tuple of at least one number", values)
            for value in values:
                check.number(name, value, positive=True)
        if len(self.bandwidths) != len(self.sizes):
            raise check.fail(ValueError, "bandwidths", f"{len(self.sizes)} numbers, one for each size", self.bandwidths)
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise check.fail(ValueError, "sizes", "rising", self.sizes)

    def bandwidth(self, size: float) -> float:
        """Bytes per second for a size, interpolated in its logarithm; constant beyond the ends."""
        check.number("size", size, positive=True)
        return float(np.interp(np.log(size), np.log(self.sizes), self.bandwidths))

    def seconds(self, size: float) -> float:
        """Seconds that a message of so many bytes takes."""
        return size / self.bandwidth(size)


def mlp_step(
    tokens: int, *, dim: int, hidden: int, size: int, gated: bool = False, itemsize: int = 2, backward: bool = False
) -> Step:
    """What a device does in a step of `metp_mlp` with (tokens, dim) per device.

    These are 2 or 3 matmuls with a block of each weight, 5 or 8 in the backward pass, where float32 gradients travel with
    the weights.

    Raises:
      ValueError, TypeError: numbers that are not positive integers, flags that are not booleans.
    """
    _positive(tokens=tokens, dim=dim, hidden=hidden, size=size, itemsize=itemsize)
    gated, backward = check.flag("gated", gated), check.flag("backward", backward)
    weights = 2 + gated
    matmuls = 3 * weights - 1 if backward else weights
    entries = weights * dim * hidden / size
    return Step(2 * matmuls * tokens * dim * hidden / size, entries * (itemsize + 4 * backward))


def hidden_share(step: Step, flops_per_second: float, link: Link) -> float:
    """The part of a hop that its step can hide, at most 1."""
    if not isinstance(step, Step):
        raise check.fail(TypeError, "step", "a memjax.shard.overlap.Step", step, "mlp_step makes them")
    check.number("flops_per_second", flops_per_second, positive=True)
    if not isinstance(link, Link):
        raise check.fail(TypeError, "link", "a memjax.shard.overlap.Link", link, "measure_link makes one")
    return min(1.0, step.flops / flops_per_second / link.seconds(step.message_bytes))


def full_overlap_tokens(step: Callable[[int], Step], flops_per_second: float, link: Link, *, limit: int = 2**24) -> int:
    """The fewest tokens per device with which hops are wholly hidden, for a `step` of so many tokens.

    Raises:
      ValueError: hops are not hidden with `limit` tokens either, or numbers are out of range.
      TypeError: arguments of another kind.
    """
    check.function("step", step, "step(tokens per device) returns a Step, as mlp_step does", arguments=1)
    _positive(limit=limit)
    hidden = lambda tokens: hidden_share(step(tokens), flops_per_second, link) >= 1
    if not hidden(limit):
        wanted = "a number of tokens per device with which hops are hidden"
        raise check.fail(ValueError, "limit", wanted, limit, "raise it, if the link is fast enough at all")
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def measure_matmul(size: int = 8192, dtype: Any = jnp.bfloat16) -> float:
    """FLOP/s of square matmuls on one device, float32 accumulation."""
    _positive(size=size)
    check.dtype("dtype", dtype, floating=True)
    # Of random numbers: GPUs multiply ones faster, drawing less power.
    a = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * size**3 / _seconds(multiply, a, a)


def measure_link(
    devices: Sequence[jax.Device] | None = None, sizes: Sequence[int] = (2**20, 2**23, 2**25, 2**27, 2**29)
) -> Link:
    """Bandwidth of hops round a ring of the devices, all of them by default, by message size in bytes.

    Raises:
      ValueError, TypeError: fewer than two devices, or sizes that are not positive multiples of 4.
    """
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise check.fail(TypeError, "sizes", "a sequence of at least one number of bytes", sizes)
    for size in sizes:
        if check.integer("sizes", size, least=4, what="multiples of 4 bytes") % 4:
            raise check.fail(ValueError, "sizes", "multiples of 4 bytes", size)
    ring_devices = np.asarray(jax.devices() if devices is None else devices)
    if ring_devices.size < 2:
        raise check.fail(ValueError, "devices", "at least two for a ring", ring_devices.size)
    for device in ring_devices.flat:
        if not isinstance(device, jax.Device):
            raise check.fail(TypeError, "devices", "devices of JAX", device, "pass jax.devices(), for example")
    if len(set(ring_devices.flat)) < ring_devices.size:
        raise check.fail(ValueError, "devices", "devices that differ", list(ring_devices.flat))
    mesh = Mesh(ring_devices, ("ring",))
    sharding = NamedSharding(mesh, PartitionSpec("ring"))

    def hops(a: jax.Array) -> jax.Array:
        seen = a[:1]
        for _ in range(_ROUNDS):  # so that starting the program takes little of the time
            seen, a = barrier((seen, a))
            seen = ring.scan(lambda seen, block, step: seen + block[:1], a, seen, axis_name="ring")
        return seen

    over_ring = jax.jit(jax.shard_map(hops, mesh=mesh, in_specs=PartitionSpec("ring"), out_specs=PartitionSpec("ring")))
    bandwidths = []
    for size in sizes:
        make = jax.jit(lambda size=size: jnp.ones(ring_devices.size * size // 4, jnp.float32), out_shardings=sharding)
        bandwidths.append(size * (ring_devices.size - 1) * _ROUNDS / _seconds(over_ring, make()))
    return Link(tuple(sizes), tuple(bandwidths))


def _positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        check.integer(name, value, least=1)


def _seconds(f: Callable[..., Any], *args: Any) -> float:
    """Time of one call: the median of several rounds of calls in a row, after one that compiles."""
    seconds(f, *args)
    return float(np.median([seconds(f, *args, calls=5) for _ in range(5)]))
