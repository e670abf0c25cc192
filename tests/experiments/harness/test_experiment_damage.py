"""Runs whose folder is in use, damaged or full, and flags that are refused: nothing is lost, and errors say what to do."""

import dataclasses
import io
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import memjax
from experiments.densenet264 import PRESETS, make_task
from experiments.harness import files
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.interrupt import Interrupt
from experiments.harness.loop.step import init_state
from experiments.harness.main import run
from experiments.harness.reports import memory
from experiments.harness.storage import records
from experiments.harness.storage.checkpoints import Checkpoints

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
TINY = [
    "--block-sizes",
    "1",
    "--image-size",
    "8",
    "--growth-rate",
    "2",
    "--no-compare",
    "--checkpoint-every",
    "10",
]


def start(folder, *argv) -> int:
    return run(PRESETS, make_task, description="", argv=["--runs-dir", str(folder), "--name", "a", *argv])


def process(folder, *argv, shell: str = ":") -> subprocess.Popen:
    """A run, after a command of the shell in the same process."""
    command = [
        "sh",
        "-c",
        f'{shell}; exec "$@"',
        "sh",
        sys.executable,
        "experiments/densenet264.py",
        "--runs-dir",
        str(folder),
        "--name",
        "a",
        *argv,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=ENV, text=True, **pipes)


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# Checkpoints, without training


@pytest.fixture(scope="module")
def setting():
    config = dataclasses.replace(PRESETS["cpu"], name="a", block_sizes=(1, 1), growth_rate=2, image_size=8)
    task, rule = make_task(config), optax.sgd(0.1, momentum=0.9)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.jit(lambda: init_state(task.make_model, rule))()
    like = memory.placed(jax.eval_shape(lambda: init_state(task.make_model, rule)), one_device)
    return config, task, state, like


@pytest.fixture(scope="module")
def two_saved(setting, tmp_path_factory):
    """The folder of a run with checkpoints of steps 1 and 2."""
    config, task, state, _ = setting
    runs = tmp_path_factory.mktemp("runs")
    with Checkpoints(dataclasses.replace(config, runs_dir=runs), Console(quiet=True)) as checkpoints:
        for step in (1, 2):
            state = dataclasses.replace(state, step=state.step + 1)
            checkpoints.save(state, task.train_batches, step)
    return runs / "a"


