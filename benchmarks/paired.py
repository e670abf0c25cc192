"""Does compression cost a Transformer its loss? `python -m benchmarks.paired gpt`, or `vit`: many seeds, trained side by side.

The experiment of that name with eight seeds, whose losses, errors of gradients and bytes are saved. On an H100, with 10M
parameters, the ViT takes four minutes, the GPT more than six; `--preset cpu` takes ten to twenty on two cores.
"""

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from benchmarks import record
from experiments import gpt, vit
from experiments.harness import config as configuration
from experiments.harness import files
from experiments.harness.main import run
from experiments.harness.storage import records
from experiments.paired.report import paired_report, summary

_EXPERIMENTS: dict[str, tuple[Any, Any]] = {"gpt": (gpt, gpt.GPTConfig), "vit": (vit, vit.ViTConfig)}


@dataclasses.dataclass(frozen=True)
class Config:
    experiment: Annotated[Literal["gpt", "vit"], tyro.conf.Positional]
    preset: Literal["auto", "cpu", "gpu"] = "auto"
    seeds: int = 8
    epochs: float | None = None
    """Default: the preset's."""
    bits: tuple[int, ...] = (8, 4)
    sigma: float | None = None
    """Train another with bits for each array, chosen for this error of gradients."""
    pictures: Path | None = None
    """Keep the run, with its pictures, in this folder."""
    name: str = "paired"
    """Results are saved as NAME_EXPERIMENT_PRESET."""


def main(config: Config) -> None:
    module, kind = _EXPERIMENTS[config.experiment]
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if config.pictures is None else str(config.pictures)
        flags = [
            "--runs-dir",
            folder,
            "--name",
            config.experiment,
            "--preset",
            config.preset,
            "--seeds",
            str(config.seeds),
        ]
        flags += ["--bits", *map(str, config.bits)]
        flags += [] if config.sigma is None else ["--sigma", str(config.sigma)]
        flags += [] if config.epochs is None else ["--epochs", str(config.epochs)]
        status = run(module.PRESETS, module.make_task, description="", argv=flags, extra_report=paired_report)
        if status:
            sys.exit(status)
        of_run = configuration.load(kind, Path(folder) / config.experiment)
        rows = _rows(of_run)
    print(record.save(f"{config.name}_{config.experiment}_{of_run.preset}", rows))


def _rows(config: Any) -> list[dict]:
    """A row for each kind of training."""
    analysis = files.read_json(config.folder / "analysis.json", dict, "run it again")
    train = records.read(config.folder / "metrics.jsonl", "train")
    start = records.read(config.folder / "metrics.jsonl", "start")[-1]
    plain = sum(row["bytes"] for row in analysis["bytes"] if row["kind"] == "plain")
    rows = []
    for row, bits in zip(summary(config), config.kinds, strict=True):
        errors = [r for r in analysis["errors"] if r["bits"] == bits]
        row |= {
            "model": config.experiment,
            "device": jax.devices()[0].device_kind,
            "parameters": start["parameters"] // (config.seeds * len(config.kinds)),
            "steps": train[-1]["step"],
            "dtype": config.dtype,
            "bytes_share": sum(r["bytes"] for r in analysis["bytes"] if r["kind"] == row["kind"]) / plain,
        }
        if errors:
            ratios = [r["predicted"] / r["measured"] for r in errors if r["measured"]]
            row |= {
                "gradient_error_median": statistics.median(r["measured"] for r in errors),
                "gradient_error_largest": max(r["measured"] for r in errors),
                "predicted_within_20_percent": statistics.mean(abs(ratio - 1) < 0.2 for ratio in ratios),
                "layers": len(ratios),
            }
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
