"""Several processes run one program, by the plan that the first one decides on."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

import memjax
from tests.jit import two_processes

PROGRAM = pathlib.Path(two_processes.__file__)


def run_in_two(folder, cache):
    """The program in two processes, with a device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environ = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    environ |= {"PYTHONPATH": str(PROGRAM.parents[2])}
    command = [sys.executable, str(PROGRAM), str(folder), str(cache), address, "2"]
    processes = [
        subprocess.Popen(
            [*command, str(i)], env=environ | {"PYTHONHASHSEED": str(i)}, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


def parameters(path):
    with np.load(path) as found:
        return [found[name] for name in found.files]


def test_two_processes_with_a_cache_train_bit_for_bit_as_one_without(tmp_path):
    cache = tmp_path / "cache"
    two_processes.main(tmp_path, "none", "", 1, 0)  # on two of the devices here
    run_in_two(tmp_path, cache)
    [file] = (tmp_path / "cache0").glob("*.json")
    before = file.stat().st_mtime_ns
    run_in_two(tmp_path, cache)  # by the plan on disk
    assert file.stat().st_mtime_ns == before
    assert not (tmp_path / "cache1").exists()
    expected = parameters(tmp_path / "0_of_1.npz")
    texts = [(tmp_path / f"{name}.json").read_text() for name in ("0_of_1", "0_of_2", "1_of_2")]
    assert texts[1] == texts[2]
    assert not any(memjax.StepPlan.from_json(text).as_written for text in texts)
    for i in (0, 1):
        for ours, one in zip(parameters(tmp_path / f"{i}_of_2.npz"), expected, strict=True):
            np.testing.assert_array_equal(ours, one)
        assert "budget is 1.00 KiB" in (tmp_path / f"{i}_of_2.txt").read_text()