def restored(setting, folder):
    """The step of the state found, or None, and what was said."""
    config, task, state, like = setting
    said = io.StringIO()
    console = Console(file=said, width=1000)
    with Checkpoints(dataclasses.replace(config, runs_dir=folder.parent), console) as checkpoints:
        found = checkpoints.restore(like, task.train_batches)
    if found is None:
        return None, said.getvalue()
    assert int(found.state.step) == found.step
    for a, b in zip(jax.tree.leaves(found.state.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    return found.step, said.getvalue()


def files_of(step: Path, pattern: str) -> list[Path]:
    """The largest first."""
    found = [path for path in step.glob(pattern) if path.is_file()]
    assert found
    return sorted(found, key=lambda path: -path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# Arrays meet every damage. Of the small files a flip is the hardest to notice.
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        *(("state/**/d/*", damage) for damage in (flip, cut, empty, Path.unlink)),
        *(("data/*.json", damage) for damage in (flip, Path.unlink)),
        *(("config/metadata", damage) for damage in (flip, cut)),
        *(("checksums/metadata", damage) for damage in (flip, empty, Path.unlink)),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(setting, two_saved, tmp_path, damage, pattern):
    folder = tmp_path / "a"
    shutil.copytree(two_saved, folder)
    for path in files_of(folder / "checkpoints" / "2", pattern):  # which of them hold the arrays is for Orbax to know
        damage(path)
    step, said = restored(setting, folder)
    assert step == 1
    assert f"{folder / 'checkpoints' / '2'} is damaged" in said
    assert "going on from step 1" in said
    assert (folder / "damaged" / "2.0" / "state").is_dir()
    assert restored(setting, folder) == (1, "")


def test_every_bit_of_the_arrays_counts(setting, two_saved, tmp_path):
    """A flip where there is no array changes none, and may go unnoticed."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(12):
        folder = tmp_path / str(i) / "a"
        shutil.copytree(two_saved, folder)
        paths = files_of(folder / "checkpoints" / "2", "state/**/d/*")
        path = paths[i % len(paths)]
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        found.append(restored(setting, folder)[0])  # compares the arrays
    assert 1 in found


def test_a_folder_that_was_renamed_to_a_later_step(setting, two_saved, tmp_path):
    folder = Path(shutil.copytree(two_saved, tmp_path / "a"))
    shutil.copytree(folder / "checkpoints" / "1", folder / "checkpoints" / "7")
    step, said = restored(setting, folder)
    assert step == 2
    assert "it was saved at step 1, and its folder was renamed" in said


def test_an_empty_folder_among_the_steps(setting, two_saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(two_saved, folder)
    (folder / "checkpoints" / "99").mkdir()
    step, said = restored(setting, folder)
    assert step == 2
    assert f"{folder / 'checkpoints' / '99'} is damaged" in said


def test_no_whole_checkpoint_is_an_error_that_changes_nothing(setting, two_saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(two_saved, folder)
    for step in ("1", "2"):
        for path in files_of(folder / "checkpoints" / step, "state/**/d/*"):
            empty(path)
    before = contents(folder)
    with pytest.raises(ExperimentError, match=r"no checkpoint in .* can be continued .* delete .*--name"):
        restored(setting, folder)
    assert contents(folder) == before


def test_checkpoints_without_checksums_are_said_to_be_unchecked(setting, two_saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(two_saved, folder)
    shutil.rmtree(folder / "checkpoints" / "2" / "checksums")
    step, said = restored(setting, folder)
    assert step == 2
    assert "not checked" in said


def test_folders_that_orbax_cannot_write_to_are_refused(tmp_path, capsys):
    assert start(tmp_path / "runs [v2]", *TINY) == 2
    assert "runs [v2]/a/checkpoints must have none of *?[" in capsys.readouterr().err


# A finished run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert start(folder, "--epochs", "1", *TINY) == 0
    measured = memjax.measure(lambda x: 2 * x, jax.ShapeDtypeStruct((3,), "float32"))
    memory.save(folder / "a" / "memory.json", {"a step": dataclasses.replace(measured, temp_bytes=1)})
    return folder / "a"


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--optimizer", "adamw"), "was made with --optimizer sgd, not adamw; leave the flag out"),
        (("--clip", "1"), "leave out flags that the run was not started with (--clip 1.0 (was None))"),
        (("--learning-rate", "nan"), "--learning-rate must be a finite number, got nan"),
        (("--learning-rate", "inf"), "--learning-rate must be a finite number, got inf"),
        (("--epochs", "nan"), "--epochs must be a finite number, got nan"),
        (("--epochs", "inf"), "--epochs must be a finite number, got inf"),
        (("--milestones", "nan"), "--milestones must be a finite number, got nan"),
        (("--batch-size", "128"), "was made with --batch-size 64, not 128"),
    ],
)
def test_a_refused_resume_changes_nothing(copied, capsys, flags, said):
    before = contents(copied)
    assert start(copied.parent, "--resume", *flags) == 2
    assert said in capsys.readouterr().err
    assert contents(copied) == before


def cut_in_half(path):
    path.write_text(path.read_text()[:-30])


def garble(path):
    path.write_bytes(b"\xff\x00{garbage}\n" + path.read_bytes())


def of_another_kind(path):
    path.write_text("[1, 2]\n")


def wrong_types(path):
    path.write_text('{"kind": 3, "epochs": "many"}\n')


def zeros(path):
    path.write_text('{"plain": {"temp_bytes": 0, "argument_bytes": 0, "compile_seconds": 0}}')


# What a kill leaves of records, the last line cut short, is no damage.
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["config.json", "memory.json"], [empty, cut_in_half, garble, of_another_kind, wrong_types]),
        ("memory.json", zeros),
        *itertools.product(["metrics.jsonl"], [empty, garble, of_another_kind, wrong_types]),
    ],
)
def test_damaged_files_of_a_run_are_named(copied, capsys, name, damage):
    damage(copied / name)
    before = contents(copied)
    assert start(copied.parent, "--report-only") == 2
    said = capsys.readouterr().err
    assert str(copied / name) in said
    assert "Traceback" not in said
    if name == "config.json":
        assert start(copied.parent, "--resume") == 2
        assert f"there is one in {copied / 'checkpoints'}" in capsys.readouterr().err
    if name == "metrics.jsonl" and damage is not empty:
        assert start(copied.parent, "--resume") == 2
        assert "delete this line" in capsys.readouterr().err
    assert contents(copied)[name] == before[name]


def test_a_folder_in_use_is_refused(copied, capsys):
    before = contents(copied)
    with files.locked(copied):
        assert start(copied.parent, "--resume") == 2
        assert f"{copied} is in use by another process" in capsys.readouterr().err
    assert contents(copied) == before


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = f"""
import time
from pathlib import Path
from experiments.harness import files
with files.locked(Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(100)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    with (
        pytest.raises(ExperimentError, match=f"is in use by another process \\({holder.pid} on "),
        files.locked(tmp_path),
    ):
        pass
    holder.kill()
    holder.communicate()
    with files.locked(tmp_path):
        pass


# Full disks and impatience


def test_records_on_a_full_disk():
    log = records.Records(Path("/dev/full"))
    with pytest.raises(ExperimentError, match=r"cannot write /dev/full: No space left on device; free some space"):
        log.append("train", 1, loss=1.0)
    log.close()


def test_what_is_written_in_one_piece_stays_if_the_disk_is_full(tmp_path):
    (tmp_path / "a.json").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ExperimentError, match=r"cannot write .*a\.json: File too large; free some space"):
            files.write_text(tmp_path / "a.json", 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_checkpoints_on_a_full_disk(copied):
    """Files can have 4 kB: enough for everything but a checkpoint's arrays and, later, records."""
    kept = contents(copied / "checkpoints")
    full = process(copied.parent, "--resume", "--epochs", "2", "--log-every", "100", shell="ulimit -f 8")
    said = full.communicate(timeout=100)[0]
    assert full.returncode == 2, said
    assert "Error: cannot write" in said
    assert "free some space" in said
    assert "Traceback" not in said
    assert contents(copied / "checkpoints").items() >= kept.items()
    assert all(record["step"] <= 22 for record in records.read(copied / "metrics.jsonl", "train"))


def test_a_second_interrupt_stops_at_once_and_a_resume_goes_on(copied):
    before = records.read(copied / "metrics.jsonl")
    run = process(copied.parent, "--resume", "--epochs", "100")
    line = ""
    for wanted in ("Resuming", "Stopping"):  # both while it compiles, which takes longer than this
        while wanted not in line:
            line = run.stdout.readline()
            assert line, run.wait()
        run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=100)[0]
    assert run.returncode == 130, said
    assert "Stopped at once" in said
    assert "Traceback" not in said
    assert start(copied.parent, "--resume", "--epochs", "1") == 0
    assert records.read(copied / "metrics.jsonl") == before


def test_a_second_interrupt_that_a_library_makes_an_error_of_its_own_is_still_one():
    def interrupted_twice():
        with Interrupt(Console(file=io.StringIO())) as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise SystemError("a result with an exception set") from error

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            interrupted_twice()
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(raised.value.__cause__, SystemError)
