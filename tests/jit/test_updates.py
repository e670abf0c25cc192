"""Updates of stacked weights in the loops of backward passes: the same results, and gradients of one layer at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import memjax
from memjax import compress
from memjax._jit.account import donated_results
from memjax._jit.step_plan import StepPlan
from memjax._jit.updates.in_loop import with_updates_in_loops
from memjax.compress._state import kernel, regions

LAYERS, WIDTH = 12, 64
FROZEN = {"embedding": "b", "layers": "a"}


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def layer(x, p):
    return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"], None


def step_of(tx, *, checkpoint="", logged=(), parts=0, picked=False):
    """A step of `checkpoint`ed "layers" or "loss", that returns norms of what is `logged`, adds up gradients of so many parts of
    the batch in a loop, and runs its layers by a scan, or those `picked` by index."""

    def loss(params, tokens):
        run = jax.checkpoint(layer) if checkpoint == "layers" else layer
        x = params["embedding"][tokens]
        if picked:
            for i in range(LAYERS):
                x, _ = run(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        else:
            x, _ = jax.lax.scan(run, x, params["layers"])
        return jnp.mean(jnp.square(x))

    derivative = jax.value_and_grad(jax.checkpoint(loss) if checkpoint == "loss" else loss)

    def accumulated(params, tokens):
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        add = lambda sums, some: (jax.tree.map(jnp.add, sums, derivative(params, some)), None)
        sums, _ = jax.lax.scan(add, zeros, tokens.reshape(parts, -1))
        return jax.tree.map(lambda x: x / parts, sums)

    def step(params, state, tokens):
        value, gradients = (accumulated if parts else derivative)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        new = optax.apply_updates(params, updates)
        all_of = {"gradients": gradients, "old": params, "new": new}
        return new, state, value, [optax.tree.norm(all_of[name]) for name in logged]

    return step


def begin(tx, dtype, width=WIDTH):
    """Weights, state and tokens."""
    rng = np.random.default_rng(0)
    shapes = {"scale": (LAYERS, width), "up": (LAYERS, width, 2 * width), "down": (LAYERS, 2 * width, width)}
    of = lambda shape: jax.device_put(np.asarray(0.1 * rng.normal(size=shape), dtype))
    params = {"embedding": of((100, width)), "layers": {name: of(shape) for name, shape in shapes.items()}}
    return params, jax.jit(tx.init)(params), jnp.arange(256) % 100


def moved(step, args, two_passes=False):
    """The step with updates in loops, flat, under `jax.jit`; the leaves of arguments; what keeps gradients."""
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    found = with_updates_in_loops(traced.jaxpr, donated_results(traced), "cpu", two_passes=two_passes)
    if found.closed is None:
        return None, jax.tree.leaves(args), found.notes
    leaves = jax.tree.leaves(args)
    run = lambda *leaves: jax.core.eval_jaxpr(found.closed.jaxpr, found.closed.consts, *leaves)
    count = len(jax.tree.leaves(args[:2]))
    return jax.jit(run, donate_argnums=tuple(range(count))), leaves, found.notes


def copied(tree):
    return jax.device_put(tree, may_alias=False)


def close(one, other, **tolerance):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), **tolerance)


ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1)
LOGGED = "gradients", "old", "new"
STEPS = {
    "AdamW": (ADAMW, {"checkpoint": "layers"}),
    "clipped Lion": (optax.chain(optax.clip(1e-4), optax.lion(1e-3)), {}),
    "frozen": (optax.multi_transform({"a": optax.sgd(0.1, momentum=0.9), "b": optax.set_to_zero()}, FROZEN), {}),
    "norms": (ADAMW, {"checkpoint": "layers", "logged": LOGGED}),
    "checkpoint round the loss": (ADAMW, {"checkpoint": "loss"}),
    "MultiSteps": (optax.MultiSteps(ADAMW, 2), {"checkpoint": "layers"}),
    "accumulation": (ADAMW, {"checkpoint": "layers", "parts": 4}),
    "clipped by norm": (optax.chain(optax.clip_by_global_norm(1e-3), ADAMW), {"checkpoint": "layers"}),
    "if finite": (optax.apply_if_finite(ADAMW, 3), {"checkpoint": "layers"}),
}
TWO_PASSES = "clipped by norm", "if finite"


@pytest.mark.parametrize("name", STEPS)
def test_results_are_the_same(name, x64):
    tx, options = STEPS[name]
    step, args = step_of(tx, **options), begin(tx, jnp.float64)
    run, leaves, notes = moved(step, args, name in TWO_PASSES)
    assert not notes
    wanted = jax.jit(step)(*args)
    found = jax.tree.unflatten(jax.tree.structure(wanted), run(*copied(leaves)))
    close(wanted, found, rtol=1e-12, atol=1e-14)
    if "MultiSteps" in name:  # the first step only adds
        found = run(*copied(jax.tree.leaves((*wanted[:2], args[2]))))
        close(jax.jit(step)(*wanted[:2], args[2]), found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("wrap", "bits", "kernels"),
    [
        (compress.split_master, 4, ""),
        (compress.split_master, 4, "whole"),
        (compress.stochastic_round, 8, "of turns alone"),
    ],
)
def test_values_are_rounded_as_before(wrap, bits, kernels, monkeypatch):
    """Which way a value goes follows from its place in the whole array: the same bits, by operations that round the same."""
    if kernels:
        monkeypatch.setattr(kernel, "_FEWEST", 1024)
        if kernels == "of turns alone":
            monkeypatch.setattr(kernel, "_MOST", WIDTH * 2 * WIDTH * LAYERS)
        monkeypatch.setattr(regions, "has_kernels", lambda: True)
        monkeypatch.setattr(regions, "is_of_one_device", lambda aval: True)  # of the eight that tests have
    tx = wrap(memjax.compressed(optax.sgd(2.0**-6, momentum=0.5), bits=bits))
    args = begin(tx, jnp.bfloat16)
    gradients = jax.tree.map(lambda p: jnp.ones_like(p), args[0])
    _, state = jax.jit(tx.update)(gradients, args[1], args[0])
    args = args[0], state, args[2]
    run, leaves, _ = moved(step_of(tx), args)
    if kernels:
        eqns = run.trace(*leaves).jaxpr.eqns
        loop = [eqn for eqn in eqns if eqn.primitive.name == "scan"][-1].params["jaxpr"]
        kernels = [sum(eqn.primitive.name == "memjax_update" for eqn in some) for some in (eqns, loop.eqns)]
        assert kernels == [1, 2]  # of the embedding; of matrices of layers, whose scales are too few
        monkeypatch.setattr(regions, "has_kernels", lambda: False)
    close(jax.jit(step_of(tx))(*args), run(*copied(leaves)), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "clipped Lion"])
def test_gradients_of_one_layer_exist_at_a_time(name):
    """All but a fifth of them is saved, and nothing that is donated is copied."""
    tx, options = STEPS[name]
    step, (params, state, tokens) = step_of(tx, **options), begin(tx, jnp.float32, width=128)
    args = params, state, tokens[:32]  # few, as what a forward pass stacks is no gradient
    run, leaves, notes = moved(step, args, name in TWO_PASSES)
    assert not notes
    own = memjax.remat_compiler_options() or None
    plain, found = (
        lowered.compile(compiler_options=own)
        for lowered in (jax.jit(step, donate_argnums=(0, 1)).lower(*args), run.lower(*leaves))
    )
    temp = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    stacked = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]["layers"]))
    assert temp(found) < temp(plain) - 0.8 * stacked
    if name in TWO_PASSES:  # of which the compiler makes no one
        loops = [line for line in found.as_text().splitlines() if " while(" in line]
        assert sum(f'"n":"{LAYERS}"' in line for line in loops) == 4


def test_stacks_of_more_places_than_32_bits_count():
    """Places repeat from layer to layer there. Compiled for shapes alone: the weights would take 48 GiB."""
    tx = memjax.compressed(ADAMW)

    def of_a_layer(width):
        of = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        stacks = {"scale": (LAYERS, width), "up": (LAYERS, width, 2 * width), "down": (LAYERS, 2 * width, width)}
        params = {"embedding": of((100, width)), "layers": {name: of(shape) for name, shape in stacks.items()}}
        args = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((8,), jnp.int32)
        f, leaves, notes = moved(step_of(tx), args)
        assert notes == []
        return f.lower(*leaves).compile().memory_analysis().temp_size_in_bytes / width**2

    assert LAYERS * 2**13 * 2**14 < 2**32 < LAYERS * 2**14 * 2**15
    assert of_a_layer(2**14) < 1.01 * of_a_layer(2**13)


def test_a_plan_moves_them_and_runs_layers_again():
    tx = optax.adamw(1e-2)
    with jax.enable_x64(True):
        args = begin(tx, jnp.float64)
        plain = jax.jit(step_of(tx))(*args)
        stacked = 8 * sum(leaf.size for leaf in jax.tree.leaves(args[0]["layers"]))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
        # Less than arguments and gradients.
        step = memjax.jit(step_of(tx), budget=held + stacked - 1, donate_argnums=(0, 1))
        plan = step.plan(*args)
        assert plan.updates_in_loops
        assert StepPlan.from_json(plan.to_json()) == plan
        close(plain, step(*copied(args)), rtol=1e-12, atol=1e-14)
        assert plan.nbytes < held + stacked
        again = memjax.jit(step_of(tx), plan=plan, donate_argnums=(0, 1))
        close(plain, again(*copied(args)), rtol=1e-12, atol=1e-14)
        clipped = optax.chain(optax.clip_by_global_norm(1.0), tx)
        with pytest.raises(ValueError, match="cannot run there"):
            memjax.jit(step_of(clipped), plan=plan, donate_argnums=(0, 1)).plan(*begin(clipped, jnp.float64))


def test_a_plan_takes_the_derivative_twice(x64):
    tx, options = STEPS["clipped by norm"]
    args, f = begin(tx, jnp.float64), step_of(tx, **options)
    wanted = jax.jit(f)(*args)
    stacked = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]["layers"]))
    budget = memjax.jit(f, donate_argnums=(0, 1)).plan(*args).nbytes - stacked - 1
    step = memjax.jit(f, budget=budget, allow=("recompute", "two_passes"), donate_argnums=(0, 1))
    plan = step.plan(*args)
    assert plan.two_passes
    assert not plan.notes
    assert "the derivative is taken twice" in str(plan)
    assert plan.nbytes < plan.plain_nbytes - stacked
    close(wanted, step(*copied(args)), rtol=1e-12, atol=1e-14)
    again = memjax.jit(f, plan=StepPlan.from_json(plan.to_json()), donate_argnums=(0, 1))
    close(wanted, again(*copied(args)), rtol=1e-12, atol=1e-14)


def test_a_step_with_infinities_is_skipped():
    tx = optax.apply_if_finite(optax.sgd(0.1), 3)
    params, state, tokens = begin(tx, jnp.float32)
    params["layers"]["up"] = params["layers"]["up"].at[3, 2, 1].set(jnp.nan)
    step = step_of(tx)
    run, leaves, _ = moved(step, (params, state, tokens), two_passes=True)
    wanted, found = jax.tree.leaves(jax.jit(step)(params, state, tokens)), run(*copied(leaves))
    close(wanted, found, rtol=0, atol=0)
    close(wanted[: len(jax.tree.leaves(params))], jax.tree.leaves(params), rtol=0, atol=0)


def notes_of(tx, donated=(0, 1), **options):
    args = begin(tx, jnp.float32)
    traced = jax.jit(step_of(tx, **options), donate_argnums=donated).trace(*args)
    found = with_updates_in_loops(traced.jaxpr, donated_results(traced), "cpu")
    assert found.closed is None
    size = 4 * LAYERS * (WIDTH + 4 * WIDTH * WIDTH) / 2**10
    [note] = found.notes
    assert note.startswith(f"keeps {size:.2f} KiB of gradients: ")
    return note


def test_what_keeps_gradients_is_said():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    args = begin(clipped, jnp.float32)
    plan = memjax.jit(step_of(clipped), budget="90%", donate_argnums=(0, 1)).plan(*args)
    assert not plan.updates_in_loops
    assert "of gradients: reduce_sum" in str(plan)
    note = notes_of(optax.apply_if_finite(optax.sgd(0.1), 3))
    assert "reduce_and at test_updates.py:" in note
    assert 'with "two_passes" in allow' in note
    assert "donate weights and state (donate_argnums)" in notes_of(optax.adamw(1e-2), donated=())
    assert "picked by index from stacked weights at test_updates.py:" in notes_of(optax.adamw(1e-2), picked=True)


def _two_networks(scaled_by):
    """Two scans, whose updates are scaled by numbers that `scaled_by` makes of what their backward loops carry out."""
    rng = np.random.default_rng(1)
    params = {name: jax.device_put(rng.normal(size=(LAYERS, 16, 16)) / 4) for name in "ab"}

    def loss(w, x):
        return jnp.mean(jnp.square(jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p), None), x, w)[0]))

    def step(params, state, x):
        grads, inputs = zip(*(jax.grad(loss, (0, 1))(params[name], x) for name in "ab"), strict=True)
        scales = scaled_by(*(jnp.sum(jnp.square(one)) for one in inputs))
        new = [params[name] - 0.1 * scale * g for name, scale, g in zip("ab", scales, grads, strict=True)]
        return dict(zip("ab", new, strict=True)), state

    return step, (params, (), jax.device_put(rng.normal(size=(8, 16))))


def _one_stack_twice(_):
    """Two scans over the same weights."""
    rng = np.random.default_rng(1)
    params = {"w": jax.device_put(rng.normal(size=(LAYERS, 16, 16)) / 4), "e": jax.device_put(rng.normal(size=(8, 16)))}

    def loss(params):
        run = lambda x: jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p), None), x, params["w"])[0]
        return jnp.mean(run(params["e"]) ** 2) + jnp.mean(run(2 * params["e"][::-1]) ** 4)

    def step(params, state, _):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)), state

    return step, (params, (), jnp.zeros(()))


@pytest.mark.parametrize(
    ("make", "scaled_by"),
    [(_two_networks, lambda a, b: (b, a)), (_two_networks, lambda a, b: (1.0, a)), (_one_stack_twice, None)],
    ids=["each waits for the other", "one waits", "one stack twice"],
)
def test_each_backward_loop_runs_once(make, scaled_by, x64):
    step, args = make(scaled_by)
    run, leaves, _ = moved(step, args)
    assert run.trace(*leaves).jaxpr.pretty_print().count("scan[") == 4
    wanted = jax.jit(step)(*args)
    found = run(*copied(leaves))
    for one, other in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
