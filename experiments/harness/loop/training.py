"""The training loop: compile, train, evaluate, record, checkpoint, stop and resume."""

import contextlib
import functools
import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console

import memjax
from experiments.harness import config as configuration
from experiments.harness import devices
from experiments.harness.config import RunConfig
from experiments.harness.errors import ExperimentError
from experiments.harness.loop.interrupt import Interrupt
from experiments.harness.loop.optimizer import learning_rate, optimizer
from experiments.harness.loop.progress import Display, memory_in_use, waiting
from experiments.harness.loop.step import Sums, TrainState, eval_step, init_state, train_step
from experiments.harness.reports import memory
from experiments.harness.storage import folder, records
from experiments.harness.storage.checkpoints import Checkpoints, Restored
from experiments.harness.task import Task


class Trainer:
    """A context with one run of a task, from the start or, with `config.resume`, from the newest checkpoint.

    Inside it no other process can write to the run's folder.

    Raises:
      ExperimentError: the batch does not divide over the devices, the folder cannot be written, is in use or holds a run
        already, its records are damaged, or the checkpoint is of another architecture. All before anything is compiled,
        and before any file of the run is changed.
    """

    def __init__(self, config: RunConfig, task: Task, console: Console):
        self._config, self._task, self._console = config, task, console
        self._mesh = task.layout.mesh
        devices.check_batch(config.batch_size, config.accumulate, self._mesh)
        self._epoch_steps = task.train_examples // config.batch_size
        if self._epoch_steps == 0:
            raise ExperimentError(
                f"--batch-size {config.batch_size} is more than the {task.train_examples} training examples"
            )
        self._total_steps = task.steps or max(1, round(config.epochs * self._epoch_steps))
        if self._total_steps >= 2**31:
            raise ExperimentError(
                f"--epochs {config.epochs:g} are more than 2**31 steps of --batch-size {config.batch_size}"
            )
        make_optimizer = task.optimizer or functools.partial(optimizer, config)
        self._optimizer = make_optimizer(self._total_steps)
        self._batch = memory.placed(task.batch, task.layout.batch)

    def __enter__(self) -> "Trainer":
        config = self._config
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder.taken(config))
            with devices.refusing_together():
                records.read(self._records)
            self._checkpoints = stack.enter_context(Checkpoints(config, self._console))
            self._checkpoints.check()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._console.print("Stopped at once. To go on from the newest checkpoint, if there is one:")
            self._console.print(f"  {self._resume_command()}", soft_wrap=True)
        self._open.close()

    def train(self) -> bool:
        """Trains to the end. False if asked to stop before: then all is saved, and it has said how to resume.

        Raises:
          ExperimentError: the loss is no longer finite, or an image cannot be read.
        """
        with Interrupt(self._console) as interrupt:
            with waiting(self._console, "Restoring" if self._config.resume else "Initialising"):
                state, done = self._begin()
            if self._config.resume:
                self._console.print(f"Resuming at step {done}" if done else "No checkpoint yet: starting again")
            if done < self._total_steps:
                done = self._train_from(state, done, interrupt)
            del state  # its memory may be needed for what comes next
            self._checkpoints.wait()
        if done < self._total_steps:
            self._console.print(f"Stopped at step {done} of {self._total_steps}. To go on:")
            self._console.print(f"  {self._resume_command()}", soft_wrap=True)
        return done >= self._total_steps

    def measure(self) -> None:
        """Compiles the training steps of `task.compare` at this run's shapes; writes memory.json."""
        found = {}
        for name, make_model in self._task.compare.items():
            with waiting(self._console, f"Compiling {name} to compare its memory"):
                state = self._abstract_state(make_model)
                found[name] = memory.measure(self._jitted(make_model, state), state, self._batch)
        if jax.process_index() == 0:
            memory.save(self._config.folder / "memory.json", found)

    def _begin(self) -> Restored:
        """The state to go on from. From here on the run's configuration is this one."""
        restored = self._restored() if self._config.resume else None
        if restored is None:
            init = functools.partial(init_state, self._task.make_model, self._optimizer)
            shardings = self._state_shardings(jax.eval_shape(init))
            state = jax.jit(init, out_shardings=shardings, compiler_options=memory.quick_compile())()
            restored = Restored(jax.block_until_ready(state), 0)
        if jax.process_index() == 0:
            configuration.save(self._config, self._config.folder / "config.json")
        return restored

    def _restored(self) -> Restored | None:
        return self._checkpoints.restore(self._abstract_state(self._task.make_model), self._task.train_batches)

    def _train_from(self, state: TrainState, start: int, interrupt: Interrupt) -> int:
        task, console = self._task, self._console
        with waiting(console, "Compiling the training step"):
            begin = time.perf_counter()
            if task.compile_step is None:
                compiled = self._compiled(state)
            else:
                compiled = task.compile_step(self._step(task.make_model), **self._jit_options(state))
            compile_seconds = time.perf_counter() - begin
        evaluate = None
        if task.test_batches is not None:
            assert task.test_loss is not None
            with waiting(console, "Compiling the evaluation step"):
                evaluation = jax.jit(eval_step(task.make_model, task.test_loss), out_shardings=self._replicated)
                evaluate = evaluation.lower(state, self._batch).compile()

        path = self._records
        if jax.process_index() == 0:
            records.keep_until(path, start)
        else:
            path = Path(os.devnull)
        with contextlib.closing(records.Records(path)) as log:
            log.append(
                "start",
                start,
                compile_seconds=compile_seconds,
                parameters=task.count_parameters(state.params),
                devices=self._mesh.size,
                device=jax.devices()[0].device_kind,
                jax=jax.__version__,
                **({"step_bytes": devices.step_bytes(compiled)} if task.compile_step is None else {}),
            )
            return self._loop(state, start, compiled, evaluate, log, interrupt)

    def _loop(
        self,
        state: TrainState,
        start: int,
        train: Callable,
        evaluate: Callable | None,
        log: records.Records,
        interrupt: Interrupt,
    ) -> int:
        config, total = self._config, self._total_steps
        checkpoint_every = config.checkpoint_every or self._epoch_steps
        rate = learning_rate(config, total)
        logged, clock = start, time.perf_counter()
        with (
            Display(self._console, total_steps=total, start=start) as display,
            contextlib.ExitStack() as at_the_end,
        ):
            for step in range(start + 1, total + 1):
                state, sums = train(state, self._put(next(self._task.train_batches)))
                if self._simulated:
                    jax.block_until_ready((state, sums))
                if step == start + 1 and gc.isenabled():
                    # What tracing made are millions of objects. The collector would look through them all now and then,
                    # which takes it longer than steps do. Nor is it asked to once before, for that takes seconds, too.
                    # Where it is off, what is frozen is the caller's, and stays so.
                    gc.freeze()
                    at_the_end.callback(gc.unfreeze)
                evaluating = step % self._epoch_steps == 0 or step == total
                stopping = self._asked_to_stop(interrupt, step)
                saving = step % checkpoint_every == 0 or step == total or stopping
                logging = step % config.log_every == 0 or evaluating
                if logging or saving:
                    state = self._task.settle(state)
                if logging:
                    means = _means(sums)  # waits for the device
                    if not math.isfinite(means["loss"]):
                        raise ExperimentError(
                            f"the loss is {means['loss']} at step {step}; try a lower --learning-rate than "
                            f"{config.learning_rate}"
                        )
                    seconds = time.perf_counter() - clock
                    speed = (step - logged) * config.batch_size / seconds
                    log.append(
                        "train",
                        step,
                        epoch=step / self._epoch_steps,
                        **means,
                        **self._task.observe(state),
                        learning_rate=float(rate(step - 1)),
                        seconds=seconds,
                        examples_per_second=speed,
                        memory_bytes=memory_in_use(),
                    )
                    display.step(step, loss=means["loss"], examples_per_second=speed)
                    logged, clock = step, time.perf_counter()
                if evaluating and evaluate is not None:
                    means = self._evaluate(evaluate, state)
                    log.append("test", step, epoch=step / self._epoch_steps, **means)
                    in_words = "  ".join(f"{name} {value:.4g}" for name, value in means.items())
                    display.message(f"epoch {step / self._epoch_steps:.3g}  test  {in_words}")
                if saving:
                    self._checkpoints.save(state, self._task.train_batches, step)
                if stopping:
                    return step
                if evaluating:
                    clock = time.perf_counter()
        self._task.finish(state)
        return total

    def _evaluate(self, evaluate: Callable, state: TrainState) -> dict[str, float]:
        totals: dict[str, float] = {}
        assert self._task.test_batches is not None
        for batch in self._task.test_batches():
            for name, value in evaluate(state, self._put(batch)).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return _means(totals)

    def _asked_to_stop(self, interrupt: Interrupt, step: int) -> bool:
        if jax.process_count() == 1:
            return interrupt.requested
        # All hosts have to stop at the same step; agreeing on it at each would hold them up.
        return step % self._config.log_every == 0 and interrupt.on_any_host()

    @property
    def _records(self) -> Path:
        return self._config.folder / "metrics.jsonl"

    @property
    def _replicated(self) -> jax.sharding.NamedSharding:
        return devices.replicated(self._mesh)

    @property
    def _simulated(self) -> bool:
        """Whether devices are threads of a CPU, of which there are as many as cores.

        Two programs at a time may each hold some of them while their collectives wait for the others, for ever.
        """
        return jax.default_backend() == "cpu" and self._mesh.size > 1

    def _put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return devices.put(batch, self._task.layout.batch, self._task.batch)

    def _step(self, make_model: Callable[[], nnx.Module]) -> Callable:
        task = self._task
        mesh = self._mesh if task.by_device and self._mesh.size > 1 else None
        return train_step(
            make_model, task.loss, self._optimizer, self._config.accumulate, mesh, scale=task.scale_gradient
        )

    def _state_shardings(self, state: TrainState):
        """A sharding for every array of the state, or one for all."""
        of_state = self._task.layout.state
        return self._replicated if of_state is None else of_state(state)

    def _jit_options(self, state: TrainState) -> dict:
        sharded = self._task.layout.state is not None
        shardings = (self._state_shardings(state), self._replicated) if sharded else self._replicated
        return {"out_shardings": shardings, "compiler_options": memjax.remat_compiler_options()}

    def _jitted(self, make_model: Callable[[], nnx.Module], state: TrainState):
        return jax.jit(self._step(make_model), donate_argnums=0, **self._jit_options(state))

    def _compiled(self, state: TrainState) -> Any:
        """The step of the first model that fits on the devices, or of the last."""
        for make_model in (self._task.make_model, *self._task.smaller_models):
            compiled = self._jitted(make_model, state).lower(state, self._batch).compile()
            if not self._task.smaller_models or devices.fits(compiled):
                break
        return compiled

    def _abstract_state(self, make_model: Callable[[], nnx.Module]) -> TrainState:
        shapes = jax.eval_shape(functools.partial(init_state, make_model, self._optimizer))
        return memory.placed(shapes, self._state_shardings(shapes))

    def _resume_command(self) -> str:
        config = self._config
        words = [
            "python",
            sys.argv[0],
            "--resume",
            "--name",
            str(config.name),
            "--runs-dir",
            str(config.runs_dir),
        ]
        return shlex.join(words + ["--distributed"] * config.distributed)


def _means(sums: Sums | dict[str, float]) -> dict[str, float]:
    count = float(sums["count"])
    return {name: float(value) / count for name, value in sums.items() if name != "count"}
