"""`fit --batch-argnums`: how many examples fit."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import memjax
from memjax._commands import batch, run
from memjax._jit.account import BudgetError

FACTORIES = """
import jax
import jax.numpy as jnp


def step(w, x, scale):
    def loss(w):
        h = x
        for one in w:
            h = jnp.sin(jnp.cos(h @ one))
        return jnp.mean(h) * scale
    return jax.tree.map(jnp.subtract, w, jax.grad(loss)(w))


make = lambda: (step, ([jnp.ones((64, 64))] * 4, jnp.ones((96, 64)), 2.0))
fixed = lambda: (lambda w, x: jax.grad(lambda w: jnp.sum((x @ w).reshape(96, 64)))(w), (jnp.ones((64, 64)), jnp.ones((96, 64))))
forward = lambda: (lambda w, x: x @ w, (jnp.ones((64, 64)), jnp.ones((96, 64))))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "grows.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("grows", None)


def test_that_many_fit_and_twice_as_many_do_not(capsys):
    command = "fit grows:make --budget 2MiB --donate-argnums 0 --allow recompute --batch-argnums 1 --json"
    assert run(command.split()) == 0
    found = json.loads(capsys.readouterr().out)["largest_batch"]
    assert found["as_written"] < found["planned"]
    from grows import make

    step, (w, _, scale) = make()
    # The bytes of a plan, and of the plain step, are compiled ones.
    for how, fits in (("planned", lambda held: held <= 2**21), ("as_written", lambda held: held <= 2**21)):
        asked = memjax.jit(step, budget="2MiB" if how == "planned" else "1GiB", donate_argnums=0, allow=["recompute"])
        held = []
        for count in (found[how], 2 * found[how]):
            try:
                held.append(asked.plan(w, jax.ShapeDtypeStruct((count, 64), jnp.float32), scale).nbytes)
            except BudgetError as error:
                held.append(error.least.nbytes)
        assert [fits(nbytes) for nbytes in held] == [True, False]


@pytest.mark.parametrize(
    ("slope", "fixed", "bend", "start"), [(3, 0, 0, 1), (3, 700, 0, 40), (1, 0, 0.01, 999), (2, 5, 3, 8)]
)
def test_a_few_tries_find_the_largest(slope, fixed, bend, start):
    tries = []

    def nbytes(count):
        tries.append(count)
        return slope * count + fixed + bend * count**1.5

    for budget in (1, 800, 12345, 10**7):
        tries.clear()
        numbers = [*range(1, 8)] + [m << e for e in range(40) for m in range(8, 16)]
        fitting = [count for count in numbers if slope * count + fixed + bend * count**1.5 <= budget]
        assert batch._most(nbytes, budget, start) == max(fitting, default=0)
        assert len(tries) <= 16


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "grows:make --batch-argnums 1",
            "--batch-argnums needs bytes to fill, got --budget device: give --budget 40GiB",
        ),
        ("grows:make --batch-argnums 1 --budget 50%", "--batch-argnums needs bytes to fill, got --budget 50%"),
        ("grows:make --batch-argnums 0 1 --budget 1GiB", "with as many examples each, got 64 and 96"),
        ("grows:make --batch-argnums 2 --budget 1GiB", "of arrays with a first axis, got 2.0"),
        ("grows:make --batch-argnums 7 --budget 1GiB", "numbers of the 3 arguments, from 0, got 7"),
        ("grows:fixed --batch-argnums 1 --budget 1GiB", "a step that runs with any number of examples, not with"),
        ("grows:forward --batch-argnums 1 --budget 1GiB", "needs a step with a gradient, and this one has none"),
    ],
)
def test_a_batch_that_cannot_grow_is_told(command, said, capsys):
    assert run(["fit", *command.split()]) == 2
    assert said in capsys.readouterr().err.splitlines()[0]
