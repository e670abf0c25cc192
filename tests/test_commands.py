"""`python -m memjax`: what it prints and writes, and what it says of a command that is wrong."""

import ast
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
import functools
import pathlib
import jax
import memjax
from flax import nnx
from tests.jit.steps import STEPS

step = STEPS["layers"]()
make = lambda: (step.f, step.args)
jitted = lambda: (jax.jit(step.f, **step.options), step.args)
model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
objects = lambda: (nnx.jit(lambda model, x: model(x), donate_argnums=0), (model, jax.numpy.ones((2, 2))))
plan = lambda: memjax.StepPlan.from_json(pathlib.Path("plan.json").read_text())
acting = lambda: (memjax.jit(step.f, plan=plan(), **step.options), step.args)
planned = lambda: (memjax.jit(step.f, budget="1GiB", **step.options), step.args)
alone = lambda: step.f
of_one = lambda x: x


def broken():
    raise KeyError("no such checkpoint")


def picky(x):
    if x.shape != (3, 3):
        raise ValueError("x must be of 3 rows\\nand of 3 columns")
    return x


wrong_step = lambda: (picky, (jax.numpy.ones((2, 2)),))
divides = lambda: (lambda x: x / len(x[2:]) + 1 // x.ndim // 3 // (x.ndim - 2), (jax.numpy.ones((2, 2)),))


def powers(w, x, n, *, mode="sin"):
    loss = lambda w: sum(getattr(jax.numpy, mode)(x @ w).sum() ** i for i in range(n))
    return w - jax.grad(loss)(w)


arrays = jax.numpy.ones((8, 8)), jax.numpy.ones((64, 8)), 3
jit_options = dict(static_argnums=2, static_argnames="mode", donate_argnums=0)
static_jax = lambda: (jax.jit(powers, **jit_options), arrays)
static_nnx = lambda: (nnx.jit(powers, **jit_options), arrays)
static_memjax = lambda: (memjax.jit(powers, **jit_options), arrays)
unjitted = lambda: (powers, arrays)


class Trainer:
    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def step(self, w, x, n):
        return powers(w, x, n)


method = lambda: (Trainer().step, arrays)
partly = lambda: (functools.partial(static_jax()[0], mode="cos"), arrays)
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
placed = lambda: (jax.jit(lambda x: x + 1, out_shardings=sharding), (arrays[0],))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """With modules that have factories."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "lacks.py").write_text("import no_such_package")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('usage: ends.py CONFIG')")
    (tmp_path / "typo.py").write_text("def make(:")
    monkeypatch.syspath_prepend(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield tmp_path
    sys.modules.pop("factories", None)


def test_fit_makes_the_plan_of_the_step_with_its_donation(folder):
    step = STEPS["layers"]()
    budget = within(0.6, step)
    flags = f"fit factories:jitted --budget {budget}B --allow recompute --plan plan.json".split()
    command = [sys.executable, "-m", "memjax", *flags]
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = memjax.StepPlan.from_json((folder / "plan.json").read_text())
    assert plan == memjax.jit(step.f, budget=budget, allow=["recompute"], **step.options).plan(*step.args)
    (line,) = [line for line in done.stdout.splitlines() if "memjax.jit(step, " in line]
    assert (
        "donate_argnums=(0, 1), allow=('recompute',), plan=memjax.StepPlan.from_json(open('plan.json').read()))" in line
    )


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


def test_explain_prints_what_the_function_does(folder, capsys):
    step = STEPS["layers"]()
    assert run(["explain", "factories:make", "--trace", str(trace := folder / "memory.json")]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    found = capsys.readouterr().out
    assert found == f"{memjax.explain(step.f, *step.args)}\n"
    assert found.endswith(": step = memjax.jit(step, budget='40GiB')\n")


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
        ("fit factories:make --budget 50", "got '50': give '50GiB', '50%' or, for bytes, '50B'"),
        ("fit factories:make --allow magic", "allow must be one of 'recompute'"),
        ("fit factories:make --plan no/such/plan.json", "--plan must be in a folder that is there"),
        ("fit factories:make --plan .", "--plan must be a file that can be written, got '.'"),
        ("fit factories:make --picture frontier.txt", "--picture must end in .png, .pdf or .svg"),
        ("fit typo:make", "FACTORY must be in a module that can be imported; typo raises SyntaxError"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(command, said, capsys):
    assert run(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize(
    ("command", "said", "line"),
    [
        (
            "fit factories:broken",
            ["FACTORY must return (step, arguments)", "factories:broken raises KeyError"],
            "raise Key",
        ),
        (
            "fit ends:make",
            ["FACTORY must be in a module that can be imported; ends raises SystemExit: usage"],
            "sys.exit",
        ),
        # Its text is like that of memjax's own errors.
        ("explain factories:wrong_step", ["x must be of 3 rows", "  and of 3 columns"], "raise ValueError"),
        ("fit factories:divides", ["factories:divides must return a step", "raises ZeroDivisionError"], "divides = "),
    ],
)
def test_errors_of_the_users_code_are_told_with_their_place(command, said, line, capsys):
    assert run(command.split()) == 2
    message, _, place = capsys.readouterr().err.partition("In your code:")
    assert message.startswith("error: ")
    assert all(text in message for text in said)
    assert f"    {line}" in place
    assert "memjax" not in place


STATIC = "static_argnums=(2,), static_argnames=('mode',), donate_argnums=(0,), budget='device')"


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        ("static_jax", f"memjax.jit(powers, {STATIC}"),
        ("static_nnx", f"memjax.jit(powers, {STATIC}"),
        (
            "static_memjax",
            "memjax.jit(powers, static_argnums=2, static_argnames='mode', donate_argnums=0, budget='device')",
        ),
        ("method", "memjax.jit(train_step, static_argnums=(2,), donate_argnums=(0,), budget='device')"),
        ("partly", "memjax.jit(train_step, static_argnums=(2,), donate_argnums=(0,), budget='device')"),
        ("unjitted --static-argnums 2", "memjax.jit(powers, static_argnums=(2,), budget='device')"),
        ("placed", "memjax.jit(train_step, budget='device')  # and your out_shardings"),
    ],
)
def test_the_line_to_paste_keeps_the_options_of_the_step(factory, line, capsys):
    assert run(f"fit factories:{factory}".split()) == 0
    (pasted,) = [one for one in capsys.readouterr().out.splitlines() if "step = memjax.jit(" in one]
    assert pasted == f"In your program: step = {line}"
    ast.parse(pasted.partition(": ")[2])
    if factory != "placed":
        assert run(f"explain factories:{factory}".split()) == 0
        (pasted,) = [one for one in capsys.readouterr().out.splitlines() if "step = memjax.jit(" in one]
        assert pasted.endswith(f": step = {line.replace('device', '40GiB')}")


def test_a_plan_that_the_step_has_is_left_aside(folder, capsys):
    step = STEPS["layers"]()
    (folder / "plan.json").write_text(
        memjax.jit(step.f, budget=within(0.6, step), **step.options).plan(*step.args).to_json()
    )
    assert run(["fit", "factories:acting", "--budget", "1GiB"]) == 0
    found = capsys.readouterr().out
    assert "1.00 GiB, as it is written" in found
    assert "note: the step has a plan under memjax.jit(plan=), which is left aside" in found


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    command = f"{sys.executable} -m memjax explain factories:make | head -c 10"
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, shell=True
    )
    assert (len(done.stdout), done.stderr) == (10, "")


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.main() == 2
    assert "pip install 'memjax[explain]'" in capsys.readouterr().err
