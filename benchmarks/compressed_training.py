"""Networks trained with and without compressed activations: `python -m benchmarks.compressed_training`, minutes on GPUs.

`experiments/compressed_training.py` with its defaults for GPUs (crops of photographs, 16 classes, batches of 256), for each
network and seed both ways, several side by side. It measures accuracies, the size of float32 over the size of codes, mean over
training, and the standard deviation of the error of each layer's gradient, beside the predicted one.

`--models resnet18 --seeds 1 --flags="--width 0.25 --epochs 0.1 --batch-size 32"` tries it anywhere.
"""

import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tyro

from benchmarks import record
from experiments.harness.storage import records

_ROOT = pathlib.Path(__file__).parent.parent
# Options that differ from the experiment's defaults. Without batch norms gradients are now and then so large that training has
# to begin anew: they are clipped. Wider steps have smaller codes, but errors of first layers larger than predicted.
RECIPES: dict[str, dict[str, float]] = {
    "alexnet": {"clip": 1.0},
    "vgg16": {"learning_rate": 0.02, "clip": 1.0},
    "resnet18": {"coarsest": 0.75},
    "resnet50": {},
}


@dataclasses.dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = ("vgg16", "resnet50", "resnet18", "alexnet")
    seeds: int = 3
    first_seed: int = 0
    parallel: int = 8
    """Number of runs side by side on each GPU."""
    plain: bool = True
    """Whether networks are trained without compression, too. The results do not depend on the codec."""
    gpus: int = 1
    flags: str = ""
    """More flags of the experiment."""
    time_limit: float = 900.0
    """Start nothing after this many seconds, and stop what runs 60 seconds later."""
    name: str = "compressed_training"


def main(config: Config) -> None:
    begin, rows = time.monotonic(), []
    runs = pathlib.Path(tempfile.mkdtemp())
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(config.gpus)))).split(",")
    if len(gpus) < config.gpus:
        raise SystemExit(f"--gpus {config.gpus} is more than CUDA_VISIBLE_DEVICES has: {','.join(gpus)!r}.")

    def run(place: int, model: str, seed: int, is_compressed: bool) -> None:
        left = config.time_limit - (time.monotonic() - begin)
        if left < 0:
            return
        name = f"{model}-{seed}-{'compressed' if is_compressed else 'plain'}"
        flags = ["--name", name, "--runs-dir", str(runs), "--model", model, "--seed", str(seed), "--window", "1000000"]
        flags += [
            word for flag, value in RECIPES[model].items() for word in (f"--{flag.replace('_', '-')}", str(value))
        ]
        flags += shlex.split(config.flags)
        flags += [] if is_compressed else ["--no-compress"]
        row = {"model": model, "seed": seed, "compressed": is_compressed}
        try:
            subprocess.run(
                [sys.executable, "experiments/compressed_training.py", *flags],
                cwd=_ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=left + 60,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                    "JAX_COMPILATION_CACHE_DIR": str(runs / "compiled"),
                    **({"CUDA_VISIBLE_DEVICES": gpus[place % config.gpus]} if config.gpus > 1 else {}),
                },
            )
            row |= _results(runs / name)
        except subprocess.CalledProcessError as error:
            row["error"] = (error.stderr or error.stdout).strip()[-300:]
            seen = records.read(runs / name / "metrics.jsonl", "train")[-3:]
            row["last"] = [{key: one.get(key) for key in ("step", "loss", "replays")} for one in seen]
        except subprocess.TimeoutExpired:
            row["error"] = "no time left"
        rows.append(row | {"seconds": round(time.monotonic() - begin, 1)})
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "layers"}), flush=True)
        record.save(config.name, rows)

    # All seeds share compiled programs. What takes longest begins first.
    ways = (True, False) if config.plain else (True,)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    cases = [(m, s, c) for s in seeds for c in ways for m in config.models]
    with ThreadPoolExecutor(config.parallel * config.gpus) as pool:
        list(pool.map(lambda case: run(case[0], *case[1]), enumerate(cases)))


def _results(folder: pathlib.Path) -> dict:
    train, test = (records.read(folder / "metrics.jsonl", kind) for kind in ("train", "test"))
    row = {"steps": train[-1]["step"], "top1": test[-1]["top1"]}
    if "ratio" not in train[-1]:
        return row
    # The mean size of codes decides, not the mean ratio.
    row["ratio"] = len(train) / sum(1 / step["ratio"] for step in train)
    layers = json.loads((folder / "analysis.json").read_text())["rows"]
    ratios = np.array([layer["predicted"] / layer["measured"] for layer in layers])
    row["predicted_over_measured"] = [float(ratios.min()), float(np.median(ratios)), float(ratios.max())]
    kept = ("layer", "bound", "predicted", "measured", "within_sigma")
    row["layers"] = [{key: layer[key] for key in kept} for layer in layers]
    bits = np.mean([step["bits"] for step in train], 0)
    row["bits_by_array"] = [round(float(b), 3) for b in bits]
    return row


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
