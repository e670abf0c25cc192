"""Residual bytes against closed forms, compiled bytes of known programs, and that measuring loses nothing."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import memjax
from memjax import _measure

ROWS, WIDTH, LAYERS = 16, 64, 3


def net(weights, x):
    # `sin` saves its cosine and nothing else, on every JAX version.
    for w in weights:
        x = jnp.sin(x @ w)
    return x


def loss(weights, x):
    return net(weights, x).sum()


def arrays(dtype=jnp.float32):
    return [jnp.full((WIDTH, WIDTH), 0.01, dtype)] * LAYERS, jnp.ones((ROWS, WIDTH), dtype)


def step(weights, x):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))


# A cosine per layer, and the input of every layer but the first, which is an argument.
ACTIVATION = ROWS * WIDTH * 4
MLP_BYTES = (LAYERS + LAYERS - 1) * ACTIVATION


def residuals(fn, *args):
    return memjax.measure(fn, *args).residual_bytes


def split(weights, x):
    out, pullback = jax.jit(functools.partial(jax.vjp, loss))(weights, x)
    return jax.jit(lambda pullback: pullback(jnp.ones_like(out)))(pullback)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "fn",
    [
        loss,
        net,
        jax.jit(loss),
        jax.grad(loss),
        jax.jit(jax.value_and_grad(loss)),
        step,
        jax.jit(step, donate_argnums=0),
        jax.jit(step, compiler_options=memjax.remat_compiler_options()),
        lambda weights, x: jax.jit(jax.grad(loss))(weights, x),
        split,
        jax.vmap(jax.grad(lambda w, x: loss(w, x)), in_axes=(None, 0)),
    ],
    ids=["loss", "block", "jit", "grad", "both", "step", "donated", "options", "inner", "split", "vmap"],
)  # fmt: skip
def test_mlp(fn):
    assert residuals(fn, *arrays()) == MLP_BYTES


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_low_precision_halves_the_bytes(dtype):
    assert residuals(loss, *arrays(dtype)) == MLP_BYTES // 2


def test_float64(x64):
    assert residuals(loss, *arrays(jnp.float64)) == MLP_BYTES * 2


def test_recomputed_values_are_no_residuals():
    assert residuals(jax.checkpoint(loss), *arrays()) == 0

    def per_layer(weights, x):
        for w in weights:
            x = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w)))(w, x)
        return x.sum()

    assert residuals(per_layer, *arrays()) == (LAYERS - 1) * ACTIVATION


@pytest.mark.parametrize(("wrap", "kept"), [(lambda f: f, 2), (jax.checkpoint, 1)])
def test_scan_counts_stacked_residuals_once(wrap, kept):
    layer = wrap(lambda x, w: jnp.sin(x @ w))

    def scanned(weights, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()

    weights, x = arrays()
    # Inside the loop the first layer's input is saved like the others.
    assert residuals(scanned, jnp.stack(weights), x) == kept * LAYERS * ACTIVATION


def test_custom_vjp_saves_what_its_rule_says():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(
        lambda x: (jnp.sin(x), (x > 0, x.astype(jnp.float16))),
        lambda res, g: (jnp.where(res[0], g, res[1].astype(g.dtype)),),
    )
    _, x = arrays()
    size = ROWS * WIDTH
    assert residuals(lambda x: f(2 * x), x) == size + 2 * size
    assert residuals(jax.jit(jax.grad(lambda x: f(2 * x).sum())), x) == size + 2 * size


def test_gradients_made_in_the_forward_pass_are_residuals():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x).sum()

    def forward(x):  # a loop over rows, each with a backward pass of its own
        return jax.lax.scan(lambda s, row: (s, jax.grad(lambda r: jnp.sin(r).sum())(row)), x.sum(), x)

    f.defvjp(forward, lambda dx, g: (dx * g,))
    _, x = arrays()
    assert residuals(f, x) == ACTIVATION
    assert residuals(jax.grad(lambda x: f(jnp.sin(x))), x) == 2 * ACTIVATION


def test_loops_and_micro_batches_hold_one_backward_pass_at_a_time():
    weights, x = arrays()
    batches = jnp.stack([x] * 4)

    def looped(weights, batches):
        def body(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    assert residuals(looped, weights, batches) == MLP_BYTES
    assert residuals(lambda w, xs: [jax.grad(loss)(w, x) for x in xs], weights, [x] * 4) == MLP_BYTES


@pytest.mark.parametrize("grad_inside", [False, True])
def test_shard_map_counts_one_shard(grad_inside):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")))
    if grad_inside:
        fn = shard(jax.grad(loss), out_specs=P())
    else:
        fn = lambda weights, x: shard(net, out_specs=P("data"))(weights, x).sum()
    assert residuals(fn, *arrays()) == MLP_BYTES // 8


def test_masks_keys_and_remade_constants():
    weights, x = arrays()
    size = ROWS * WIDTH
    assert residuals(lambda w, x: jax.nn.relu(x @ w[0]).sum(), weights, x) == size
    # JAX saves the full array of twos too, which the compiler makes again.
    assert residuals(lambda x: (jnp.sin(x) * jnp.full(x.shape, 2.0)).sum(), x) == ACTIVATION

    def dropout(key, w, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w[0], 0.0).sum()

    assert residuals(dropout, jax.random.key(0), weights, x) == size

    @jax.custom_vjp
    def noisy(key, x):
        return x

    def forward(key, x):
        return x, jax.random.split(key, 5)

    noisy.defvjp(forward, lambda keys, g: (None, g * jax.random.normal(keys[3], g.shape)))
    assert residuals(noisy, jax.random.key(0), x) == 5 * 8


def test_auxiliary_outputs_of_a_loss_are_not_differentiated():
    def with_aux(weights, x):
        y = net(weights, x)
        return y.sum(), {"std": jnp.exp(y), "count": jnp.int32(x.size)}

    assert residuals(with_aux, *arrays()) == MLP_BYTES
    assert residuals(jax.value_and_grad(with_aux, has_aux=True), *arrays()) == MLP_BYTES


def test_dead_code_does_not_count():
    def wasteful(weights, x):
        unused = jax.grad(lambda weights: jnp.exp(net(weights, x)).sum())(weights)
        return jax.tree.map(lambda g, u: g + 0 * u.size, jax.grad(loss)(weights, x), unused)

    assert residuals(wasteful, *arrays()) == MLP_BYTES


def test_one_buffer_under_two_names_counts_once():
    def f(x):
        y = jnp.sin(x)
        return y, jnp.sin(checkpoint_name(y, "y"))

    def fn(x):
        # The policy saves y, as a `reduce_precision` that does nothing, and the product saves it reshaped.
        y, z = memjax.remat.checkpoint(f, policy=memjax.remat.policies.save("y"))(x)
        return (y.reshape(-1) * jnp.exp(z).reshape(-1)).sum()

    _, x = arrays()
    assert residuals(fn, x) == 2 * ACTIVATION  # y and the exponential


def test_nnx_state():
    model = nnx.Linear(WIDTH, 128, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def run(state, x):
        return jnp.sin(nnx.merge(graphdef, state)(x)).sum()

    _, x = arrays()
    abstract = jax.eval_shape(lambda: state)
    assert residuals(run, state, x) == residuals(run, abstract, x) == ROWS * 128 * 4


def test_what_cannot_be_differentiated_says_so():
    _, x = arrays()
    for fn, reason in [
        (lambda x: x > 0, "no float argument or no float result"),
        (lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x), "while_loop"),
    ]:
        measured = memjax.measure(fn, x)
        assert measured.residual_bytes is None
        assert measured.offloaded_bytes is None
        assert reason in " ".join(measured.notes)


@pytest.mark.smoke
def test_compiled_figures():
    n = 256
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    # Between two matrix products the intermediate has to be in memory.
    measured = memjax.measure(lambda x: (x @ x) @ x, x)
    assert measured.temp_bytes == pytest.approx(4 * n * n, rel=0.01)
    assert measured.argument_bytes == measured.output_bytes == 4 * n * n
    assert measured.flops == pytest.approx(4 * n**3, rel=0.01)
    assert measured.compile_seconds > 0
    assert measured.peak_bytes is None


def blocks(wrap):
    def fn(w, x):
        def block(x):
            for _ in range(8):
                x = jnp.sin(x @ w)
            return x

        for _ in range(8):
            x = wrap(block)(x)
        return x.sum()

    return jax.grad(fn), jnp.zeros((32, 32)), jnp.zeros((4096, 32))


def test_rematerialisation_is_real_in_the_compiled_bytes():
    _, _, x = blocks(jax.checkpoint)
    plain, kept = memjax.measure(*blocks(lambda f: f)), memjax.measure(*blocks(jax.checkpoint))
    assert plain.residual_bytes == (64 + 63) * x.nbytes
    assert kept.residual_bytes == 7 * x.nbytes
    assert kept.temp_bytes < 0.35 * plain.temp_bytes


def test_rematerialisation_is_real_without_any_flags():
    # What these tests set for their whole process, a user does not: `measure` has to.
    code = (
        "import jax, memjax; from tests.test_measure import blocks\n"
        "print(*(memjax.measure(*blocks(wrap)).temp_bytes for wrap in (jax.checkpoint, lambda f: f)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    measured, plain = map(int, done.stdout.split())
    assert measured < 0.35 * plain


def test_abstract_arguments_measure_the_same():
    args = arrays()
    abstract = jax.eval_shape(lambda: args)
    concrete, described = memjax.measure(step, *args).to_dict(), memjax.measure(step, *abstract).to_dict()
    for figures in (concrete, described):
        del figures["compile_seconds"], figures["notes"]
    assert concrete == described


def test_printing_and_plain_data():
    measured = memjax.measure(jax.grad(loss), *arrays())
    text = str(measured)
    assert "20.00 KiB" in text
    assert "FLOP" in text
    assert "note: peak_bytes unknown" in text
    assert json.loads(json.dumps(measured.to_dict()))["residual_bytes"] == MLP_BYTES


class Counters:
    """A device's memory statistics: a baseline, and a peak that an execution raises."""

    def __init__(self, monkeypatch, peak_after):
        self.reads, self.peak_after = 0, peak_after
        monkeypatch.setattr(_measure, "_memory_stats", self)

    def __call__(self, device):
        self.reads += 1
        after = self.reads > 2  # the first read asks whether there are statistics, the second is the baseline
        return {"bytes_in_use": 1000, "peak_bytes_in_use": self.peak_after if after else 5000}


