"""Bits for each array of the blocks of the training with `--sigma`, chosen in its course by `memjax.compress.BitsController`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from experiments.harness import files
from experiments.harness.loop.step import Batch, Loss, TrainState
from experiments.paired.members import with_bits
from memjax import compress


def sigma_gradient(make: Callable[[], nnx.Module], loss: Loss, sigma: float) -> Callable[..., Any]:
    """The gradient of one model, given bits for each of its blocks, its parameters and a batch."""

    def gradient(bits: Sequence[Any], params: nnx.State, batch: Batch) -> Any:
        def mean_loss(params):
            graph = nnx.graphdef(nnx.eval_shape(make))
            sums = loss(with_bits(nnx.merge(graph, params), sigma, bits), batch)
            return sums["loss"] / sums["count"]

        return jax.grad(mean_loss)(params)

    return gradient


class FittedTraining:
    """A training step that is compiled again when its bits change. The choices so far are in a file of the run, to go on from.

    Args:
      controller: chooses bits from the parameters and the batch of one member.
      member: gives these two.
      path: of the file.
    """

    def __init__(
        self,
        controller: compress.BitsController,
        member: Callable[[TrainState, Batch], tuple[nnx.State, Batch]],
        path: Path,
    ):
        self._controller, self._member, self._path = controller, member, path
        self._fitted: compress.FittedBits | None = None

    def bits(self) -> tuple[compress.ArrayBits, ...]:
        """Those of each block, now; none before the first step."""
        return () if self._fitted is None else self._fitted.bits

    def compile_step(self, step: Callable, **options) -> Callable:
        programs: dict[Any, Callable] = {}
        done = -1

        def run(state: TrainState, batch: Batch) -> Any:
            nonlocal done
            if done < 0:
                done = int(state.step)
                self._fitted = self._restored(done)
            chosen = self._controller.update(self._fitted, done, *self._member(state, batch))
            if chosen is not self._fitted:
                self._fitted = chosen
                self._save()
            if chosen.bits not in programs:
                # A function of its own, which is traced anew: the model asks for the bits then.
                programs[chosen.bits] = jax.jit(lambda *args: step(*args), donate_argnums=0, **options)
            done += 1
            return programs[chosen.bits](state, batch)

        return run

    def _choices(self) -> list[str]:
        return files.read_json(self._path, list, "train again under another --name") if self._path.exists() else []

    def _restored(self, step: int) -> compress.FittedBits | None:
        """What was chosen last, up to a step."""
        earlier = [text for text in self._choices() if json.loads(text)["step"] <= step] if step else []
        return compress.FittedBits.from_json(earlier[-1]) if earlier else None

    def _save(self) -> None:
        assert self._fitted is not None
        earlier = [text for text in self._choices() if json.loads(text)["step"] < self._fitted.step]
        if jax.process_index() == 0:
            files.write_text(self._path, json.dumps([*earlier, self._fitted.to_json()], indent=1))
