"""Runs in processes of their own: killed, interrupted and resumed, bit for bit; two of which one cannot begin."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from experiments.harness.storage import records

ROOT = Path(__file__).parents[3]
FLAGS = [
    "--block-sizes",
    "1",
    "--growth-rate",
    "2",
    "--image-size",
    "8",
    "--epochs",
    "2",
    "--batch-size",
    "64",
]
FLAGS += ["--dropout-rate", "0.1", "--checkpoint-every", "6", "--no-compare"]
MEASURED = ("seconds", "examples_per_second", "memory_bytes")  # differ from run to run


def start(*argv, **more_env: str) -> subprocess.Popen:
    one_device = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": one_device, **more_env}
    command = [sys.executable, *argv]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def signal_at(process: subprocess.Popen, metrics: Path, step: int, number: int) -> str:
    """Sends the signal as soon as the records have reached the step; gives what the process said."""
    deadline = time.monotonic() + 60
    while not any(record["step"] >= step for record in records.read(metrics)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    return process.communicate(timeout=60)[0]


def curve(metrics: Path) -> list[dict]:
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in records.read(metrics)
        if record["kind"] != "start"
    ]


# Both in one process: what takes long is to import.
GO_ON_AND_TRAIN_ANEW = """
import json, sys
from experiments.densenet264 import PRESETS, make_task
from experiments.harness.main import run
sys.exit(any(run(PRESETS, make_task, description="", argv=argv) for argv in json.loads(sys.argv[1])))
"""


def test_killed_interrupted_and_resumed_equals_unbroken(tmp_path):
    script = "experiments/densenet264.py"
    common = ["--runs-dir", str(tmp_path), "--name"]
    metrics = tmp_path / "broken" / "metrics.jsonl"
    killed = start(script, *common, "broken", *FLAGS)
    signal_at(killed, metrics, 20, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL

    stopped = start(script, *common, "broken", "--resume")
    said = signal_at(stopped, metrics, 30, signal.SIGINT)
    assert stopped.returncode == 130, said
    assert re.search(r"Resuming at step \d+", said)
    command = re.search(r"^ *python (.*--resume.*)$", said, re.MULTILINE)
    assert command, said
    given, *resume = shlex.split(command[1])
    assert given == script

    both = start("-c", GO_ON_AND_TRAIN_ANEW, json.dumps([resume, [*common, "unbroken", *FLAGS]]))
    said = both.communicate(timeout=120)[0]
    assert both.returncode == 0, said
    expected = curve(tmp_path / "unbroken" / "metrics.jsonl")
    assert expected[-1]["step"] == 2 * (1437 // 64)
    assert curve(metrics) == expected


def start_two(flags: list[str], more_flags_of_second: list[str]) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    return [
        start(
            "experiments/densenet264.py",
            *flags,
            "--distributed",
            *more,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="0",  # both have to compile, or neither
        )
        for i, more in enumerate([[], more_flags_of_second])
    ]


def test_what_one_process_refuses_ends_both(tmp_path):
    (tmp_path / "file").touch()
    processes = start_two(["--runs-dir", str(tmp_path), "--name", "a", *FLAGS], ["--runs-dir", str(tmp_path / "file")])
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert "another process of this run has stopped" in said[0]
    assert f"cannot write {tmp_path / 'file'}" in said[1]
    assert not (tmp_path / "a" / "config.json").exists()


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def test_a_killed_run_takes_what_compiles_its_comparison_with_it(tmp_path):
    flags = [*FLAGS[:-1], "--epochs", "1000"]  # with the comparison
    run = start("experiments/densenet264.py", "--runs-dir", str(tmp_path), "--name", "a", *flags)
    said = ""
    while "another process compiles" not in said:
        said = run.stdout.readline()
        assert said
    children = children_of(run.pid)
    assert children
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
