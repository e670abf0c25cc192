"""Measured functions of all kinds of arguments: Flax objects that change in place, static leaves, keywords, jitted ones."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import memjax
from memjax import _measure, compress

ROWS, WIDTH, LAYERS = 16, 64, 3
ACTIVATION = ROWS * WIDTH * 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
# A cosine and the input of every layer but the first.
RESIDUALS = (2 * LAYERS - 1) * ACTIVATION


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS)])
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = jnp.sin(layer(x))
        return x

    def encode(self, x, *, depth):
        for layer in self.layers[:depth]:
            x = jnp.sin(layer(x))
        return x


def inputs():
    return jnp.ones((ROWS, WIDTH))


def training():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), inputs()


def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: model(x).sum())(model)
    optimizer.update(model, gradients)
    return loss


def values(*objects):
    return jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(objects)))


def pure_step():
    """The same step as a function of arrays alone, and its arguments: what the others have to agree with."""
    model, optimizer, x = training()
    graph, state = nnx.split((model, optimizer))

    def run(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = step(model, optimizer, x)
        return loss, nnx.state((model, optimizer))

    return run, state, x


@pytest.mark.smoke
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        nnx.jit,
        nnx.jit(donate_argnums=(0, 1)),
        nnx.jit(donate_argnames=("model", "optimizer")),
        nnx.jit(graph_updates=False),
        lambda f: lambda *args: nnx.jit(f)(*args),
    ],
    ids=["plain", "jit", "donated", "names", "tree", "inner"],
)
def test_a_step_that_updates_in_place(wrap):
    model, optimizer, x = training()
    before = values(model, optimizer)
    measured = memjax.measure(wrap(step), model, optimizer, x)
    run, *args = pure_step()
    expected = jax.jit(run).trace(*args).lower().compile()
    memory = expected.memory_analysis()
    assert measured.residual_bytes == RESIDUALS
    assert measured.flops == pytest.approx(expected.cost_analysis()["flops"], rel=0.01)
    assert measured.argument_bytes == memory.argument_size_in_bytes
    # The weights and their momentum, two counters and the loss; a table of pointers has some bytes.
    assert measured.output_bytes == pytest.approx(2 * WEIGHTS, abs=300)
    assert measured.temp_bytes >= ACTIVATION
    for old, new in zip(before, values(model, optimizer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_what_changes_is_an_output_of_a_plain_function():
    model, _, x = training()
    measured = memjax.measure(lambda model, x: model(x), model, x)
    assert measured.output_bytes == pytest.approx(ACTIVATION + 4, abs=50)
    assert measured.residual_bytes == RESIDUALS
    assert model.calls[...] == 0


@pytest.mark.parametrize(
    "measured",
    [
        lambda model, x: memjax.measure(model, x),
        lambda model, x: memjax.measure(model.__call__, x=x),
        lambda model, x: memjax.measure(nnx.jit(lambda m, x: m(x)), model, x),
        lambda model, x: memjax.measure(nnx.grad(lambda m, x: m(x).sum()), model, x),
        lambda model, x: memjax.measure(functools.partial(model.encode, depth=LAYERS), x),
        lambda model, x: memjax.measure(lambda m, x: m["net"].encode(x, depth=LAYERS), {"net": model}, x),
        lambda model, x: memjax.measure(functools.partial(nnx.jit(lambda m, x: m(x)), model), x),
        lambda model, x: memjax.measure(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), x),
    ],
    ids=["module", "call", "jit", "grad", "partial", "dict", "bound", "abstract"],
)
def test_nnx_modules(measured):
    model, _, x = training()
    found = measured(model, x)
    assert found.residual_bytes == RESIDUALS
    assert WEIGHTS + ACTIVATION <= found.argument_bytes <= WEIGHTS + ACTIVATION + 100


def test_modules_that_share_variables_count_them_once():
    model, _, x = training()
    twin = nnx.clone(model)
    for layer, shared in zip(twin.layers, model.layers, strict=True):
        layer.kernel = shared.kernel
    apart = memjax.measure(lambda a, b, x: a(b(x)), model, nnx.clone(model), x)
    shared = memjax.measure(lambda a, b, x: a(b(x)), model, twin, x)
    assert apart.argument_bytes - shared.argument_bytes == WEIGHTS
    assert shared.residual_bytes == apart.residual_bytes


def test_random_state_goes_on_in_the_program_alone():
    rngs = nnx.Rngs(0)
    found = memjax.measure(lambda rngs, x: x * rngs.normal(x.shape), rngs, inputs())
    assert found.output_bytes == pytest.approx(ACTIVATION + 4, abs=50)  # the stream's counter too
    assert rngs.default.count[...] == 0


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(LAYERS):
            x = jnp.sin(nn.Dense(WIDTH, use_bias=False)(x))
        calls = self.variable("stats", "calls", jnp.zeros, ())
        if train:
            x = nn.Dropout(0.5, deterministic=False)(x)
            calls.value += 1
        return x

    def last(self, x):
        return jnp.sin(x)


def test_linen_modules():
    model, x = Linen(), inputs()
    variables = model.init(jax.random.key(0), x, False)
    expected = memjax.measure(lambda variables, x: model.apply(variables, x, False), variables, x)
    assert expected.residual_bytes == RESIDUALS
    for found in (
        memjax.measure(model.bind(variables), x, False),
        memjax.measure(model.bind(variables), x, train=False),
        memjax.measure(lambda model, variables, x: model.apply(variables, x, False), model, variables, x),
        memjax.measure(functools.partial(model.bind(variables), train=False), x),
    ):
        assert found.residual_bytes == RESIDUALS
        assert found.argument_bytes == expected.argument_bytes
        assert found.output_bytes == expected.output_bytes
    trained = memjax.measure(model.bind(variables, rngs={"dropout": jax.random.key(1)}, mutable=["stats"]), x)
    assert trained.residual_bytes == RESIDUALS + ROWS * WIDTH  # the mask
    assert trained.output_bytes == pytest.approx(ACTIVATION + 4, abs=50)
    assert memjax.measure(model.bind(variables).last, x).residual_bytes == ACTIVATION
    with pytest.raises(TypeError, match=r"fn must be a Linen module bound to variables, got Linen without: .*bind"):
        memjax.measure(model, x)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "act", "name", "depth"], meta_fields=["layout"]
)
@dataclasses.dataclass
class Tree:
    """A model as a pytree with leaves that are no arrays."""

    weights: list
    act: object = jnp.sin
    name: object = "tree"
    depth: object = None
    layout: str = "dense"

    def __call__(self, x, repeats=1):
        for w in self.weights[: self.depth] * repeats:
            x = self.act(x @ w)
        return x

    def loss(self, x):
        return self(x).sum()


@pytest.mark.parametrize(
    "measured",
    [
        lambda model, x: memjax.measure(lambda model, x: model(x), model, x),
        lambda model, x: memjax.measure(model, x),
        lambda model, x: memjax.measure(dataclasses.replace(model, depth=LAYERS), x),
        lambda model, x: memjax.measure(functools.partial(model, repeats=1), x),
        lambda model, x: memjax.measure(model.loss, x),
        lambda model, x: memjax.measure(lambda model, x: (model(x).sum(), {"model": model, "name": "x"}), model, x),
        lambda model, x: memjax.measure(lambda *, how, model, x: how(model(x)), how=jnp.sum, model=model, x=x),
    ],
    ids=["argument", "callable", "number", "partial", "method", "result", "keywords"],
)
def test_static_leaves_stay_as_they_are(measured):
    weights, x = [jnp.full((WIDTH, WIDTH), 0.01)] * LAYERS, inputs()
    found = measured(Tree(weights), x)
    assert found.residual_bytes == RESIDUALS
    assert found.argument_bytes == WEIGHTS + ACTIVATION


def test_numbers_are_scalar_arguments():
    """As those of `jax.jit`, or the first step of a training state would be compiled as a constant, and divided by."""

    def step(state, x):
        loss = lambda w: jnp.sum(jnp.sin(x @ w)) * state["scale"]
        return {**state, "w": state["w"] - jax.grad(loss)(state["w"]) / state["step"], "step": state["step"] + 1}

    state = {"w": jnp.ones((WIDTH, WIDTH)), "step": 0, "scale": 0.5}
    found, expected = (memjax.measure(f, state, inputs()) for f in (step, jax.jit(step)))
    figures = ("residual_bytes", "argument_bytes", "output_bytes", "flops")
    assert [getattr(found, name) for name in figures] == [getattr(expected, name) for name in figures]
    assert memjax.explain(step, state, inputs()).residual_bytes == found.residual_bytes
    # A loss that is scaled by one is not differentiated with respect to it.
    loss = lambda w, x, scale: jnp.sum(jnp.sin(x @ w) * scale)
    scaled = memjax.measure(loss, state["w"], inputs(), 0.5)
    assert scaled.residual_bytes == memjax.measure(jax.grad(loss, (0, 1)), state["w"], inputs(), 0.5).residual_bytes
    for needs_value in (lambda x, n: [x] * n, lambda x, n: x[:n], lambda x, n: f"{n:d}" and x):
        with pytest.raises(TypeError, match=r"needs the value of an array or a number .* functools\.partial"):
            memjax.measure(needs_value, inputs(), 2)
    bound = functools.partial(lambda x, *, n: [x := jnp.sin(x) for _ in range(n)][-1], n=2)
    assert memjax.measure(bound, inputs()).residual_bytes == 2 * ACTIVATION


def test_static_arguments_of_jitted_functions():
    def power(x, *, n, mode):
        assert mode == "sin"
        for _ in range(n):
            x = jnp.sin(x)
        return x

    jitted = jax.jit(power, static_argnames=("n", "mode"))
    assert memjax.measure(jitted, inputs(), n=2, mode="sin").residual_bytes == 2 * ACTIVATION
    assert memjax.measure(functools.partial(jitted, n=2), inputs(), mode="sin").residual_bytes == 2 * ACTIVATION
    with pytest.raises(TypeError, match=r"arguments of a jitted function must be arrays: .*str.*static_argnames"):
        memjax.measure(jax.jit(lambda x, mode: x), inputs(), "sin")


def test_static_arguments_of_functions_that_are_not_jitted():
    """As people write them: settings, numbers, names and functions among the arguments."""

    def loss(params, x, settings, depth, act="sin"):
        for _ in range(depth):
            x = getattr(jnp, act)(x @ params) if settings["nonlinear"] else x
        return x[: settings["first"]].sum()

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    settings = {"nonlinear": True, "first": 4}
    bound = memjax.measure(jax.grad(lambda params, x: loss(params, x, settings, 2)), *args)
    step = jax.grad(loss)
    for static in (
        {"static_argnums": (2, 3)},
        {"static_argnums": (-3, -2)},
        {"static_argnames": ["settings", "depth"]},
    ):
        found = memjax.measure(step, *args, settings, 2, **static)
        assert (found.residual_bytes, found.temp_bytes) == (bound.residual_bytes, bound.temp_bytes)
        assert found.argument_bytes == bound.argument_bytes == 4 * (64 + 128)
        assert memjax.explain(step, *args, settings, 2, **static).residual_bytes == bound.residual_bytes
    named = memjax.explain(loss, *args, settings=settings, depth=2, act="cos", static_argnames=("settings", "depth"))
    assert named.residual_bytes == bound.residual_bytes
    update = lambda params, *others: params - step(params, *others)
    whole = memjax.explain(update, *args, settings, 2, static_argnums=(2, 3))
    assert whole.line == "step = memjax.jit(train_step, static_argnums=(2, 3), budget='40GiB')"
    for wrap in (jax.jit, memjax.jit):
        with pytest.raises(ValueError, match="static_argnums must be None where fn is jitted, got 3: give it to"):
            memjax.measure(wrap(step), *args, settings, 2, static_argnums=3)
    with pytest.raises(ValueError, match=r"static_argnums must be what jax\.jit takes, got 7"):
        memjax.measure(step, *args, settings, 2, static_argnums=7)
    with pytest.raises(
        TypeError, match=r"needs the value of an array or a number .* \(where static_argnums can be given"
    ):
        memjax.explain(step, *args, settings, 2)


def memory_statistics(monkeypatch):
    """As if the device kept statistics: 5,000 bytes before, 9,000 after."""
    reads = iter([5000, 5000, 9000])
    monkeypatch.setattr(
        _measure, "_memory_stats", lambda device: {"bytes_in_use": 1000, "peak_bytes_in_use": next(reads)}
    )


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit(donate_argnums=(0, 1)), nnx.jit(graph_updates=False)])
def test_an_execution_leaves_objects_as_they_are(monkeypatch, wrap):
    model, optimizer, x = training()
    before = values(model, optimizer)
    memory_statistics(monkeypatch)
    measured = memjax.measure(wrap(step), model, optimizer, x)
    assert measured.peak_bytes == 8000 + measured.argument_bytes
    for old, new in zip(before, values(model, optimizer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_transactional_step_is_measured_and_not_run():
    x = jnp.ones((8, 8, 8, 16))
    weights = {"a": jnp.full((3, 3, 16, 16), 0.01), "b": jnp.full((3, 3, 16, 16), 0.01)}

    def network(weights, x):
        for w in weights.values():
            x = jnp.sin(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return x

    def loss(codec, weights, x):
        return jnp.mean(memjax.compressed(network, codec, where="conv")(weights, x))

    tx = compress.adaptive(optax.sgd(0.1, momentum=0.9))
    params = {"net": weights, "codec": compress.layers(loss, weights, x)}

    def step(state, x):
        params, optimizer = state
        gradients = jax.grad(lambda params: loss(params["codec"], params["net"], x))(params)
        updates, optimizer = tx.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), None

    run, state = compress.transactional(step, donate=False), (params, tx.init(params))
    found = memjax.measure(run, state, x)
    assert found.residual_bytes == memjax.measure(step, state, x).residual_bytes
    assert 0 < found.residual_bytes < 4 * x.nbytes
    assert run.compiled == 0
    jax.block_until_ready(run(state, x))


def test_what_cannot_be_traced_says_so():
    model, _, x = training()
    left: list = []
    jax.jit(lambda x: left.append(x))(x)
    for fn, fix in [
        (lambda x: x if x.sum() > 0 else -x, "bind the value with functools.partial"),
        (lambda x: float(x.sum()), "bind the value with functools.partial"),
        (lambda x: np.sin(np.asarray(x)), "bind the value with functools.partial"),
        (lambda x: jnp.zeros(x.astype(int)[0, 0]), "bind the value with functools.partial"),
        (lambda x: x[x > 0], "bind the value with functools.partial"),
        (lambda x: x + left[0], "an earlier trace left"),
        (lambda x: model(x), "make the object an argument"),
    ]:
        with pytest.raises(TypeError, match=rf"fn must be a function that JAX can trace, got .*{fix}"):
            memjax.measure(fn, x)
    assert model.calls[...] == 0
    with pytest.raises(TypeError, match=r"missing 1 required positional argument"):
        memjax.measure(lambda x, y: x, x)


def test_options_that_do_not_exist():
    x = inputs()
    with pytest.raises(ValueError, match=r"compiler_options must be options that the compiler knows.*no_such_option"):
        memjax.measure(jnp.sin, x, compiler_options={"no_such_option": "1"})
    with pytest.raises(TypeError, match=r"compiler_options must be None or a dict of names and values .*, got 'fast'"):
        memjax.measure(jnp.sin, x, compiler_options="fast")
    for backend in ("CPU", "nonsense", 1, True, b"cpu"):
        with pytest.raises(ValueError, match=r"backend must be one of None, 'cpu', 'gpu', 'tpu', .*, got "):
            memjax.remat_compiler_options(backend)


def test_repr_is_one_readable_line():
    shown = repr(memjax.measure(lambda x: jnp.sin(x).sum(), inputs()))
    assert shown.startswith("Measurement(residual: 4.00 KiB, offloaded to host: 0 B, temp")
    assert "\n" not in shown
