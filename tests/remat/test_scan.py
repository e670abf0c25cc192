"""`remat.scan` against `jax.lax.scan` in double precision: values, gradients, and the whole contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax.remat import Costs, profile, scan, schedule
from memjax.remat._scan import choose as choose_module
from memjax.remat._scan.choose import choose, exact
from memjax.remat._scan.step import StepBackward, trace_step
from tests.remat.scan_cases import HIDDEN, MIXED, NEST, WAYS, arguments, close, loss, lstm_step, stored_bytes

pytestmark = pytest.mark.usefixtures("x64")


def gradient(scan, values, **options):
    return jax.jit(jax.value_and_grad(functools.partial(loss, scan, **options), argnums=(0, 1, 2)))(*values)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients(way):
    values = arguments(23)
    close(gradient(scan, values, **way), gradient(lax.scan, values))


@pytest.mark.smoke
@pytest.mark.parametrize("way", [HIDDEN, MIXED, NEST], ids=str)
def test_reverse(way):
    values = arguments(13)
    close(gradient(scan, values, reverse=True, **way), gradient(lax.scan, values, reverse=True))


@pytest.mark.parametrize("unroll", [2, 0], ids=str)
@pytest.mark.parametrize("way", [HIDDEN, MIXED, NEST], ids=str)
def test_unroll(way, unroll):
    values = arguments(13)
    close(gradient(scan, values, unroll=unroll, reverse=True, **way), gradient(lax.scan, values, reverse=True))


def test_whiles_left_by_unroll():
    """As many loops, and as large a program, as with `jax.lax.scan` where steps simply follow each other."""

    def program(scan, differentiated, *arguments, **options):
        run = lambda h: scan(lambda h, x: (jnp.sin(h * x), None), h, jnp.ones(12), None, *arguments, **options)[0]
        return jax.jit(jax.grad(run) if differentiated else run).lower(1.0).as_text("hlo")

    for unroll in (False, True, 0, 1, 5, 12, 99):
        for way in (HIDDEN, MIXED, NEST):
            ours, jaxs = (program(s, False, False, unroll, **o) for s, o in ((scan, way), (lax.scan, {})))
            assert ours.count(" while(") == jaxs.count(" while(")
            assert ours.count(" call(") == jaxs.count(" call(")
    loops = [program(scan, True, unroll=unroll, budget="1MiB").count(" while(") for unroll in (1, 4, True)]
    assert loops == [2, 2, 0]  # all is kept: a loop forward and one back
    blocks = [program(scan, True, unroll=unroll, budget=80) for unroll in (1, True)]
    assert blocks[1].count(" while(") < blocks[0].count(" while(")
    slots = [program(scan, True, unroll=unroll, slots=3, strategy="hidden") for unroll in (1, True)]
    assert slots[1].count(" while(") == slots[0].count(" while(") - 1  # the forward pass


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("way", [MIXED, {"budget": 400}], ids=str)
def test_short(way, length):
    values = arguments(length)
    close(gradient(scan, values, **way), gradient(lax.scan, values))


def test_choice():
    """Costs decide: where only steps cost, both kinds of states; where loops do, nests; a tail if the length asks."""
    step, _, backward = lstm_step(8, 4)
    steps_alone, dear_turns = Costs(1.0, 2.0, 0.01, 0.0, 0.0), Costs(1.0, 2.0, 0.0, 0.0, 9.0)

    def plan(length, carries, costs):
        return choose(length, carries * step.carry_nbytes, step, backward, costs)

    assert plan(210, 30, steps_alone).schedule.strategy == "mixed"
    assert plan(210, 30, Costs(1.0, 2.0, 5.0, 0.0, 0.0)).schedule.strategy == "hidden"  # storing is dear
    assert plan(2000, 60, dear_turns).levels
    assert not plan(2000, 60, dear_turns).tail
    assert plan(1999, 60, dear_turns).tail
    assert plan(210, 800, dear_turns).tail == 210  # everything is kept
    for carries in range(6, 800, 41):
        stored = stored_bytes(plan(210, carries, None), step.carry_nbytes, backward.kept_nbytes)
        assert stored <= carries * step.carry_nbytes


def test_measured_costs_are_finite_and_can_be_planned_with():
    """How large they are depends on the machine; that they are of the step, forward and backward, does not."""
    weights = jnp.eye(4)

    def step(h, x):
        h = jnp.tanh(h @ weights + x)
        return h, h.sum()

    costs = profile(step, jnp.ones(4), jnp.ones((2, 4)))
    assert costs.forward > 0
    assert costs.backward > 0
    total = lambda run, **options: lambda h: run(step, h, jnp.ones((20, 4)), **options)[1].sum()
    close(jax.grad(total(scan, budget=300, costs=costs))(jnp.ones(4)), jax.grad(total(lax.scan))(jnp.ones(4)), 1e-5)


def test_steps_that_cost_nothing(monkeypatch):
    """The search ends where no block is too large for the budget, and none is predicted to take any time."""
    calls = []
    division = choose_module._division

    def counted(size, block):
        calls.append(block)
        assert len(calls) < 100
        return division(size, block)

    monkeypatch.setattr(choose_module, "_division", counted)

    def total(h):
        carry, _ = scan(lambda carry, _: ((0.0, 0.0), ()), (h, 0.0), length=5, budget="1MiB")
        return sum(carry)

    assert jax.grad(total)(1.0) == 0


def test_default_strategy():
    """Of hidden states and both kinds the one whose time, predicted from the schedule itself, is least."""
    step, _, backward = lstm_step(8, 4)

    def strategy(slots, length=210, **costs):
        plan = exact(length, slots, None, step, backward, Costs(**costs))
        assert plan.rows <= slots
        return plan.schedule.strategy

    steps_alone = {"forward": 1.0, "backward": 2.0, "store": 0.0, "loop": 0.0, "turn": 0.0}
    for slots in (12, 40, 300):  # where only steps cost, the fewer of them
        hidden, mixed = (exact(210, slots, s, step, backward, None).forward_steps for s in ("hidden", "mixed"))
        assert strategy(slots, **steps_alone) == ("hidden" if hidden <= mixed else "mixed")
    assert strategy(300, **steps_alone) == "mixed"
    assert strategy(300, **steps_alone | {"store": 9.0}) == "hidden"  # storing is dear
    # As timed on a GPU: with 10, 30 and 50 slots for 1,000 steps hidden states took 106, 81 and 71 ms, both kinds 158, 107
    # and 100.
    timed = {"forward": 8.7e-6, "backward": 1.3e-5, "store": 6e-6, "loop": 4e-6, "turn": 1.1e-5}
    assert [strategy(slots, 1000, **timed) for slots in (10, 30, 50)] == ["hidden"] * 3


@pytest.mark.parametrize("strategy", ["hidden", "internal", "mixed"])
@pytest.mark.parametrize("slots", [2, 11])
def test_executes_the_schedule(strategy, slots):
    """Forward steps, counted as they happen, and in memory that holds no more than the slots."""
    steps = []

    def cell(h, x):
        jax.debug.callback(lambda: steps.append(1))
        a = jnp.tanh(h * x)
        b = jnp.sort(a)  # one more value to keep
        return jnp.tanh(b * h), None

    xs = jnp.linspace(0.5, 1.5, 29)[:, None] * jnp.ones(4)

    def total(scan, h, xs, **options):
        return scan(cell, h, xs, **options)[0].sum()

    step, _ = trace_step(cell, jnp.ones(4), xs)
    plan = exact(29, slots, strategy, step, StepBackward(step, [], [True]), None)
    assert plan.schedule == schedule(29, slots, strategy=strategy, internal_size=plan.schedule.internal_size)
    got = jax.jit(jax.grad(functools.partial(total, scan, slots=slots, strategy=strategy), (0, 1)))(jnp.ones(4), xs)
    jax.effects_barrier()
    assert len(steps) == plan.forward_steps
    assert plan.rows <= slots
    close(got, jax.grad(functools.partial(total, lax.scan), (0, 1))(jnp.ones(4), xs))
    if (strategy, slots) == ("mixed", 11):  # some residuals come from slots, some are made anew
        assert len(set(plan.moves.residuals)) > 2
        assert (plan.moves.turns == 0).any()
        assert (plan.moves.turns > 0).any()


def stacked(length):
    params, h, xs = arguments(length)
    return params, jnp.stack([h, 2 * h]), jnp.stack([xs, xs / 2], 1)


def vmap_of_gradient(run):
    params, h, xs = stacked(7)
    params = jax.tree.map(lambda w: jnp.stack([w, w / 3]), params)
    return jax.jit(jax.vmap(jax.grad(run, (0, 1, 2)), (0, None, 1)))(params, h[0], xs)


def gradient_of_vmap(run):
    return jax.grad(lambda *values: jax.vmap(run, (None, 0, 1))(*values).sum(), (0, 1, 2))(*stacked(7))


def gradient_of_gradient(run):
    def of_gradient(*values):
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(jax.grad(run, (0, 1, 2))(*values)))

    return jax.jit(jax.grad(of_gradient, (0, 1, 2)))(*arguments(7))


def third_derivative(run):
    params, h, xs = arguments(5)

    def again(function):
        return lambda h: jnp.sin(jax.grad(function)(h)).sum()

    return jax.jit(jax.grad(again(again(lambda h: run(params, h, xs)))))(h)


def forward_over_reverse(run):
    return jax.jit(jax.jacfwd(jax.jit(jax.grad(run, 1)), 1))(*arguments(7))


def sharded(run):
    params, h, xs = arguments(7)
    h, xs = jnp.tile(h, (8, 1)), jnp.tile(xs, (1, 8, 1)) / jnp.arange(1.0, 17.0)[:, None]
    spec = jax.sharding.PartitionSpec
    specs = (spec(), spec("b"), spec(None, "b"))
    mesh = jax.make_mesh((8,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    outside = jax.shard_map(lambda *v: lax.psum(run(*v), "b"), mesh=mesh, in_specs=specs, out_specs=spec())
    inside = jax.shard_map(jax.grad(run, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.jit(jax.grad(outside, (0, 1, 2)))(params, h, xs), jax.jit(inside)(params, h, xs)


def inside_scan_and_checkpoint(run):
    params, h, xs = arguments(7)

    def total(params, h, xs):
        step = jax.checkpoint(lambda h, x: (h / 2 + run(params, h, x), None))
        return lax.scan(step, h, jnp.stack([xs, xs / 3]))[0].sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(params, h, xs)


def inside_cond(run):
    params, h, xs = arguments(7)

    def either(h, xs):
        return lax.cond(h.sum() > 9e9, lambda: h.sum(), lambda: run(params, h, xs))

    return jax.jit(jax.grad(either, (0, 1)))(h, xs)


@pytest.mark.parametrize("way", [MIXED, NEST], ids=str)
@pytest.mark.parametrize(
    "transform",
    [
        vmap_of_gradient,
        gradient_of_vmap,
        gradient_of_gradient,
        third_derivative,
        forward_over_reverse,
        sharded,
        inside_scan_and_checkpoint,
        inside_cond,
    ],
)
def test_transforms(transform, way):
    close(transform(functools.partial(loss, scan, **way)), transform(functools.partial(loss, lax.scan)))


def nested_in_itself(scan, **way):
    params, h, xs = arguments(6)

    def outer(h, x):
        def inner(h, x):
            return jnp.tanh(h @ params["w"] + x), h.sum()

        return scan(inner, h, jnp.stack([x, 2 * x, x / 2, -x, x]), **way)

    def total(h, xs):
        h, ys = scan(outer, h, xs, **way)
        return (h**2).sum() + (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1)))(h, xs)


def dropout(scan, **way):
    """A typed key in the carry, and keys as xs: recomputed steps draw the same masks."""
    params, h, xs = arguments(11)

    def cell(carry, x):
        h, key = carry
        key, here = jax.random.split(key)
        masks = jax.random.bernoulli(here, 0.7, h.shape) & jax.random.bernoulli(x["key"], 0.7, h.shape)
        return (jnp.tanh(h @ params["w"] + x["x"]) * masks.astype(h.dtype), key), h[0]

    def total(h, xs):
        rows = {"x": xs, "key": jax.random.split(jax.random.key(5), 11)}
        (h, key), ys = scan(cell, (h, jax.random.key(3)), rows, **way)
        return (h**2).sum() + (ys**3).sum() + jax.random.uniform(key, dtype=h.dtype)

    return jax.jit(jax.value_and_grad(total, (0, 1)))(h, xs)


def many_types(scan, **way):
    """bfloat16, double, complex, integer and boolean leaves, of which slots are no multiples of each other."""
    _, h, xs = arguments(11)

    def cell(carry, x):
        low, high, z, n, even = carry
        low = jnp.tanh(low * x.astype(low.dtype) + jnp.where(even, 1, 0).astype(low.dtype))
        high = 0.9 * high + low.astype(high.dtype) * jnp.where(low > 0, x, 1.0)
        z = z * jnp.exp(lax.complex(0.0 * high[0], high[0]))
        return (low, high, z, n + 1, ~even), jnp.abs(z + 1.0)

    def total(low, high, xs):
        carry = (low, high, jnp.ones(3, jnp.complex128), 0, jnp.array([True, False, True]))
        (low, high, *_), ys = scan(cell, carry, xs, **way)
        return (low.astype(high.dtype) ** 2).sum() + (high**2).sum() + (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(h.astype(jnp.bfloat16), h, xs)


def without_xs_or_ys(scan, **way):
    """The carry alone; a length, no xs, no ys, and a Python number that takes the step's type."""
    params, h, _ = arguments(1)

    def total(params, h):
        carry, ys = scan(
            lambda c, _: ((jnp.tanh(c[0] @ params["w"]) * c[1], c[1] * 0.99), None), (h, 1.0), length=9, **way
        )
        assert ys is None
        return (carry[0] ** 2).sum() * carry[1]

    return jax.jit(jax.grad(total, (0, 1)))(params, h)


