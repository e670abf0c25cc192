"""A decoder in the shape of Llama 3 on sequences as long as memory allows.

    python experiments/long_context.py

Trains it on the source of Python's standard library by one recipe for its memory, then measures gradients by several: KiB per
token as compiled, seconds of real steps, beside the formulas; and finds the longest sequence of each within a memory limit, by
bisection on compiled bytes, then with a real step. A few minutes on two CPU cores. On a GPU, the shape of Llama-3.2-1B:

    python experiments/long_context.py --shape 1B --length 65536 --recipe tiled+groups+slots=4

A recipe is made of these words, joined by +:

"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.context.comparison import Comparison
from experiments.context.report import show
from experiments.data.text import check_windows, standard_library, test_windows, train_windows, windows
from experiments.harness.config import RunConfig, parse
from experiments.harness.console import exit_status, output
from experiments.harness.errors import ExperimentError
from experiments.harness.main import run
from experiments.harness.task import Task
from experiments.models import llama, recipe
from experiments.models.recipe import Recipe
from memjax._core import check

_DESCRIPTION = f"{(__doc__ or '').rstrip()}\n\n{recipe.WORDS}\n"
_TEST_WINDOWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongContextConfig(RunConfig):
    """The decoder, its recipe, and what is measured."""

    shape: Literal["tiny", "1B", "3B", "8B"] = "tiny"
    """A shape of Llama 3. All but tiny have its vocabulary of 128,256; the text, which is bytes, uses 256 of it."""
    layers: int = 0
    """0: as many as the shape has."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of parameters and computation."""
    length: int = 512
    """Bytes of a sequence in training."""
    recipe: str = "tiled=64+groups+slots=2"
    """What training keeps and recomputes."""
    compare: tuple[str, ...] = (
        *("checkpoint", "tiled=64+checkpoint", "tiled=64+slots=2", "tiled=64+groups+slots=2"),
        "tiled=64+groups+bits=4",
    )
    """Recipes to measure; none: only train."""
    compare_lengths: tuple[int, ...] = (256, 1024)
    """Tokens of the sequences measured."""
    memory_limit: str | None = "8MiB"
    """What parameters, their gradients and all else may take in the search for the longest sequence, such as 70GiB. Default on
    a GPU: what JAX may take of it, three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""
    longest: int = 4096
    """Where that search ends; 0: no search."""

    experiment: ClassVar[str] = "long_context"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("shape", "layers", "dtype", "length"),
    )

    def validate(self) -> None:
        super().validate()
        if self.length < 1 or min(self.compare_lengths, default=1) < 1:
            raise ExperimentError("--length and --compare-lengths must be at least 1")
        for name in ("layers", "longest"):
            if getattr(self, name) < 0:
                raise ExperimentError(f"--{name} must be at least 0, got {getattr(self, name)}")
        if self.compare and not self.compare_lengths:
            raise ExperimentError(
                "--compare-lengths must have at least one length, or leave out recipes with --compare"
            )
        for flag, text in [("--recipe", self.recipe), *(("--compare", text) for text in self.compare)]:
            try:
                self._check_recipe(recipe.parse(text))
            except ValueError as error:
                raise ExperimentError(f"{flag}: {error}") from None
        with _explained("--memory-limit"):
            self.limit()

    def _check_recipe(self, chosen: Recipe) -> None:
        kv_heads = self.decoder().kv_heads
        if chosen.groups and kv_heads % chosen.groups:
            raise ValueError(f"groups must be a divisor of the {kv_heads} heads of keys, got {chosen.groups}")
        if chosen.kept == "offload" and jax.default_backend() == "cpu":
            raise ValueError(
                "offload needs a device with memory of its own; a CPU's is the host's, where it saves nothing"
            )
        if chosen.kept == "budget":
            check.byte_count("budget", chosen.budget, words=("min",))

    def decoder(self) -> llama.LlamaConfig:
        shape = llama.SHAPES[self.shape]
        return dataclasses.replace(shape, layers=self.layers or shape.layers, dtype=self.dtype)

    def limit(self) -> int | None:
        """Bytes; None where neither flag nor device gives any."""
        if self.memory_limit is not None:
            return int(check.byte_count("memory_limit", self.memory_limit))
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


_adamw = functools.partial(
    LongContextConfig, optimizer="adamw", schedule="cosine", weight_decay=0.0, batch_size=1, warmup=0.1
)
PRESETS = {
    "cpu": _adamw(preset="cpu", epochs=0.002, learning_rate=3e-3),
    "gpu": _adamw(
        preset="gpu", epochs=0.2, learning_rate=3e-4, shape="1B", dtype="bfloat16", length=65536,
        recipe="tiled+groups+slots=4",
        compare=("checkpoint", "tiled+checkpoint", "tiled+slots=6", "tiled+groups+slots=6", "tiled+groups+slots=4",
                 "tiled+groups+bits=8", "tiled+groups+offload"),
        compare_lengths=(32768, 65536), memory_limit=None, longest=4_194_304,
    ),
}  # fmt: skip


def make_task(config: LongContextConfig) -> Task:
    text = standard_library()
    check_windows(text, config.length, config.batch_size)
    shape = {"length": config.length, "batch_size": config.batch_size}
    chosen = recipe.parse(config.recipe)
    batch = {"text": jax.ShapeDtypeStruct((config.batch_size, config.length + 1), jnp.uint8)}
    make_model = lambda: llama.Llama(config.decoder(), rngs=nnx.Rngs(config.seed))

    def loss(model, batch):
        text = batch["text"].astype(jnp.int32)
        total, aux = llama.loss(config.decoder(), chosen, model.arrays(), text[:, :-1], text[:, 1:], return_aux=True)
        count = aux.valid_count.astype(jnp.float32)
        return {"loss": total, "top1": aux.accuracy * count, "count": count}

    if chosen.kept == "budget":
        with _explained("--recipe"):  # a scan says that it cannot keep to its budget when it is differentiated
            jax.eval_shape(lambda batch: nnx.grad(lambda model: loss(model, batch)["loss"])(make_model()), batch)
    return Task(
        make_model=make_model,
        loss=loss,
        test_loss=loss,
        train_batches=train_windows(text, seed=config.seed, **shape),
        test_batches=lambda: itertools.islice(test_windows(text, **shape), _TEST_WINDOWS),
        batch=batch,
        train_examples=windows(text.train, config.length),
    )


@contextlib.contextmanager
def _explained(flag: str):
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ExperimentError(f"{flag}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status is that of the harness: 0 complete, 130 stopped and saved, 2 something to put right."""
    return exit_status(_main, argv)


def _main(argv: list[str]) -> int:
    config = parse(PRESETS, description=_DESCRIPTION, argv=argv)
    console = output()
    if status := run(PRESETS, make_task, description=_DESCRIPTION, argv=[*argv, "--name", str(config.name)]):
        return status
    if config.compare and jax.process_index() == 0:
        decoder = config.decoder()
        comparison = Comparison(decoder, config.folder / "lengths.json", console)
        if not config.report_only:
            recipes = [recipe.parse(text) for text in config.compare]
            comparison.complete(recipes, config.compare_lengths, config.limit(), config.longest, config.seed)
        title = f"Llama {config.shape}, {decoder.layers} layers, {config.dtype}"
        show(comparison.rows, console, config.folder / "lengths.png", title)
        console.print(f"In {config.folder}: lengths.json, lengths.png", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
