"""Why a step has no microbatches or no tiles: what is said of it, and where."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import memjax
from memjax._jit.decide import notes
from tests.jit.steps import batch
from tests.jit.test_tiles import TOKENS, VOCABULARY, mean, parameters
from tests.jit.test_tiles import batch as batch_of_tokens


def said(step, *args, allow=("recompute", "tile", "microbatch")):
    """The notes, with nothing compiled."""
    jitted = memjax.jit(step, allow=allow)
    return notes(jitted._to_predict(args, {}), jitted._asked)


def trained(f):
    """A step of two layers with `f` between them."""

    def step(ws, x):
        loss = lambda ws: jnp.mean((f(jnp.tanh(x @ ws[0])) @ ws[1]) ** 2)
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    return step


def normed(x):
    with jax.named_scope("BatchNorm_0"):
        return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (
            lambda x: jnp.sort(x, 0),
            ["microbatches: none, for `sort` at test_notes.py:", "each example alone"],
        ),
        (lambda x: jnp.cumsum(x, 0), ["microbatches: none, for `cumsum` at test_notes.py:"]),
        (
            lambda x: x / jnp.abs(x).sum(),
            [
                "microbatches: none, for `div` at test_notes.py:",
                "reads a sum over all examples",
                "or divide by a sum that",
            ],
        ),
        (
            normed,
            [
                "microbatches: none, for ",
                " at BatchNorm_0, test_notes.py:",
                "a norm over groups or features",
            ],
        ),
        (
            lambda x: jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x)) + x,
            ["`pure_callback` at test_notes.py:"],
        ),
    ],
    ids=["sort", "cumsum", "sum of activations", "batch norm", "callback"],
)
def test_what_mixes_the_batch_is_named_with_its_line(f, found):
    ws = [jnp.ones((32, 64)), jnp.ones((64, 8))]
    (note,) = said(trained(f), ws, batch())
    assert all(text in note for text in found)
    assert not said(trained(f), ws, batch(), allow=["recompute"])
    assert not said(trained(jax.nn.gelu), ws, batch())


def test_a_batch_that_is_not_on_the_first_axis_is_asked_for_there():
    def step(params, tokens):
        return jax.grad(lambda params: jnp.mean(jnp.tanh(params[0][tokens[:-1]] @ params[1]) ** 2))(params)

    (note,) = said(step, [jnp.ones((64, 32)), jnp.ones((32, 32))], jnp.zeros((17, 8), int), allow=["microbatch"])
    assert note.startswith("microbatches: none, for the backward pass cannot run for some of 17 examples at a time")


def test_a_loss_without_logits_is_answered_with_one_that_has_them():
    def step(params, x, labels):
        return jax.grad(lambda params: memjax.linear_cross_entropy(x @ params[0], params[1], labels))(params)

    (note,) = said(step, [jnp.ones((32, 32)), jnp.ones((64, 32))], batch(), jnp.zeros(256, int), allow=["microbatch"])
    assert "none, for memjax.linear_cross_entropy at test_notes.py:" in note
    assert "Write the loss with its logits" in note


def step_of(metric):
    def step(ws, x, labels):
        def loss(ws):
            logits = jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2]
            return mean(logits, labels), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(ws)
        return optax.apply_updates(ws, gradients), value, metric(logits)

    return step


def test_what_keeps_logits_whole_is_said_wherever_the_plan_is():
    step, args = step_of(jax.nn.softmax), (parameters(), *batch_of_tokens())
    jitted = memjax.jit(step, budget="min", allow=("recompute", "tile"))
    plan = jitted.plan(*args)
    (note,) = plan.notes
    assert note.startswith(f"tiles: the step returns float32[{TOKENS},{VOCABULARY}] test_notes.py:")
    assert f"note: {note}" in str(plan)
    assert type(plan).from_json(plan.to_json()) == plan
    assert note in jitted.explain(*args).notes
    with pytest.raises(ValueError, match="the least possible") as error:
        memjax.jit(step, budget="1KiB", allow=("recompute", "tile")).plan(*args)
    assert f"note: {note}" in str(error.value)
    assert json.loads(plan.to_json())["notes"] == [note]


def test_what_reads_logits_besides_the_loss_is_named():
    args = (parameters(), *batch_of_tokens())
    (note,) = said(step_of(lambda logits: jnp.cumsum(logits, 0)[::7].sum()), *args, allow=["tile"])
    assert note.startswith("tiles: `")
    assert "test_notes.py:" in note
    assert "outside of the loss" in note
    assert not said(step_of(lambda logits: logits.argmax(-1)), *args, allow=["tile"])
