"""Memory that `remat.scan` takes, as compiled: within the budget, and a program that does not grow with the length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memjax.remat import scan
from tests.remat.scan.scan_cases import close, lstm, lstm_shapes, lstm_step

# Beyond the budget and one working step: alignment, loop counters, tables of moves, and a few arrays of one step's size
# that XLA holds twice.
CONSTANT = 64 * 1024
SLACK = 16 * 1024  # of the loss around the scan


def squares(tree):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def compiled(cell, params, carry, xs, **options):
    def loss(params, carry, xs):
        return squares(scan(functools.partial(cell, params), carry, xs, **options))

    return jax.jit(jax.grad(loss, (0, 1, 2), allow_int=True)).lower(params, carry, xs)


def one_step(cell, params, carry, xs):
    """Bytes of one step's gradient, working memory and results."""
    x = jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)
    gradient = jax.jit(jax.grad(lambda *values: squares(cell(*values)), (0, 1, 2), allow_int=True))
    memory = gradient.lower(params, carry, x).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def attention(params, carry, x):
    """A memory that is read: residuals of other shapes than the carry's."""
    memory, n = carry
    scores = jax.nn.softmax((x @ params) @ memory.T / 4)
    memory = jnp.tanh(memory + scores.T @ x)
    return (memory, n + 1), scores.max()


def case(name):
    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    if name == "lstm":
        return lstm, *lstm_shapes(32, 16, 300)
    if name == "wide lstm":  # parameters 128 times as large as the carry
        return lstm, *lstm_shapes(256, 8, 60)
    if name == "outputs":
        return outputs, floats(64, 64), floats(16, 64), floats(200, 16, 64)
    return attention, floats(16, 16), (floats(48, 16), jax.ShapeDtypeStruct((), jnp.int32)), floats(120, 8, 16)


def outputs(params, h, x):
    """Outputs as large as the states, and others without gradients."""
    h = jnp.tanh(h @ params + x)
    return h, (h, h > 0)


@pytest.mark.parametrize(
    ("name", "share"), [("lstm", 0.03), ("wide lstm", 0.05), ("attention", 0.05), ("outputs", 0.4)]
)
def test_budget_is_kept(name, share):
    """Temporary bytes of the compiled gradient, outputs and working memory of a step included."""
    cell, params, carry, xs = case(name)
    ys = jax.eval_shape(lambda *values: lax.scan(functools.partial(cell, values[0]), *values[1:]), params, carry, xs)[1]
    beside = sum(2 * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ys))

    def plain(params, carry, xs):
        return squares(lax.scan(functools.partial(cell, params), carry, xs))

    everything = temp(jax.jit(jax.grad(plain, (0, 1, 2), allow_int=True)).lower(params, carry, xs))
    budget = int(beside + one_step(cell, params, carry, xs) + share * (everything - beside))
    got = temp(compiled(cell, params, carry, xs, budget=budget))
    assert 0.5 * budget < got <= budget + SLACK
    if name == "lstm":
        assert got < everything / 10


def temp(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("strategy", ["hidden", "internal", "mixed"])
def test_slots_are_kept(strategy):
    """Units of one carry, a working state and a working core besides; parameters are not stored per slot."""
    cell, params, carry, xs = case("wide lstm")
    step, _, backward = lstm_step(256, 8)
    unit = step.carry_nbytes + (backward.kept_nbytes if strategy == "internal" else 0)
    room = 12 * unit + 2 * step.carry_nbytes + backward.kept_nbytes
    got = compiled(cell, params, carry, xs, slots=12, strategy=strategy).compile().memory_analysis()
    assert got.temp_size_in_bytes <= room + one_step(cell, params, carry, xs) + CONSTANT


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_states_take_one_row_for_each_slot(slots):
    """What the backward pass is given: as many carries as there are slots, and one step's residuals."""
    x = jnp.ones((64, 32), jnp.float32)
    layers = jnp.zeros((9, 32, 32), jnp.float32)

    def loss(layers, x):
        return scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers, slots=slots, strategy="hidden")[0]

    kept = jax.tree.leaves(jax.eval_shape(lambda *values: jax.vjp(loss, *values)[1], layers, x))
    rows = [leaf.shape[0] for leaf in kept if leaf.shape[1:] == x.shape]
    assert sum(rows) == slots + 2  # the last step's residuals are its input and its output


def test_program_does_not_grow():
    """LSTM 256, batch 64: 100,000 steps in 64 MiB, by a program of the size of that for 1,000."""

    def measure(length):
        lowered = compiled(lstm, *lstm_shapes(256, 64, length), budget="56MiB")
        program = lowered.compile()
        return program.memory_analysis().temp_size_in_bytes, len(lowered.as_text()), len(program.as_text())

    _, lowered, program = measure(1000)
    temp, long_lowered, long_program = measure(100_000)
    assert temp <= 64 * 2**20
    assert long_lowered <= 1.2 * lowered
    assert long_program <= 1.2 * program


def test_a_long_scan_runs():
    rng = np.random.default_rng(0)
    draw = lambda aval: jax.device_put(np.asarray(rng.normal(size=aval.shape) / 2, aval.dtype))
    params, carry, xs = jax.tree.map(draw, lstm_shapes(4, 2, 40_000))

    def loss(scan, params):
        return squares(scan(functools.partial(lstm, params), carry, xs)[0])

    got = jax.jit(jax.grad(functools.partial(loss, functools.partial(scan, budget="1.6MiB"))))(params)
    close(got, jax.jit(jax.grad(functools.partial(loss, lax.scan)))(params), 1e-4)


@pytest.mark.parametrize("way", [{"slots": 10}, {"budget": "1MiB"}], ids=str)
def test_a_gradient_penalty_takes_little_more_than_with_checkpoints(way):
    """A second derivative keeps the carries of all steps, once for each pass, and nothing that the first one works with."""
    w, h, x = jnp.eye(64) / 3, jnp.ones((32, 64)), jnp.ones((100, 32, 64))

    def penalty(run, wrap=lambda f: f, **options):
        def loss(w, x):
            return (run(wrap(lambda h, x: (jnp.tanh(h @ w + x), None)), h, x, **options)[0] ** 2).mean()

        return temp(jax.jit(jax.grad(lambda w, x: (jax.grad(loss, 1)(w, x) ** 2).sum())).lower(w, x))

    assert penalty(scan, **way) <= penalty(lax.scan, jax.checkpoint) + 1.1 * x.nbytes < penalty(lax.scan)