def only_ys(scan, **way):
    """No carry at all, and outputs without gradients beside ones with them."""
    params, _, xs = arguments(9)

    def total(params, xs):
        _, (ys, _) = scan(lambda _, x: (None, (jnp.tanh(x @ params["w"]), x.shape[0])), None, xs, **way)
        return (ys**2).sum()

    return jax.jit(jax.grad(total, (0, 1)))(params, xs)


def eager(scan, **way):
    return jax.grad(functools.partial(loss, scan, **way), (0, 1, 2))(*arguments(5))


@pytest.mark.parametrize("way", [MIXED, NEST], ids=str)
@pytest.mark.parametrize(
    "case", [nested_in_itself, dropout, many_types, without_xs_or_ys, only_ys, eager], ids=lambda case: case.__name__
)
def test_contract(case, way):
    close(case(scan, **way), case(lax.scan))


SUB_BYTE = {"int4": jnp.int4, "uint2": jnp.uint2}


@pytest.mark.parametrize("strategy", ["mixed", "internal", None])
@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_residuals_of_less_than_a_byte(dtype, strategy):
    """Packed, as the schedule counts them, where a row holds words."""
    rounded = jax.custom_vjp(lambda x: x)
    rounded.defvjp(
        lambda x: (x, jnp.round(x).astype(SUB_BYTE[dtype])), lambda kept, ct: (ct * (1 + kept.astype(ct.dtype)),)
    )

    def cell(h, x):
        return jnp.abs(jnp.sort(rounded(h * x))), None

    def total(scan, h, **options):
        return scan(cell, h, jnp.linspace(0.5, 1.2, 11), **options)[0].sum()

    h = jnp.linspace(0.1, 2.9, 21)
    close(
        jax.jit(jax.grad(functools.partial(total, scan, slots=4, strategy=strategy)))(h),
        jax.grad(functools.partial(total, lax.scan))(h),
    )


