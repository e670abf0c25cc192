"""Plans that run a language model's head, with the user's own loss, tile by tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import memjax
from memjax._core.program.costs import flops
from memjax._core.program.jaxpr import calls_in_place
from memjax._plan.tile.one_hot import scattered
from memjax._plan.tile.views import with_early_views

pytestmark = pytest.mark.usefixtures("x64")

B, T, D, V = 4, 320, 8, 512
ALLOW = ("recompute", "tile")
# Less than all logits, which any plan without tiles holds. To look for the least takes several times as long.
FEW = 6 * B * T * V * 8 // 10


def data(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    w, x = (jax.device_put(np.asarray(rng.normal(size=shape), dtype)) for shape in ((D, V), (B, T, D)))
    return w, x, jax.device_put(rng.integers(V, size=(B, T)))


def mean(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


def ignored_labels(w, x, y):
    counted = (y % 3 > 0).astype(x.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.where(y % 3 > 0, y, 0))
    return jnp.sum(losses * counted) / jnp.maximum(counted.sum(), 1)


def smoothed_one_hot(w, x, y):
    targets = optax.smooth_labels(jax.nn.one_hot(y, V, dtype=x.dtype), 0.1)
    return optax.softmax_cross_entropy(x @ w, targets).sum() / y.size


def next_token_with_cap_and_z_loss(w, x, y):
    logits = (5 * jnp.tanh((x @ w) / 5))[:, :-1]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, 1:, None], -1)
    return -picked.mean() + 1e-3 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()


def one_dimension_of_tokens(w, x, y):
    logits = (x @ w + jnp.arange(V, dtype=x.dtype) / V).reshape(-1, V)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y.reshape(-1, 1), 1).mean()


def next_token_in_one_row(w, x, y):
    logits, labels = (x @ w)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tied_einsum(w, x, y):
    logits = jnp.einsum("btd,vd->btv", x, w.T)
    return (jax.nn.logsumexp(logits, -1) - jnp.sum(logits * jax.nn.one_hot(y, V, dtype=x.dtype), -1)).mean()


LOSSES = [
    mean,
    ignored_labels,
    smoothed_one_hot,
    next_token_with_cap_and_z_loss,
    one_dimension_of_tokens,
    next_token_in_one_row,
    tied_einsum,
]


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile(compiler_options=memjax.remat_compiler_options("cpu"))


def temp(program):
    return program.memory_analysis().temp_size_in_bytes


def close(a, b, tolerance=1e-10):
    a, b = jax.device_get((a, b))
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@functools.cache
def tiled_plan(loss):
    w, x, y = data()
    return memjax.plan(loss, w, x, y, budget=FEW, allow=ALLOW, argnums=(0, 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_as_people_write_them_never_have_all_logits(loss):
    w, x, y = data()
    plan = tiled_plan(loss)
    (tiled,) = plan.tiled
    assert tiled.tile < tiled.length
    found, wanted = (compiled(jax.value_and_grad(f, (0, 1)), w, x, y) for f in (memjax.planned(loss, plan=plan), loss))
    close(found(w, x, y), wanted(w, x, y))
    assert temp(found) == plan.compiled_nbytes <= FEW < temp(wanted)


def test_labels_of_few_bits_pick_one_of_more_columns_than_they_count():
    labels, values = jnp.array([3, 250], jnp.uint8), jnp.array([1.0, 2.0])
    wanted = np.zeros((2, 600))
    wanted[[0, 1], [3, 250]] = values
    np.testing.assert_array_equal(scattered(1, (2, 600), labels, values), wanted)


def test_views_of_logits_behind_many_values_that_are_read_twice():
    def rows(x, w):
        y = x @ w
        for _ in range(60):
            y = y * jnp.tanh(y)
        return y.reshape(-1, V)

    w, x, _ = data()
    program = calls_in_place(jax.make_jaxpr(rows)(x, w), differentiable=True)
    early = with_early_views(program)
    assert [eqn.primitive.name for eqn in early.eqns][:2] == ["reshape", "dot_general"]
    assert len(early.eqns) == len(program.eqns)


def products(f, *args):
    return sum(map(flops, jax.make_jaxpr(f)(*args).eqns))


def test_no_product_is_computed_twice_if_the_plan_has_room_for_the_gradients():
    w, x, y = data()
    least = tiled_plan(mean)
    budget = least.nbytes + 3 * (w.nbytes + x.nbytes)
    plan = memjax.plan(mean, w, x, y, budget=budget, allow=ALLOW, argnums=(0, 1))
    assert plan.tiled
    step = jax.grad(memjax.planned(mean, plan=plan), (0, 1))
    assert products(step, w, x, y) == products(jax.grad(mean, (0, 1)), w, x, y) == 3 * products(mean, w, x, y)


def test_tiles_are_left_out_where_all_fits_as_fast():
    w, x, y = data()
    plan = memjax.plan(mean, w, x, y, budget="1GiB", allow=ALLOW, argnums=(0, 1))
    assert plan.tiled == ()


def test_plans_with_tiles_are_data():
    plan = tiled_plan(mean)
    assert type(plan).from_json(plan.to_json()) == plan
    assert f"in tiles of {plan.tiled[0].tile} of {T} positions" in str(plan)
    assert f"float64[{B},{T},{V}]" in plan.tiled[0].what


def test_error_says_that_tiles_would_help():
    w, x, y = data()
    budget = tiled_plan(mean).nbytes
    with pytest.raises(ValueError, match=r'allow=\("recompute", "tile"\)'):
        memjax.plan(mean, w, x, y, budget=budget, argnums=(0, 1))
    with pytest.raises(ValueError, match=r'allow=\("recompute", "compress", "tile"\)'):
        memjax.plan(mean, w, x, y, budget=budget, allow=["compress"], argnums=(0, 1))
    with pytest.raises(ValueError, match="least possible"):
        memjax.plan(mean, w, x, y, budget=100, allow=ALLOW, argnums=(0, 1))


def test_positions_that_mix_are_not_tiled():
    w, x, y = data()

    def over_positions(w, x, y):
        return jnp.mean(jax.nn.softmax(x @ w, 1) ** 3 + jax.nn.softmax(x @ w, 0) + jnp.fft.fft(x @ w).real ** 2)

    assert memjax.plan(over_positions, w, x, y, budget="min", allow=ALLOW).tiled == ()


def test_results_beside_the_loss_and_their_gradients():
    w, x, y = data()

    def with_metrics(w, x, y):
        logits = x @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), {"right": (logits.argmax(-1) == y).mean(), "worst": losses.max()}

    plan = memjax.plan(with_metrics, w, x, y, budget=FEW, allow=ALLOW)
    step = jax.jit(jax.value_and_grad(memjax.planned(with_metrics, plan=plan), has_aux=True))
    close(step(w, x, y), jax.jit(jax.value_and_grad(with_metrics, has_aux=True))(w, x, y))


def test_losses_per_position_run_each_tile_again():
    w, x, y = data()

    def squares(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)

    def loss(w, x, y):  # products with positions of other places: no sum of a tile's own
        losses = squares(w, x, y)
        return jnp.sum(losses * losses[:, ::-1])

    plan = memjax.plan(loss, w, x, y, budget="min", allow=ALLOW, argnums=(0, 1))
    assert plan.tiled
    close(*(jax.jit(jax.value_and_grad(f, (0, 1)))(w, x, y) for f in (memjax.planned(loss, plan=plan), loss)))


def test_products_of_16_bit_floats_are_added_up_in_float32():
    w, x, y = data(jnp.float32)
    half = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)

    def loss(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w).astype(jnp.float32), y).mean()

    exact = np.asarray(jax.jit(jax.grad(loss))(*(a.astype(jnp.float32) for a in half), y))
    plan = memjax.plan(loss, *half, y, budget=FEW // 2, allow=ALLOW)
    assert plan.tiled
    found = jax.jit(jax.grad(memjax.planned(loss, plan=plan)))(*half, y)
    plain = jax.jit(jax.grad(loss))(*half, y)
    error = lambda g: np.linalg.norm(np.asarray(g, np.float32) - exact)
    assert found.dtype == jnp.bfloat16
    assert error(found) <= 1.05 * error(plain)


def test_a_loss_scale_reaches_into_tiles_of_float16():
    w, x, y = data(jnp.float16)
    scale = 2.0**20

    def loss(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w).astype(jnp.float32), y).mean() / 256

    def scaled(loss):
        return np.asarray(jax.jit(jax.grad(lambda *args: scale * loss(*args)))(w, x, y), np.float32) / scale

    exact = np.asarray(jax.jit(jax.grad(loss))(*(a.astype(jnp.float32) for a in (w, x)), y))
    error = lambda f: np.linalg.norm(scaled(f) - exact) / np.linalg.norm(exact)
    plan = memjax.plan(loss, w, x, y, budget=FEW // 2, allow=ALLOW)
    assert plan.tiled
    assert error(memjax.planned(loss, plan=plan)) <= 1.1 * error(loss)


def test_donated_arguments():
    w, x, y = data()
    update = lambda f: lambda w, x, y: w - jax.grad(f)(w, x, y)
    wanted = jax.jit(update(mean))(w, x, y)
    plan = memjax.plan(mean, w, x, y, budget=FEW, allow=ALLOW)
    assert plan.tiled
    close(jax.jit(update(memjax.planned(mean, plan=plan)), donate_argnums=0)(w, x, y), wanted)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(V, D, param_dtype=jnp.float64)
        x = embed(tokens)
        x += nn.Dense(D, param_dtype=jnp.float64)(nn.gelu(x))
        return embed.attend(nn.RMSNorm(param_dtype=jnp.float64, force_float32_reductions=False)(x))


class Untied(nnx.Module):
    def __init__(self, rngs):
        settings = {"param_dtype": jnp.float64, "rngs": rngs}
        self.embed = nnx.Embed(V, D, **settings)
        self.layer = nnx.Linear(D, D, **settings)
        self.head = nnx.Linear(D, V, **settings)

    def __call__(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def next_token(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def test_linen_and_nnx_models_as_they_are():
    _, _, tokens = data()
    linen = Tied()
    params = jax.jit(linen.init)(jax.random.key(0), tokens)
    model = nnx.jit(lambda: Untied(nnx.Rngs(0)))()
    cases = [
        (lambda params, tokens: next_token(linen.apply(params, tokens), tokens), params, jax.grad),
        (lambda model, tokens: next_token(model(tokens), tokens), model, nnx.grad),
    ]
    for loss, given, grad in cases:
        plan = memjax.plan(loss, given, tokens, budget=FEW, allow=ALLOW)
        (tiled,) = plan.tiled
        assert f",{V}]" in tiled.what
        assert plan.nbytes <= FEW
        run = lambda f: nnx.jit(grad(f))(given, tokens)  # noqa: B023
        close(run(memjax.planned(loss, plan=plan)), run(loss))


def gated_layer(x, p):
    x += jnp.cumsum(x, 1) / x.shape[1]
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + (jax.nn.gelu(h @ p["up"]) * (h @ p["gate"])) @ p["down"].T


def gated_layers():
    rng = np.random.default_rng(0)
    draw = lambda: {name: jax.device_put(0.3 * rng.normal(size=(D, 16 * D))) for name in ("up", "gate", "down")}
    return [draw(), draw()], jax.device_put(rng.normal(size=(1, 2048, D)))


def test_feed_forward_layers_between_layers_that_mix_positions():
    layers, x = gated_layers()

    def loss(layers, x):
        for p in layers:
            x = gated_layer(x, p)
        return jnp.mean(jnp.cumsum(x, 1) ** 2)

    half = memjax.plan(loss, layers, x, budget="min").nbytes // 2
    plan = memjax.plan(loss, layers, x, budget=half, allow=ALLOW)
    assert [(one.length, one.dim) for one in plan.tiled] == [(2048, 1)] * 2
    assert plan.nbytes <= half
    close(*(jax.jit(jax.grad(f))(layers, x) for f in (memjax.planned(loss, plan=plan), loss)))


@pytest.mark.parametrize("reverse", [False, True])
def test_feed_forward_layers_in_a_scan(reverse):
    layers, x = gated_layers()
    layers = jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *layers)

    def loss(layers, x):
        x, sums = jax.lax.scan(lambda x, p: (gated_layer(x, p), jnp.sum(x)), x, layers, reverse=reverse)
        return jnp.mean(jnp.cumsum(x, 1) ** 2) + jnp.sum(sums * jnp.arange(2.0))

    half = memjax.plan(loss, layers, x, budget="min").nbytes // 2
    plan = memjax.plan(loss, layers, x, budget=half, allow=ALLOW)
    (tiled,) = plan.tiled
    assert (tiled.length, tiled.dim) == (2048, 1)
    assert tiled.loop is not None
    assert "in each turn of a loop" in str(plan)
    assert memjax.Plan.from_json(plan.to_json()) == plan
    assert plan.nbytes <= half
    close(*(jax.jit(jax.grad(f))(layers, x) for f in (memjax.planned(loss, plan=plan), loss)))


def test_the_body_of_a_loop_may_hold_constants():
    table = np.arange(8.0)

    def loss(x):
        held = jax.checkpoint(lambda carry: carry + jnp.tanh(carry * table))
        x, _ = jax.lax.scan(lambda carry, _: (jax.jit(held)(carry), None), x, None, length=3)
        return jnp.mean(x**2)

    with pytest.raises(ValueError, match="the least possible is"):
        memjax.plan(loss, jnp.ones((64, 8)), budget=10, allow=ALLOW)
