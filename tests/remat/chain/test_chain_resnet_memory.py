"""Compiled bytes of a residual network of Flax, with batch norm and max pooling, on a mesh: within every budget."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memjax.remat import Chain

SLACK = 4096  # bytes of scalars and alignment
SHARES = (0.0, 0.6)


class Stem(nnx.Module):
    def __init__(self, features, axis_name, rngs):
        self.conv = nnx.Conv(3, features, (7, 7), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (3, 3), (2, 2), "SAME")


class Bottleneck(nnx.Module):
    def __init__(self, before, features, axis_name, rngs):
        norm = functools.partial(nnx.BatchNorm, axis_name=axis_name, rngs=rngs)
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        inner = features // 4
        self.conv1, self.norm1 = conv(before, inner, (1, 1)), norm(inner)
        self.conv2, self.norm2 = conv(inner, inner, (3, 3)), norm(inner)
        self.conv3, self.norm3 = conv(inner, features, (1, 1)), norm(features)
        self.skip = conv(before, features, (1, 1))

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        return nnx.relu(self.norm3(self.conv3(y)) + self.skip(x))


def network(axis_name, budget):
    rngs = nnx.Rngs(0)
    return Chain(Stem(8, axis_name, rngs), Bottleneck(8, 32, axis_name, rngs), budget=budget)


def temp(budget, axis_name="batch"):
    """Bytes of a compiled gradient, of one device; the batch is split over a mesh."""
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: network(axis_name, budget)), nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        return jax.lax.psum((model(x) ** 2).sum(), axis_name)

    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), (axis_name,), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32)
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(spec(), spec(), spec(axis_name)), out_specs=spec())
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, rest, x)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis().temp_size_in_bytes


def test_compiled_bytes_keep_within_every_budget():
    with pytest.raises(ValueError, match="least possible") as error:
        temp(1)
    units = {"KiB": 2**10, "MiB": 2**20}
    numbers = re.findall(r"(is|with) ([\d.]+) (KiB|MiB)", str(error.value))
    sizes = {word: float(number) * units[unit] for word, number, unit in numbers}
    found = []
    for share in SHARES:
        budget = int(1.01 * sizes["is"] + share * (sizes["with"] - sizes["is"]))
        found.append(temp(budget))
        assert found[-1] <= budget + SLACK, share
        assert found[-1] >= 0.6 * budget, share  # and it is used
    assert found[0] < found[-1]