@pytest.mark.parametrize("strategy", ["mixed", "internal", "hidden"])
@pytest.mark.parametrize("extra", [1, 300], ids=["few replicated", "many replicated"])
def test_replicated_residuals_in_shard_map(strategy, extra):
    """Values that vary over the mesh and values that do not share the slots, and come back as they went in."""

    def run(scan, w, x, **options):
        def cell(carry, w):
            h, n = carry
            scale = jnp.sort(jnp.sin(n * jnp.linspace(1.0, 2.0, extra)))  # the same on all devices
            return (jnp.tanh(h @ w) * jnp.exp(scale).mean(), n + jnp.sin(n) * scale.sum()), None

        (h, n), _ = scan(cell, (x, jnp.float64(0.3)), w, **options)
        return lax.psum((h**2).sum() + n, "b")

    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    values = jax.random.normal(jax.random.key(0), (9, 3, 3)), jax.random.normal(jax.random.key(1), (8, 3))

    def gradient(scan, **options):
        f = functools.partial(run, scan, **options)
        outside = jax.shard_map(f, mesh=mesh, in_specs=(spec(), spec("b")), out_specs=spec())
        return jax.jit(jax.grad(outside, (0, 1)))(*values)

    close(gradient(scan, slots=12, strategy=strategy), gradient(lax.scan))


