"""Command lines: one frozen dataclass per experiment, parsed by tyro, saved as JSON in the run's folder.

The defaults of the flags come from a preset (`--preset cpu`, `--preset gpu`, or by what the machine has), or,
when a run is resumed or reported on, from its saved configuration. Explicit flags override them.
"""

import dataclasses
import json
import os
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import jax
import tyro


class ExperimentError(ValueError):
    """Something the user of an experiment can put right; shown without a traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags that decide where the defaults of all the others come from."""

    preset: Literal["auto", "cpu", "gpu"] = "auto"
    """Which defaults to start from. auto: by the machine."""
    name: str | None = None
    """Name of the run; its files are in RUNS_DIR/NAME. Default: the experiment and the time; with --resume or
    --report-only the newest such run."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a stopped or killed run from its newest checkpoint, with its saved configuration."""
    report_only: bool = False
    """Make the tables and plots of a run again, from its records."""
    distributed: bool = False
    """Start jax.distributed: one process per host, the cluster found by JAX or given in
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. RUNS_DIR must be shared by the hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(RunFlags):
    """What all training experiments share."""

    seed: int = 0
    """Seeds parameters, data order and dropout."""
    epochs: float = 10
    """Passes over the training data; a fraction is allowed."""
    batch_size: int = 64
    """Examples per optimizer step, over all devices and hosts."""
    accumulate: int = 1
    """Micro-batches per step: gradients are added up, memory is that of one micro-batch."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd: with Nesterov momentum."""
    learning_rate: float = 0.1
    """The highest learning rate."""
    warmup: float = 0.0
    """Share of the training in which the learning rate rises from 0, linearly."""
    schedule: Literal["step", "cosine"] = "step"
    """step: times 0.1 at each milestone. cosine: down to 0."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Where the step schedule drops, as fractions of the training."""
    momentum: float = 0.9
    """Nesterov momentum of SGD."""
    weight_decay: float = 1e-4
    """SGD: L2 penalty on all parameters, normalisation included, added to the gradient before the momentum. AdamW: its
    decoupled decay."""
    clip: float | None = None
    """Gradients of a larger global norm are scaled down to it. Default: 1 for adamw, and sgd takes them as they are."""
    workers: int = 0
    """Processes that read and decode files; 0: the main process does. Data that is in memory needs none."""
    log_every: int = 1
    """Steps between records in metrics.jsonl."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. Default: one per epoch."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""

    experiment: ClassVar[str]
    # A checkpoint fixes these: parameter shapes and the order of the data depend on them.
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = ("seed", "batch_size", "workers")

    def validate(self) -> None:
        """Raises ExperimentError for values that no experiment can run with."""
        for field in ("epochs", "batch_size", "accumulate", "log_every", "keep_checkpoints", "learning_rate"):
            if getattr(self, field) <= 0:
                raise ExperimentError(f"{_flag(field)} must be positive, got {getattr(self, field)}")
        for field in ("workers", "weight_decay", "seed"):
            if getattr(self, field) < 0:
                raise ExperimentError(f"{_flag(field)} must not be negative, got {getattr(self, field)}")
        if self.clip is not None and not self.clip > 0:
            raise ExperimentError(f"--clip must be positive, got {self.clip}")
        if not 0 <= self.warmup < 1:
            raise ExperimentError(f"--warmup must be in [0, 1), got {self.warmup}")
        if not 0 <= self.momentum < 1:
            raise ExperimentError(f"--momentum must be in [0, 1), got {self.momentum}")
        if self.checkpoint_every is not None and self.checkpoint_every <= 0:
            raise ExperimentError(f"--checkpoint-every must be positive, got {self.checkpoint_every}")
        if list(self.milestones) != sorted(set(self.milestones)) or not all(0 < m < 1 for m in self.milestones):
            raise ExperimentError(f"--milestones must rise between 0 and 1, got {self.milestones}")

    @property
    def folder(self) -> Path:
        assert self.name is not None  # parse() has filled it in
        return self.runs_dir / self.name


Config = typing.TypeVar("Config", bound=RunConfig)


def parse(presets: Mapping[str, Config], *, description: str, argv: Sequence[str]) -> Config:
    """The configuration that `argv` asks for.

    Args:
      presets: the defaults for "cpu" and "gpu".
      description: what `--help` says first.
      argv: the flags, without the program's name.

    Raises:
      ExperimentError: the values cannot be run with, or do not fit the run to resume.
      SystemExit: an unknown flag or a value of the wrong type, which tyro explains.
    """
    known = [flag for flag in argv if flag not in ("-h", "--help")]
    flags, _ = tyro.cli(RunFlags, args=known, return_unknown_args=True)
    preset: Literal["auto", "cpu", "gpu"]
    if flags.distributed:
        _join_cluster()
        if flags.name is None:
            raise ExperimentError("--distributed needs --name, so that all hosts write to one folder")
    if flags.resume or flags.report_only:
        kind = type(presets["cpu"])
        defaults = load(kind, _find_run(kind.experiment, flags))
        preset = defaults.preset
    else:
        preset = flags.preset if flags.preset != "auto" else _preset_of_machine()
        defaults = presets[preset]
    config = tyro.cli(type(defaults), default=defaults, args=list(argv), description=description)
    if config.preset not in ("auto", preset):
        raise ExperimentError(f"--preset {config.preset}, but the run to continue was started with {preset}")
    name = config.name or f"{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = dataclasses.replace(config, preset=preset, name=name)
    config.validate()
    return config


def save(config: RunConfig, path: Path) -> None:
    """Writes the configuration in one piece: a kill leaves the old file or the new one."""
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text(json.dumps(as_dict(config), indent=2) + "\n")
    os.replace(rewritten, path)


def as_dict(config: RunConfig) -> dict:
    """The configuration as JSON types."""
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(config).items()}
    return json.loads(json.dumps(plain))


def load(kind: type[Config], folder: Path) -> Config:
    """The configuration saved in the run's folder."""
    saved = json.loads((folder / "config.json").read_text())
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(saved) - known):
        raise ExperimentError(f"{folder / 'config.json'} has fields this version does not know: {unknown}")
    # The folder may have been moved since, and these two are what is asked for now, not then.
    moved = {"runs_dir": folder.parent, "name": folder.name, "resume": False, "report_only": False}
    return kind(**{key: _convert(hints[key])(value) for key, value in saved.items()} | moved)


