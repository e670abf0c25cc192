"""What the equations of a program cost: FLOPs, bytes moved, and a time on a kind of device.

The time is a model: FLOPs at the rate that large products reach, plus traffic of what the compiler writes to memory, at the
rate of a copy. A chain of elementwise operations is one pass over memory: `stored` says which values it writes. Kernels that
are one equation (attention, Pallas, Triton) have FLOPs, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memjax._core.arrays import is_on_host
from memjax._core.compat import bodies
from memjax._core.program.dataflow import Dataflow, flow_of, is_literal
from memjax._core.program.jaxpr import nbytes
from memjax._core.program.primitives import (
    ALIASES,
    BARRIER,
    BESIDE_REDUCTIONS,
    CALLS,
    CALLS_OF_ONE_BODY,
    DECODING,
    KERNELS,
    KERNELS_OF_ONE_PASS,
    LOOPS,
    REDUCTIONS,
    SLICES,
    SOURCES,
    TRANSCENDENTAL,
    TRANSFERS,
    VIEWS,
    WHOLE_OPERANDS,
    WRITING,
    WRITTEN,
    flops_of_product,
    is_attention,
)


class Device(NamedTuple):
    """The rates of a kind of device, as programs reach them, not as data sheets state them.

    Attributes:
      kind: part of JAX's `device_kind`.
      flops: of matrix products of 16-bit floats, per second.
      attention: the same inside attention kernels.
      nbytes: read or written, per second.
      start: seconds that one operation takes at least.
      link: bytes per second to the memory of the host.
      platform: what JAX compiles for.
      small: seconds that a kernel without a product takes at least; None: as `start`.
      turn, copy: seconds of a turn of a loop beside its kernels, and of the copy of a slice.
    """

    kind: str
    flops: float
    attention: float
    nbytes: float
    start: float
    link: float
    platform: str = "cuda"
    small: float | None = None
    turn: float = 0.0
    copy: float = 0.0


# H200: measured. Others: scaled from that by their data sheets.
_DEVICES = (
    Device("H200", 5.5e14, 4.5e14, 4.0e12, 3e-6, 6e10),
    Device("H100", 5.2e14, 4.3e14, 2.8e12, 3e-6, 5e10),
    Device("B200", 1.2e15, 9.0e14, 6.5e12, 3e-6, 5e10),
    Device("A100", 2.3e14, 1.7e14, 1.6e12, 4e-6, 2e10),
    Device("L4", 8e13, 5e13, 2.5e11, 4e-6, 2e10),
    Device("TPU v4", 2.2e14, 1.5e14, 1.0e12, 2e-6, 1e10, "tpu"),
    Device("TPU v5 lite", 1.6e14, 1.0e14, 7e11, 2e-6, 1e10, "tpu"),
    Device("TPU v5", 3.8e14, 2.5e14, 2.4e12, 2e-6, 1e10, "tpu"),
    Device("TPU v6", 7.5e14, 4.5e14, 1.4e12, 2e-6, 1e10, "tpu"),
)
_OTHER_GPU = Device("gpu", 1.5e14, 1.0e14, 1.0e12, 4e-6, 1e10)
_AMD_GPU = _OTHER_GPU._replace(platform="rocm")
# Measured on a core: a product of 256 x 64 by 64 x 192 126 us; a softmax over 0.1 MB 40 to 110 us, an activation of 0.2 MB times
# another array 70 us; over eight times as much 520 to 700 us and 690 to 920 us.
_CPU = Device("cpu", 5e10, 5e10, 2e10, 1e-6, 1e10, "cpu")
GPUS = ("gpu", "cuda", "rocm")


class InLoop(NamedTuple):
    """What a schedule over the turns of a loop costs besides the turns.

    Attributes:
      stack: bytes of states written to slots, per second.
      loop, turn: seconds of starting a loop, and of a turn of which the compiler does not know how many there are.
    """

    stack: float
    loop: float
    turn: float


# XLA:CPU starts loops that stack several arrays with another thread: on two cores that takes about as long as a turn of an LSTM
# of 64 units. Others start in a tenth of that.
_IN_LOOP = {"gpu": InLoop(3e12, 4.5e-6, 1.3e-5), "cpu": InLoop(1e10, 1e-5, 2e-6)}
_IN_LOOP_ELSEWHERE = InLoop(1e10, 1e-6, 2e-6)


class Rows(NamedTuple):
    """How many rows of matrix products a tile has.

    Each tile adds to the gradients of parameters that all tiles share. These additions read and write about 12 bytes for each
    parameter. The products take 6 FLOPs for each row and parameter.

    Attributes:
      least: with fewer rows, additions take longer than products.
      usual: with so many, additions take 5% of the time of products on an H200, or 2% on a CPU.
      enough: with so many, additions take 2% on an H100. More rows gain nothing.
    """

    least: int
    usual: int
    enough: int = 16384


_ROWS = dict.fromkeys(("gpu", "tpu"), Rows(1024, 8192))
_ROWS_ELSEWHERE = Rows(128, 512)

# Equations that hold programs: the compiler fuses nothing into or out of them.
_HOLDERS = LOOPS | CALLS | CALLS_OF_ONE_BODY

# Passes over its operands that a kernel is assumed to take if nothing else is known about it.
_PASSES_OF_UNKNOWN_KERNEL = 8

# Passes over an array that encoding it in a few bits takes, or decoding it, on an H200: 1.6 ps a byte for both.
_PASSES_OF_CODE = 3.2

# FLOPs of products while a byte is encoded and decoded. It takes 1 ps then, for decoding is fused into what reads the array.
_FLOPS_OF_CODING = {"gpu": 750}

# Over what a turn of a loop keeps: a copy into the stack and one out of it, each read and written, by kernels of their own.
_PASSES_OF_STACKING = 4
# Beside the passes, per array and turn. On an H100 an LSTM that kept its four gates took 2.2 us more than one with their sum.
_SECONDS_OF_STACKING = 5e-7

SUMMED = "memjax_summed"  # parameter of a product in a device's part of a program: its results are summed over devices
# Over the result: NVLink between H200s passes a sixteenth of what a device reads from its memory, or about that.
_PASSES_OF_SUM = 16

SECONDS_TO_SPLIT = 2e-5  # a loop into two


def device(of: Any = None) -> Device:
    """The rates of a JAX device; None: of the default one."""
    of = jax.devices()[0] if of is None else of
    known = next((rates for rates in _DEVICES if rates.kind.lower() in of.device_kind.lower()), None)
    if known or of.platform == "cpu":
        return known or _CPU
    return _AMD_GPU if "amd" in of.device_kind.lower() else _OTHER_GPU


def in_turns(rates: Device) -> Device:
    """The rates in turns of loops: on a GPU graphs start their kernels. Fitted to gradients of an LSTM and a GRU on an H100."""
    return rates._replace(start=1.7e-6, small=1.1e-6, turn=1.8e-6, copy=1.3e-6) if rates.platform in GPUS else rates


def in_loop(platform: str) -> InLoop:
    """The rates in loops on a platform, as JAX calls it."""
    return _IN_LOOP.get("gpu" if platform in GPUS else platform, _IN_LOOP_ELSEWHERE)


def rows_of_tile(platform: str) -> Rows:
    """How many rows a tile has on a platform, as JAX calls it."""
    return _ROWS.get(platform, _ROWS_ELSEWHERE)


def running(eqn: Any, platform: str) -> list[Any]:
    """The programs inside an equation; of those that `jax.lax.platform_dependent` chooses from, the one of `platform`."""
    found = bodies(eqn)
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return found
    return [body for body, names in zip(found, platforms, strict=True) if names is None or platform in names][:1]


def flops(eqn: Any) -> float:
    """The FLOPs of products and kernels in an equation, at any depth; loops of unknown length count once."""
    name = eqn.primitive.name
    if is_attention(name):
        return _attention_flops(eqn)
    if name == "pallas_call":
        return _pallas_flops(eqn)
    inside = [sum(map(flops, body.eqns)) for body in bodies(eqn)]
    turns = eqn.params["length"] if name == "scan" else 1
    return turns * (max(inside, default=0.0) if name == "cond" else sum(inside)) + flops_of_product(eqn)


def _attention_flops(eqn: Any) -> float:
    """Two products forward, five backward; half of them under a causal mask."""
    query, key = (atom.aval.shape for atom in eqn.invars[:2])
    if len(query) != 4 or len(key) != 4:
        return 0.0
    rows_by_columns = math.prod(query) * key[1 if eqn.params.get("layout", 0) == 0 else 2]
    causal = "CAUSAL" in str(eqn.params.get("mask_type", ""))
    return (10.0 if "bwd" in eqn.primitive.name else 4.0) * rows_by_columns * (0.5 if causal else 1.0)


def _pallas_flops(eqn: Any) -> float:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    turns = math.prod(size for size in grid if isinstance(size, int))
    return turns * sum(sum(map(flops, body.eqns)) for body in bodies(eqn))


def array_bytes(atom: Any) -> int:
    """The bytes of a variable; literals and what is no array have none."""
    return 0 if is_literal(atom) else nbytes(atom.aval)


class Kind(NamedTuple):
    """What the compiler does with all equations of a primitive.

    Attributes:
      is_alias: its output is another name for its operand.
      is_whole: its operands are written to memory first.
      is_fusible: it and the equation that reads its output make one pass over memory.
      is_transcendental: it takes an exponential or the like.
      is_free: making its output again costs nothing.
    """

    is_alias: bool
    is_whole: bool
    is_fusible: bool
    is_transcendental: bool
    is_free: bool


@functools.cache  # planning asks for every equation of every way to run a stretch
def kind_of(name: str) -> Kind:
    """The kind of a primitive, by its name."""
    is_whole = name in WHOLE_OPERANDS or name in _HOLDERS or is_attention(name)
    is_free = name in SOURCES or name in VIEWS or name in DECODING
    is_fusible = not is_whole and name not in REDUCTIONS and name != WRITTEN
    return Kind(name in ALIASES, is_whole, is_fusible, name in TRANSCENDENTAL, is_free)


def is_fusible(eqn: Any) -> bool:
    """Whether the compiler makes one pass over memory of this equation and the one that reads its output."""
    return kind_of(eqn.primitive.name).is_fusible


def stored(
    eqns: Sequence[Any] | Dataflow, outputs: Iterable[Any], platform: str = "cuda", *, writes_shared: bool = False
) -> set[Any]:
    """Which values of straight-line equations the compiler writes to memory; other names for these are among them.

    An elementwise value is written if it passes a barrier, or if an equation reads it that is not elementwise, nor a sum. All
    others compute it again, each for itself; on CPUs not where that takes an exponential or the like. On CPUs a reduction along
    rows is one kernel with the values that it alone reads. A value that others read as well, or one that is selected or cut out,
    is written before it.

    With `writes_shared` a value that several equations read is written too, unless making it costs nothing.
    """
    flow = flow_of(eqns)
    names, roots, kinds = flow.names, flow.roots, [kind_of(eqn.primitive.name) for eqn in flow.eqns]
    readers: dict[Any, int] = {}
    whole: set[Any] = set()
    inside: set[Any] = set()  # of the kernels of reductions
    for eqn, kind, read in zip(flow.eqns, kinds, roots, strict=True):
        if eqn.primitive.name == BARRIER:
            whole |= read
        if not kind.is_alias:
            for var in read:
                readers[var] = readers.get(var, 0) + 1
            if kind.is_whole:
                whole |= read
    if platform == "cpu":
        for eqn, kind, read in zip(reversed(flow.eqns), reversed(kinds), reversed(roots), strict=True):
            if kind.is_alias:  # its results are its operands, and of a barrier some may be in a kernel, others not
                continue
            outs = [names.get(out, out) for out in eqn.outvars]
            if kind.is_fusible and not inside.isdisjoint(outs) and eqn.primitive.name in BESIDE_REDUCTIONS:
                whole.update(outs)
            elif _is_along_rows(eqn) or (kind.is_fusible and not inside.isdisjoint(outs)):
                inside |= {var for var in read if readers[var] == 1}
                whole |= {var for var in read if readers[var] > 1}
    written = {names.get(atom, atom) for atom in outputs if not is_literal(atom)}
    heavy: set[Any] = set()
    for eqn, kind, read in zip(flow.eqns, kinds, roots, strict=True):
        is_heavy = platform == "cpu" and (kind.is_transcendental or not heavy.isdisjoint(read))
        again = is_heavy or (writes_shared and not kind.is_free)
        for var in eqn.outvars:
            if var not in names and (not kind.is_fusible or var in whole or (again and readers.get(var, 0) > 1)):
                written.add(var)
            elif is_heavy:
                heavy.add(names.get(var, var))
    return written | {var for var, origin in names.items() if origin in written}


def _is_along_rows(eqn: Any) -> bool:
    """Whether it is a reduction along the last dimension, in which elements lie side by side."""
    return eqn.primitive.name in REDUCTIONS and eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]


def seconds(eqn: Any, rates: Device, is_stored: Callable[[Any], bool]) -> float:
    """A rough time of one equation, `is_stored` saying which of its operands and results are in memory."""
    name = eqn.primitive.name
    if name in ALIASES:
        return 0.0
    if name in _HOLDERS:
        turns, inside = (eqn.params["length"], in_turns(rates)) if name == "scan" else (1, rates)
        return turns * max((program_seconds(body, inside) for body in running(eqn, rates.platform)), default=0.0)
    if name in TRANSFERS:
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        moved = [array_bytes(out) for atom, out in pairs if is_on_host(atom.aval) != is_on_host(out.aval)]
        return sum(moved) / rates.link + rates.start * len(moved)
    written = sum(array_bytes(var) for var in eqn.outvars if is_stored(var))
    read = sum(array_bytes(atom) for atom in {*filter(lambda a: not is_literal(a), eqn.invars)} if is_stored(atom))
    if name in SLICES:
        read = min(read, sum(map(array_bytes, eqn.outvars)))
    elif name == WRITING:
        read = written = min(read, array_bytes(eqn.invars[1]))
    time = (written + read) / rates.nbytes
    if eqn.params.get(SUMMED):
        time += _PASSES_OF_SUM * sum(map(array_bytes, eqn.outvars)) / rates.nbytes
    work = flops(eqn)
    if not work and name in KERNELS:
        return rates.start + time * (1 if name in KERNELS_OF_ONE_PASS else _PASSES_OF_UNKNOWN_KERNEL)
    if work:
        rate = rates.attention if is_attention(name) else rates.flops * _speed(eqn, rates)
        return rates.start + max(work / rate, time)
    return time + ((rates.start if rates.small is None else rates.small) if written else 0.0)


def coding_seconds(nbytes: int, rates: Device) -> float:
    """A rough time of encoding an array of so many bytes in few bits and decoding it once."""
    return 2 * (rates.start + _PASSES_OF_CODE * nbytes / rates.nbytes)


def flops_of_coding(platform: str) -> int:
    """What products could do while a byte is encoded and decoded, on a platform, as JAX calls it. CPUs take longer for these."""
    return _FLOPS_OF_CODING.get(platform, 0)


def moving_seconds(nbytes: int, rates: Device) -> float:
    """A rough time of moving an array of so many bytes to the memory of the host and back."""
    return 2 * nbytes / rates.link


def stacking_seconds(nbytes: int, rates: Device) -> float:
    """A rough time of what a turn of a loop takes to stack so many bytes, and to read them again; compilers for CPUs fuse it."""
    return 0.0 if rates.platform == "cpu" else _SECONDS_OF_STACKING + _PASSES_OF_STACKING * nbytes / rates.nbytes


def link_of_devices(rates: Device) -> float:
    """Bytes per second that one device sends to another."""
    return rates.nbytes / _PASSES_OF_SUM


def product_seconds(work: float, dtype: Any, rates: Device) -> float:
    """A rough time of products of so many FLOPs, of numbers of this dtype."""
    return work / (rates.flops * _speed_of(dtype, rates))


def fused_seconds(eqns: Iterable[Any], rates: Device) -> float:
    """A rough time of equations in calls. Half of the traffic counts as fused: variables do not show who reads what."""
    return sum(max(flops(eqn) / rates.flops, traffic(eqn) / (2 * rates.nbytes)) for eqn in eqns)


def traffic(eqn: Any) -> int:
    """Bytes that an equation reads and writes, if it is run by itself."""
    return 0 if eqn.primitive.name in ALIASES else sum(map(array_bytes, (*eqn.invars, *eqn.outvars)))


def _speed(eqn: Any, rates: Device) -> float:
    """The rate of products of this dtype, relative to 16-bit floats."""
    return _speed_of(
        next((atom.aval.dtype for atom in eqn.invars if hasattr(atom.aval, "dtype")), jnp.dtype("float32")), rates
    )


def _speed_of(dtype: Any, rates: Device) -> float:
    if rates is _CPU:
        return 1.0 if dtype.itemsize < 8 else 0.5
    return {1: 2.0, 2: 1.0, 4: 0.5, 8: 0.08}.get(dtype.itemsize, 0.04)


def program_seconds(program: Any, rates: Device) -> float:
    """A rough time of a program, a jaxpr or a `Program`. What it reads of others is in memory."""
    flow = Dataflow(program.eqns)
    written = stored(flow, [*program.outvars, *flow.outside], rates.platform)
    return sum(seconds(eqn, rates, written.__contains__) for eqn in flow.eqns)