def test_peak_of_one_execution_with_donated_arguments(monkeypatch):
    weights, x = arrays()
    weights = [w + 0 for w in weights]
    host = np.asarray(x)
    donating = jax.jit(step, donate_argnums=0)
    Counters(monkeypatch, peak_after=9000)
    measured = memjax.measure(donating, weights, host)
    assert measured.peak_bytes == 8000 + measured.argument_bytes
    assert not any(w.is_deleted() for w in weights)
    np.testing.assert_array_equal(weights[0], arrays()[0][0])


def test_peak_is_unknown_when_the_counter_stood_higher(monkeypatch):
    Counters(monkeypatch, peak_after=5000)
    measured = memjax.measure(loss, *arrays())
    assert measured.peak_bytes is None
    assert "fresh process" in " ".join(measured.notes)


def test_nothing_runs_without_memory_statistics():
    def fn(x):
        jax.debug.callback(lambda: ran.append(1))
        return x * 2

    ran: list[int] = []
    memjax.measure(fn, jnp.ones(3))
    jax.effects_barrier()
    assert not ran


def test_a_result_for_a_function_is_refused():
    with pytest.raises(TypeError, match=r"fn must be a function, got an array of float32"):
        memjax.measure(loss(*arrays()))


def test_compiler_options():
    assert memjax.remat_compiler_options("gpu") == {}
    needed = jax.__version_info__ < (0, 11)
    assert ("xla_disable_hlo_passes" in memjax.remat_compiler_options("cpu")) == needed
