"""Saves the rows of a benchmark with machine, versions, date and command, and runs cases in fresh processes."""

import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton", "torch", "torchao", "torchvision", "equinox", "diffrax")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    return ", ".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")).strip(", ")


def environment(*, on_cpu: bool = False) -> dict:
    """Machine, versions, date and command."""
    return {
        "accelerator": None if on_cpu else _accelerator(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {p: v for p in _PACKAGES if (v := _version(p)) is not None},
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", f"benchmarks.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def save(name: str, rows: list[dict], directory: pathlib.Path = RESULTS, *, on_cpu: bool = False) -> pathlib.Path:
    """Write `rows` with the environment they were measured in to `directory/name.json`.

    Args:
      on_cpu: whether everything ran on the CPU, also if the machine has GPUs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(on_cpu=on_cpu), "rows": rows}, indent=1) + "\n")
    return path


def mean_and_error(values: list[float], digits: int) -> str:
    """The mean, and its standard error if there is more than one value."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def in_fresh_process(module: str, case: dict, environ: dict[str, str] | None = None, timeout: float = 900) -> dict:
    """Run `python -m module --case JSON` and read the result from the last line it prints.

    Peak memory counters never go down within a process, and compilers cache: every case gets a process.
    """
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    root = pathlib.Path(__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path, **(environ or {})},
        )
    except subprocess.TimeoutExpired:
        return {**case, "error": f"took longer than {timeout:.0f} s"}
    if done.returncode:
        return {**case, "error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return {**case, **json.loads(done.stdout.strip().splitlines()[-1])}


def in_fresh_processes(
    module: str, cases: Sequence[dict], environ: dict[str, str] | None = None, timeout: float = 900, jobs: int = 1
) -> Iterator[tuple[dict, dict]]:
    """Each case and its result as it is there, `jobs` of them at once: for cases that measure no time."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(in_fresh_process, module, case, environ, timeout): case for case in cases}
        for done in concurrent.futures.as_completed(begun):
            yield begun[done], done.result()