def check_resumable(saved: Mapping, config: RunConfig, where: Path) -> None:
    """Raises ExperimentError if the checkpoint at `where`, made with `saved`, does not fit `config`."""
    asked = as_dict(config)
    for field in config.fixed_by_checkpoint:
        if saved.get(field) != asked[field]:
            raise ExperimentError(
                f"the checkpoint in {where} was made with {_flag(field)} {saved.get(field)}, not "
                f"{asked[field]}; leave the flag out to continue it, or start another run without --resume"
            )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _join_cluster() -> None:
    """JAX finds the cluster or reads the coordinator's address; these two numbers it does not."""
    numbers = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {argument: int(os.environ[name]) for argument, name in numbers.items() if name in os.environ}
    jax.distributed.initialize(**given)  # type: ignore[arg-type]


def _preset_of_machine() -> Literal["cpu", "gpu"]:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _find_run(experiment: str, flags: RunFlags) -> Path:
    what = "resume" if flags.resume else "report on"
    if flags.name is not None:
        folder = flags.runs_dir / flags.name
        if not (folder / "config.json").is_file():
            raise ExperimentError(f"nothing to {what}: {folder} has no config.json")
        return folder
    prefix = f"{experiment}-"
    runs = [p for p in flags.runs_dir.glob("*/config.json") if p.parent.name.startswith(prefix)]
    if not runs:
        raise ExperimentError(f"nothing to {what}: no run {prefix}* in {flags.runs_dir}/; give its --name")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


def _convert(hint) -> Callable:
    """How to make a JSON value into the type of a field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option, convert in ((Path, Path), (tuple, tuple)):
        if any(option in (o, typing.get_origin(o)) for o in options):
            return lambda value: None if value is None else convert(value)
    return lambda value: value
