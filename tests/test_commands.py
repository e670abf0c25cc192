"""`python -m memjax`: what it prints and writes, and what it says of a command that is wrong."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import memjax
from memjax import __main__ as main
from memjax._commands import run
from tests.jit.steps import STEPS, within

FACTORIES = """
import jax
import memjax
from flax import nnx
from tests.jit.steps import STEPS

step = STEPS["layers"]()
make = lambda: (step.f, step.args)
jitted = lambda: (jax.jit(step.f, **step.options), step.args)
model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
objects = lambda: (nnx.jit(lambda model, x: model(x), donate_argnums=0), (model, jax.numpy.ones((2, 2))))
planned = lambda: (memjax.jit(step.f, budget="1GiB", **step.options), step.args)
alone = lambda: step.f
of_one = lambda x: x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """With modules that have factories."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "lacks.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield tmp_path
    sys.modules.pop("factories", None)


def test_fit_makes_the_plan_of_the_step_with_its_donation(folder):
    step = STEPS["layers"]()
    budget = within(0.6, step)
    flags = f"fit factories:jitted --budget {budget} --allow recompute --plan plan.json".split()
    command = [sys.executable, "-m", "memjax", *flags]
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = memjax.StepPlan.from_json((folder / "plan.json").read_text())
    assert plan == memjax.jit(step.f, budget=budget, allow=["recompute"], **step.options).plan(*step.args)
    (line,) = [line for line in done.stdout.splitlines() if "memjax.jit(step, " in line]
    assert "donate_argnums=(0, 1), plan=memjax.StepPlan.from_json(open('plan.json').read()))" in line


def test_fit_says_where_nothing_fits_what_is_possible(folder, capsys):
    picture = folder / "frontier.png"
    flags = f"fit factories:planned --budget 1KiB --allow recompute --json --picture {picture}".split()
    assert run(flags) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert "budget is 1.00 KiB" in found["account"]
    assert found["frontier"][0]["nbytes"] == pytest.approx(found["nbytes"], rel=0.3)
    assert found["plain_nbytes"] > found["nbytes"] == found["plan"]["nbytes"]
    assert picture.read_bytes()[1:4] == b"PNG"


def test_what_nnx_donates_is_donated(capsys):
    assert run(["fit", "factories:objects"]) == 0
    assert "donate_argnums=(0,), budget='device')" in capsys.readouterr().out


def test_explain_prints_what_the_function_does(capsys):
    step = STEPS["layers"]()
    assert run(["explain", "factories:make"]) == 0
    found = capsys.readouterr().out
    assert found == f"{memjax.explain(step.f, *step.args)}\n"
    assert "memjax.jit(train_step" in found.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fit factories", "FACTORY must be PACKAGE.MODULE:FACTORY, got 'factories'"),
        ("fit factories.py:make", "name the module, not its file"),
        ("fit no_such_module:make", "FACTORY must be in a module that is there, got 'no_such_module'"),
        ("fit lacks:make", "lacks imports 'no_such_package', which is not there: install it"),
        ("explain factories:mak", "FACTORY must be a function in factories, got 'mak': did you mean 'make'?"),
        ("explain factories:of_one", "FACTORY must be a function of 0 arguments"),
        ("explain factories:alone", "FACTORY must return (step, arguments)"),
        ("fit factories:make --budget 5parsecs", "budget must be a number of bytes or a text like"),
        ("fit factories:make --allow magic", "allow must be one of 'recompute'"),
        ("fit factories:make --plan no/such/plan.json", "--plan must be in a folder that is there"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(command, said, capsys):
    assert run(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.main() == 2
    assert "pip install 'memjax[explain]'" in capsys.readouterr().err
