"""How XLA spreads a program over devices, where JAX has no public way to ask or to say so."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np


def spread_by_xla(ctx: Any) -> Any:
    """The context of a lowering rule where XLA spreads the program over devices, for `custom_partitioning`; else None.

    That is given devices only where a primitive says that it needs them, and then refuses programs of several meshes. It makes
    no use of them where it does not decode shardings.
    """
    module, context = ctx.module_context, ctx.module_context.axis_context
    count = getattr(context, "num_devices", 1)
    if count == 1 or module.lowering_parameters.for_export:
        return None
    devices = (jax.local_devices()[0],) * count
    context = dataclasses.replace(context, device_assignment=devices, abstract_mesh=None)
    return ctx.replace(module_context=module.replace(axis_context=context))


def split_marked(lowered: Any, mark: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, list[list[int]]]]:
    """Into how many parts XLA divides what passes marked barriers of a lowered program, over a mesh, along each dimension.

    Yields the number of a mark and, for each of the arrays that pass its barrier, these counts. Nothing where Shardy is not the
    partitioner, or does not run from Python.

    Args:
      lowered: the program, a `jax.stages.Lowered`.
      mark: how the name of a scope around a barrier begins; its number follows.
      sizes: of the axes of the mesh.
    """
    if (module := _with_all_shardings(lowered)) is None:
        return
    from jaxlib.mlir.dialects import sdy

    pattern = re.compile(re.escape(mark) + r"(\d+)/")

    def parts(axis: Any) -> int:
        own = sdy.AxisRefAttr(axis)
        return sizes[own.name] if own.sub_axis_info is None else sdy.SubAxisInfoAttr(own.sub_axis_info).size

    def counts(value: Any) -> list[int]:
        dims = sdy.TensorShardingAttr(value).dimension_shardings
        return [math.prod(map(parts, sdy.DimensionShardingAttr(dim).axes)) for dim in dims]

    todo = [module.operation]
    while todo:
        operation = todo.pop()
        todo += [one.operation for region in operation.regions for block in region.blocks for one in block.operations]
        if operation.name != "stablehlo.optimization_barrier" or "sdy.sharding" not in operation.attributes:
            continue
        if (found := pattern.search(str(operation.location))) is not None:
            every = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"]).shardings
            yield int(found[1]), [*map(counts, every)]


def _with_all_shardings(lowered: Any) -> Any | None:
    """A lowered program, as MLIR, with the shardings of all arrays; None where Shardy does not tell them."""
    for module_of in (_as_xla_has_it, lambda one: one.compiler_ir()):
        try:
            from jaxlib.mlir.passmanager import PassManager

            module = module_of(lowered)
            with module.context:
                PassManager.parse("builtin.module(inline,symbol-dce,sdy-propagation-pipeline)").run(module.operation)
            return module
        except Exception:  # these are no public functions: errors of all kinds may mean that they have changed
            continue
    return None


_SHARDED = re.compile(r'mhlo\.frontend_attributes = \{xla\.sdy\.sharding = "#sdy\.sharding(<.*?>)"\}')
_CONSTRAINT = re.compile(
    r"stablehlo\.custom_call @(?:Sharding|xla\.sdy\.FuncResultSharding)\((%[\w#]+)\) "
    r'\{.*?#sdy\.sharding_per_value<\[(<.*?>)\]>".*?\} : \((.*?)\) -> tensor<\S*>'
)


def _as_xla_has_it(lowered: Any) -> Any:
    """A lowered program, as MLIR, as XLA has it where it derives shardings: after simplifications that change what they are.

    It comes from HLO, in which shardings are texts.
    """
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    text = _jax.mlir.xla_computation_to_mlir_module(lowered.compiler_ir("hlo")).replace("\\22", '"')
    named = re.findall(r"(\w+) = #sdy\.mesh(<.*?>)(?:, |\})", text)
    text = _SHARDED.sub(r"sdy.sharding = #sdy.sharding\1", text)
    text = _CONSTRAINT.sub(r"sdy.sharding_constraint \1 \2 : \3", text)
    at = text.index("func.func")
    meshes = "".join(f"sdy.mesh @{name} = {axes}\n" for name, axes in dict(named).items())
    with lowered.compiler_ir().context:
        # The attribute that lists meshes has quotes in quotes now.
        head = re.sub(r'xla\.sdy\.meshes = "\{.*?\}"', 'xla.sdy.meshes = ""', text[:at])
        return ir.Module.parse(head + meshes + text[at:])


def tiles_of_devices(sharding: Any, rank: int) -> np.ndarray:
    """Which tile each device has along each dimension, (devices, rank), of what `custom_partitioning` says of a sharding."""
    hlo = sharding._to_xla_hlo_sharding(rank)
    count = sharding.num_devices
    tiles = np.zeros((count, rank), int)
    if not hlo.is_replicated():
        order = np.asarray(hlo.tile_assignment_devices())
        shape = hlo.tile_assignment_dimensions()
        tiles[order] = np.stack(np.unravel_index(np.arange(count), shape), 1)[:, :rank]
    return tiles
