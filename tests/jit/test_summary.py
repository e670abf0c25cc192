"""What `print` shows of the plan of a step, and what is said while it is searched for."""

import functools
import re

import jax
import pytest

import memjax
from memjax import StepPlan
from memjax._core.check import readable_bytes
from memjax._jit import progress
from memjax._plan.result import Kept, Plan, Stretch, Tiled
from tests.jit.steps import batch, loss, parameters

KIB = 1024


def derivative(layers, turns=None, **of_array):
    """A plan that keeps an array of 1 KiB of each layer, and another of the network that is larger than all."""
    kept = [Kept(i, 0, KIB, f"float32[16,16] exp Net/Block_{i}/mlp, net.py:7", **of_array) for i in range(layers)]
    stretches = [Stretch(i, i + 1, (one,), 0, turns, 0.0, 0) for i, one in enumerate(kept)]
    logits = Kept(layers, 0, KIB * KIB, "float32[512,512] dot_general net.py:9 (loss)")
    stretches.append(Stretch(layers, layers + 1, (logits,), 0, None, 0.0, 0))
    return Plan(0, 0, 0, None, 1.5, 1.0, tuple(stretches), (), (), "", "cpu")


def test_arrays_of_layers_are_one_row():
    passes = derivative(12, turns=2, bits=8), None
    time = {"microbatches": 4, "seconds": 6.0, "plain_seconds": 4.0}
    plan = StepPlan(2 * KIB * KIB, KIB * KIB, 3 * KIB * KIB, passes, **time)
    assert str(plan).splitlines() == [
        "StepPlan: 1.00 MiB of 2.00 MiB, 3.00 MiB as it is written; predicted time +50.0%; in 4 microbatches",
        "a derivative in 13 parts, 12 of them loops: keeps 25 arrays of 1.02 MiB and what each part starts from",
        "      1.00 MiB  float32[512,512] dot_general net.py:9 (loss)",
        "     24.00 KiB  24 x float32[16,16] exp Net/Block[0..11]/mlp, net.py:7, in 8 bits",
        "all of it: plan.passes, plan.to_json()",
    ]
    assert StepPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_however_much_there_is_it_is_fifteen_lines_at_most(count):
    kinds = tuple(Kept(i, 0, KIB + i, f"float32[{i}] exp net.py:{i}") for i in range(9 * count))
    passes = (Plan(0, 0, 0, None, 1.5, 1.0, (Stretch(0, 1, kinds, 0, None, 0.0, 0),), (), (), "", "cpu"),) * count
    tiles, notes = (Tiled(0, 0, 1, 8, KIB, "float32[8]"),) * count, ("because",) * count
    lines = str(StepPlan(KIB, KIB, KIB, passes, tiles, microbatches=2, notes=notes)).splitlines()
    assert len(lines) <= 15
    if count > 1:
        assert len(lines) == 15
        rows = sum(line.startswith("    ") for line in lines)
        assert f" more in {9 * count - rows} rows; all of it: plan.passes, plan.to_json()" in lines[-1]
    assert ("... and 6 more" in lines) == (count == 9)
    with pytest.raises(ValueError, match="notes"):
        StepPlan.from_json(StepPlan(KIB, KIB, KIB).to_json().replace('"notes": []', '"notes": [1]'))


def train_step(rate, params, x):
    return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, x))


class Trainer:
    def fit(self, params, x):
        return train_step(0.1, params, x)

    __call__ = fit


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (functools.partial(train_step, 0.1), "train_step"),
        (functools.partial(jax.tree_util.Partial(train_step), 0.1), "train_step"),
        (functools.partial(jax.jit(train_step), 0.1), "train_step"),
        (functools.partial(Trainer().fit), "fit"),
        (Trainer().fit, "fit"),
        (functools.partial(Trainer()), "Trainer"),
        (Trainer(), "Trainer"),
    ],
)
def test_a_step_is_called_by_the_function_in_it(step, name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "_PATIENCE", -1)
    args = parameters(), batch()
    jitted = memjax.jit(step, budget="60%", allow=("recompute",), cache_dir=tmp_path)
    assert jitted.__name__ == name
    assert f"jit_{name} " in jitted.lower(*args).as_text()
    assert f"memjax.jit plans {name}: 1 compiled" in capsys.readouterr().err
    with pytest.raises(TypeError, match=f"got (a functools.partial of )?<.*{name}"):
        jitted(*args, 0)


def test_the_search_for_the_least_says_why_it_takes_long_and_how_far_it_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "_PATIENCE", -1)
    step = functools.partial(train_step, 0.1)
    plan = memjax.jit(step, budget="min", cache_dir=tmp_path).plan(parameters(), batch())
    why, *lines, last, done = capsys.readouterr().err.splitlines()
    assert why.startswith(
        'memjax.jit plans train_step: budget="min" compiles plans until none is expected to take less'
    )
    assert re.match(
        r"memjax.jit plans train_step: 1 compiled, the least holds \d", lines[0]
    )  # to know how many microbatches
    found = re.fullmatch(
        r"memjax.jit plans train_step: (\d+) compiled \(way (\d) of at most (\d) to .*\), the least holds (.*)", last
    )
    assert int(found[1]) == len(lines) + 1
    assert int(found[2]) <= int(found[3]) == 2  # as it is written, or in microbatches
    assert found[4] == readable_bytes(plan.nbytes)
    assert done.startswith("memjax.jit has planned train_step: ")
