"""From a command line to a finished run: what every experiment's `main` calls."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax
from rich.console import Console

from experiments.harness.config import Config, parse
from experiments.harness.console import exit_status, output
from experiments.harness.loop.comparison import Comparison
from experiments.harness.loop.progress import waiting
from experiments.harness.loop.training import Trainer
from experiments.harness.task import Task


def run(
    presets: Mapping[str, Config],
    make_task: Callable[[Config], Task],
    *,
    description: str,
    argv: Sequence[str] | None = None,
    facts: Callable[[Config], dict[str, str]] = lambda config: {},
    extra_report: Callable[[Config, Console], None] = lambda config, console: None,
    instead: Callable[[Config, Console], bool] = lambda config, console: False,
    afterwards: Callable[[Config, Console], None] = lambda config, console: None,
) -> int:
    """Parses, trains, compares and reports; the result is the exit status.

    It is 0 if the run is complete, 130 if it was stopped and saved, 2 if the user has something to put right,
    which is then printed.

    Args:
      presets: default configurations for "cpu" and "gpu".
      make_task: what to train.
      description: of the command, for `--help`.
      argv: flags; by default those of the process.
      facts: more lines for the report.
      extra_report: more tables and plots after it.
      instead: does something else than training where the configuration asks for it, and says so by True.
      afterwards: what else to do after a complete training, in all processes, while the folder is still taken.
    """

    def body(flags: list[str]) -> int:
        config = parse(presets, description=description, argv=flags)
        console = output()
        if instead(config, console):
            return 0
        if not config.report_only:
            task = make_task(config)
            with (
                contextlib.closing(task.train_batches),
                Trainer(config, task, console) as trainer,
                Comparison(config, make_task, begins=bool(task.compare)) as comparison,
            ):
                console.print(config)
                if comparison.running:
                    console.print(f"For the table of memory another process compiles {', '.join(task.compare)}")
                if not trainer.train():
                    return 130
                if task.compare:
                    with waiting(console, "Waiting for the table of memory"):
                        compared = comparison.done()
                    if not compared:
                        trainer.measure()
                afterwards(config, console)
        if jax.process_index() == 0:
            # Not before: matplotlib takes a while to import, and a process that only compiles, or is stopped, does without.
            from experiments.harness.reports.report import report

            report(config.folder, console, facts(config))
            extra_report(config, console)
        return 0

    return exit_status(body, argv)
