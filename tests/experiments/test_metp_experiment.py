import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import metp
from experiments.harness.storage import records
from experiments.parallelism import comparison
from experiments.parallelism.trial import Trial

ROOT = Path(__file__).parents[2]
SMALL = ["--length", "64", "--dim", "16", "--layers", "1", "--steps", "2", "--batch-size", "1", "--preset", "cpu"]
SMALL += ["--compare-lengths", "64"]


def _losses(folder):
    return [record["loss"] for record in records.read(folder / "metrics.jsonl", "train")]


def test_two_processes_train_as_one_does(tmp_path):
    """A ring of four devices over two real processes, by the collectives that CPUs have; of eight in one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [*SMALL, "--runs-dir", str(tmp_path), "--name", "two", "--distributed", "--compare", "ring"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # both have to compile, or neither
    }
    command = [sys.executable, str(ROOT / "experiments/metp.py"), *flags]
    processes = [
        subprocess.Popen(command, env={**environ, "JAX_PROCESS_ID": str(i)}, stderr=subprocess.PIPE, text=True)
        for i in (0, 1)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=400) == 0, process.stderr.read()
    finally:
        for process in processes:
            process.kill()
            process.stderr.close()
    assert metp.main([*SMALL, "--runs-dir", str(tmp_path), "--name", "one", "--compare", "tp_sp"]) == 0
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-4)
    assert (tmp_path / "one/parallelisms.png").stat().st_size > 1000


def test_memory_is_spent_while_there_is_enough():
    config = dataclasses.replace(metp.PRESETS["cpu"], name="x", ring=2, dim=64, layers=1, batch_size=4, spend="auto")
    fastest = Trial.fitting(config, "metp", 512)  # nothing limits it here
    assert fastest.config.spend == "memory"
    smallest = Trial.fitting(config, "metp", 512, limit=fastest.bytes - 1)
    assert smallest.config.spend == "time"
    assert fastest.bytes > 1.1 * smallest.bytes
    text = np.arange(2000, dtype=np.uint8)
    found = comparison.try_steps(config, "metp", 512, text, steps=1, limit=fastest.bytes - 1)
    assert found["spent"] == "time"


def test_longest_sequence_is_bisected(monkeypatch):
    """Real steps of what fits into a limit, by what the compiled step takes."""
    config = dataclasses.replace(
        metp.PRESETS["cpu"], name="x", memory_limit=1, ring=8, dim=32, layers=1, batch_size=1, longest=4096
    )
    tried, real = {}, comparison.try_steps

    def watched(config, name, length, *args, **options):
        tried[length] = real(config, name, length, *args, **options)
        return tried[length]

    monkeypatch.setattr(comparison, "try_steps", watched)
    found = comparison.find_longest(config, "tp", np.arange(1000, dtype=np.uint8))
    failed = min(length for length, result in tried.items() if result is None)
    assert found < failed <= found + 16
    assert tried[found]["bytes"] <= 2**20 < Trial(config, "tp", failed).bytes
    assert tried[found]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ring", "3"], "--ring 3 does not divide the 8 devices"),
        (["--length", "100"], "--length must be multiples of twice the ring, 16"),
        (["--heads", "4"], "--heads must be a multiple of the ring"),
        (["--compare", "dp"], "--compare takes metp, tp, tp_sp, ulysses, ring"),
        (["--dim", "60"], "--dim must be a multiple of twice --heads, 16, got 60"),
        (["--steps", "-1"], "--steps must be at least 0, got -1"),
        (["--resume", "--name", "missing"], "nothing to resume"),
    ],
)
def test_flags_that_do_not_fit_are_explained(flags, message, tmp_path, capsys):
    assert metp.main([*flags, "--runs-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
