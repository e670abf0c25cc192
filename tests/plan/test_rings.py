"""Notes on rings: what METP's layers would give where sequences are split over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax

BATCH, TOKENS, DIM, HIDDEN = 2, 512, 32, 256


def mesh_of(kind, *sizes):
    names = ("data", "seq")[-len(sizes) :]
    return Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names, axis_types=(kind,) * len(sizes))


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def plain(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def biased(p, x):
    return jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def loss_with(layer, count=2):
    def loss(params, x):
        for _ in range(count):
            x = x + layer(params, x)
        return jnp.mean(x**2)

    return loss


def arguments(mesh, tokens):
    of = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    shapes = {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    params = {name: of(shape, P()) for name, shape in shapes.items()}
    return params | {"bias": of((HIDDEN,), P())}, of((BATCH, TOKENS, DIM), tokens)


def notes(layer, mesh, tokens):
    loss = loss_with(layer)
    step = memjax.jit(jax.value_and_grad(loss), budget="75%", allow=("recompute",))
    with jax.set_mesh(mesh):
        plan = step.plan(*arguments(mesh, tokens))
    return [note for note in plan.notes if note.startswith("ring")]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_step_says_what_a_ring_would_give(kind):
    [note] = notes(gated, mesh_of(kind, 8), P(None, "seq"))
    assert "2 feed-forward layers" in note
    assert "8 devices along 'seq'" in note
    assert "in 1.00 of the time of its products, hops of 12.00 KiB being hidden" in note
    # Of a device: its tokens' hidden values, and three whole matrices with their gradients.
    whole = BATCH * TOKENS // 8 * HIDDEN * 4 + 2 * 3 * DIM * HIDDEN * 4
    assert f"instead of {whole / 1024:.2f} KiB" in note


def test_batches_that_are_split_and_layers_that_are_not_known_get_no_note():
    mesh = mesh_of(AxisType.Auto, 8)
    assert not notes(plain, mesh_of(AxisType.Auto, 2), P("seq"))  # examples are split
    assert not notes(biased, mesh, P(None, "seq"))
    assert not notes(plain, mesh, P())


def test_a_plan_of_types_that_state_their_sharding():
    mesh = mesh_of(AxisType.Explicit, 2, 4)
    with jax.set_mesh(mesh):
        args = arguments(mesh, P("data", "seq"))
        plan = memjax.plan(loss_with(plain, 1), *args, budget="min")
    [note] = [note for note in plan.notes if note.startswith("ring")]
    assert "a feed-forward layer" in note
    assert "4 devices along 'seq'" in note
    assert memjax.Plan.from_json(plan.to_json()).notes == plan.notes


def test_layers_in_a_loop_count_and_rings_of_two_that_save_little_are_left_out():
    """With few tokens a ring saves nothing: a device holds two blocks of weights and gradients, one of which travels."""
    mesh = mesh_of(AxisType.Explicit, 8)
    of = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    params = {"up": of((3, DIM, HIDDEN), P()), "down": of((3, HIDDEN, DIM), P())}

    def scanned(params, x):
        x, _ = jax.lax.scan(lambda x, p: (x + plain(p, x), None), x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        plan = memjax.plan(scanned, params, of((BATCH, TOKENS, DIM), P(None, "seq")), budget="min")
    assert ["3 feed-forward layers" in note for note in plan.notes] == [True]
    two = mesh_of(AxisType.Explicit, 2)
    with jax.set_mesh(two):
        short, (params, x) = loss_with(plain), arguments(two, P(None, "seq"))
        x = jax.ShapeDtypeStruct((1, 2, DIM), x.dtype, sharding=x.sharding)
        assert not memjax.plan(short, params, x, budget="min").notes
