"""Command lines: one frozen dataclass per experiment, parsed by tyro, saved as JSON in the run's folder.

The defaults of the flags come from a preset (`--preset cpu`, `--preset gpu`, or by what the machine has), or,
when a run is resumed or reported on, from its saved configuration. Explicit flags override them.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import jax
import tyro

from experiments.harness import files
from experiments.harness.errors import ExperimentError


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
    # A checkpoint fixes these: parameter shapes, the optimizer's state and the order of the data depend on them.
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = ("seed", "batch_size", "workers", "optimizer")
    may_be_infinite: ClassVar[tuple[str, ...]] = ()

    def validate(self) -> None:
        """Raises ExperimentError for values that no experiment can run with."""
        for field, value in vars(self).items():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, float) and not (math.isfinite(one) or (one > 0 and field in self.may_be_infinite)):
                    raise ExperimentError(f"{_flag(field)} must be a finite number, got {one}")
        if self.name is not None and ("/" in self.name or self.name in (".", "..")):
            raise ExperimentError(f"--name must be the name of a folder in --runs-dir, got {self.name!r}")
        if self.seed >= 2**31:
            raise ExperimentError(f"--seed must be less than 2**31, got {self.seed}")
        if self.workers > 1000:
            raise ExperimentError(f"--workers must be at most 1000, got {self.workers}")
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
    files.write_text(path, json.dumps(as_dict(config), indent=2) + "\n")


def as_dict(config: RunConfig) -> dict:
    """The configuration as JSON types."""
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(config).items()}
    return json.loads(json.dumps(plain))


def load(kind: type[Config], folder: Path) -> Config:
    """The configuration saved in the run's folder.

    Raises:
      ExperimentError: it is damaged, or of another version.
    """
    path = folder / "config.json"
    fix = f"put back a copy{_copy_in_checkpoints(folder)}, or start another run"
    saved = files.read_json(path, dict, fix)
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(saved) - known):
        raise ExperimentError(f"{path} has fields that this version does not know ({', '.join(unknown)}): {fix}")
    # The folder may have been moved since, and these two are what is asked for now, not then.
    moved = {"runs_dir": folder.parent, "name": folder.name, "resume": False, "report_only": False}
    values = {}
    for key, value in saved.items():
        try:
            values[key] = _converted(hints[key], value)
        except TypeError:
            raise ExperimentError(f"{path} is damaged ({key} cannot be {value!r}): {fix}") from None
    return kind(**values | moved)


def check_resumable(saved: Mapping, config: RunConfig, where: Path) -> None:
    """Raises ExperimentError if the checkpoint at `where`, made with `saved`, does not fit `config`."""
    asked = as_dict(config)
    for field in config.fixed_by_checkpoint:
        if saved.get(field) != asked[field]:
            raise ExperimentError(
                f"the checkpoint in {where} was made with {_flag(field)} {saved.get(field)}, not "
                f"{asked[field]}; leave the flag out to continue it, or start another run without --resume"
            )


def changed_flags(saved: Mapping, config: RunConfig) -> list[str]:
    """The flags, with their values, in which `config` differs from a saved one."""
    asked = as_dict(config)
    of_the_call = {field.name for field in dataclasses.fields(RunFlags)}
    changed = [field for field in asked if field not in of_the_call and asked[field] != saved.get(field)]
    return [f"{_flag(field)} {asked[field]} (was {saved.get(field)})" for field in changed]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _join_cluster() -> None:
    """JAX finds the cluster or reads the coordinator's address; these two numbers it does not."""
    numbers = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {}
    for argument, name in numbers.items():
        if name in os.environ:
            if not os.environ[name].isdecimal():
                raise ExperimentError(f"{name} must be a number, got {os.environ[name]!r}")
            given[argument] = int(os.environ[name])
    try:
        jax.distributed.initialize(**given)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise ExperimentError(
            f"--distributed found no cluster ({error}): set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error


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


def _copy_in_checkpoints(folder: Path) -> str:
    """Where a copy of the configuration is, in words, if it is anywhere."""
    copies = folder.glob("checkpoints/*/config/metadata")
    newest = max(copies, key=lambda path: path.stat().st_mtime, default=None)
    return "" if newest is None else f" (there is one in {newest})"


def _converted(hint: typing.Any, value: typing.Any) -> typing.Any:
    """A JSON value as the type of a field. Raises TypeError if it is none of that type."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        for option in options:
            with contextlib.suppress(TypeError):
                return _converted(option, value)
    elif typing.get_origin(hint) is Literal and value in options:
        return value
    elif typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_converted(options[0], one) for one in value)  # all tuples here are of one type
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif (hint is float and type(value) in (int, float)) or (
        hint in (bool, int, str, types.NoneType) and type(value) is hint
    ):
        return value
    raise TypeError
