"""The experiment of plans: a tiny run, its files, and bad flags."""

import json

import pytest

from experiments.plan import main

TINY = ["--batch-size", "2", "--runs", "1", "--points", "1"]
MODELS = [
    *(
        "--transformer.layers",
        "1",
        "--transformer.dim",
        "16",
        "--transformer.hidden",
        "32",
        "--transformer.length",
        "16",
    ),
    *("--transformer.vocabulary", "32", "--resnet.blocks", "1", "--resnet.image-size", "16", "--resnet.classes", "4"),
]


@pytest.mark.parametrize(("name", "budgets", "count"), [("transformer", [], 2), ("resnet", ["--budgets", "min"], 1)])
def test_a_run_explains_and_plans_a_model(tmp_path, capsys, name, budgets, count):
    argv = ["--runs-dir", str(tmp_path), "--name", "a", "--models", name, *budgets, *TINY, *MODELS]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "Kept between the passes" in shown
    assert f"{name}: temporary memory of one step" in shown
    for kind in ("explained.json", "explained.png", "plans.png"):
        assert (tmp_path / "a" / f"{name}_{kind}").stat().st_size > 1000
    ((model, (unchanged, *plans)),) = json.loads((tmp_path / "a" / "plans.json").read_text()).items()
    assert model == name
    assert unchanged["milliseconds"] > 0
    assert len(plans) == count
    for row in plans:
        assert row["compiled_bytes"] <= row["budget"]
        assert row["plan"]["compiled_nbytes"] <= row["budget"]
    assert main(argv) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budgets", "lots"], "--budgets must be a number of bytes"),
        (["--budgets", "1B", "--models", "transformer", *TINY, *MODELS], "the least possible is"),
        (["--points", "0"], "--points must be at least 1"),
        (["--models"], "--models must name at least one"),
        (["--transformer.layers", "0"], "--transformer.layers must be positive"),
        (["--transformer.dim", "10"], "--transformer.dim: expected a multiple of"),
        (["--resnet.blocks", "0"], "--resnet.blocks must be positive"),
    ],
)
def test_bad_flags_are_errors_that_name_them(tmp_path, capsys, flags, message):
    assert main(["--runs-dir", str(tmp_path), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_unknown_flags_are_refused(tmp_path):
    with pytest.raises(SystemExit):
        main(["--runs-dir", str(tmp_path), "--budget-of", "3"])