def test_what_a_step_hands_on_unchanged_is_no_part_of_the_carry():
    """It takes no slot, keeps its gradient, and comes back as the very array."""
    h, w = jnp.linspace(0.1, 0.9, 3), jnp.linspace(0.5, 0.7, 3)

    def cell(carry, x):
        return {"h": jnp.sin(carry["h"] * carry["w"] + x), "w": carry["w"]}, carry["w"].sum()

    def total(scan, h, w, **options):
        carry, ys = scan(cell, {"h": h, "w": w}, jnp.linspace(0.0, 1.0, 7), **options)
        return (carry["h"] * carry["w"]).sum() + ys.sum()

    for way in ({"slots": 2, "strategy": "hidden"}, {"slots": 8, "strategy": "mixed"}, {"budget": "1KiB"}):
        got = jax.jit(jax.grad(functools.partial(total, scan, **way), (0, 1)))(h, w)
        close(got, jax.grad(functools.partial(total, lax.scan), (0, 1))(h, w))

    def either(x, y):
        same = lambda _, y: scan(lambda y, _: (y, None), y, None, length=2, slots=2)[0]
        return lax.cond(x < 0, same, same, x, y)

    assert jax.vmap(either, (0, None), None)(jnp.arange(3.0), 3.0) == 3.0  # which fails where y was computed
    least = 2 * 3 * 8 + 3 * 8  # two states and a step's residuals of h alone
    with pytest.raises(ValueError, match="least possible"):
        total(scan, h, w, budget=8)
    jax.grad(functools.partial(total, scan, budget=least + 3 * 8))(h, w)


def test_values_without_differentiation():
    params, h, xs = arguments(9)
    np.testing.assert_array_equal(loss(scan, params, h, xs, slots=2), loss(lax.scan, params, h, xs))


@pytest.mark.parametrize("way", [HIDDEN, MIXED, {"budget": "1MiB"}], ids=str)
def test_inputs_are_not_copied(way):
    """Outside jit the backward pass reads the arrays that it was given."""
    params, h, xs = arguments(20)
    _, vjp = jax.vjp(lambda *values: loss(scan, *values, **way), params, h, xs)
    held = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]
    inputs = jax.tree.leaves((params, xs))
    assert all(any(leaf is x for leaf in held) for x in inputs)
    assert not [leaf for leaf in held if any(leaf is not x and _equal(leaf, x) for x in inputs)]


def _equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
