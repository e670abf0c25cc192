"""`memjax.jit` on training steps that others published, unchanged, on a CPU: `python -m benchmarks.jit_public`, over an hour.

`--models-path` is a folder with clones of google/flax, google-deepmind/optax, google-deepmind/dm-haiku, google-deepmind/jraph,
patrick-kidger/equinox, luchris429/purejaxrl and jax-md/jax-md, by the names of the repositories. What the steps import has to be
installed: clu, ml-collections, dm-haiku, dm-tree, jmp, jraph, equinox, einops, gymnax, e3nn-jax, sympy. What only loads data
need not.

Each step is compiled with memory to spare, which has to give the program of `jax.jit`, and within 70% and 50% of its temporary
bytes, beside arguments and results. Where that is refused, it is planned for the least that can be had. Results are those after
three steps, compared with plain JAX; `rounding` is how far those of plain JAX move where every second float in the arguments is
the next one. One more row of each step has float64, where its code allows. `--small` runs some steps and saves nothing.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.cases.jit_public import CASES

_SMALL = ("flax vae", "flax seq2seq", "optax meta_learning", "haiku gan", "equinox rnn")
# As for the tests: with JAX 0.10 XLA:CPU drops barriers without the first. The others save time and change no bytes.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_max_isa=AVX512", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    FLAGS += ["--xla_disable_hlo_passes=cse_barrier_expander", "--xla_cpu_use_fusion_emitters=false"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with clones of the repositories."""
    models: tuple[str, ...] = ()
    """Which steps; none: all. The rows of others stay as they are."""
    shares: tuple[float, ...] = (0.7, 0.5)
    """Budgets, as shares of the temporary bytes of the step."""
    double: bool = True
    """One more row in float64."""
    jobs: int = 1
    """How many steps are measured at once. One takes about two cores; seconds are comparable with one alone."""
    small: bool = False
    """A few steps, nothing is saved."""


def planned_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a step that were planned and run, in float32."""
    for row in result.get("rows", ()):
        row = row.get("least", row)
        if "compiled" in row:
            yield row


def accuracy(results: list[dict[str, Any]]) -> str:
    """How far predicted bytes are from compiled ones."""
    rows = [row for result in results for row in planned_rows(result) if row["predicted"]]
    off = [abs(row["predicted"] / row["compiled"] - 1) for row in rows]
    if not off:
        return "no plan was predicted"
    return f"predicted bytes are off by {statistics.median(off):.1%} in the median, {max(off):.1%} at worst, of {len(off)} plans"


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "step",
        "asked",
        "plain MiB",
        "budget",
        "compiled",
        "predicted",
        "compiled times",
        "FLOPs",
        "error",
        "rounding",
        "seconds",
    )
    mib = lambda nbytes: f"{nbytes / 2**20:.2f}" if nbytes else ""
    for result in results:
        if "rows" not in result:
            table.add_row(result["name"], "", result["error"][:60])
            continue
        rows = [*result["rows"], *([result["double"]] if "compiled" in result.get("double", {}) else [])]
        for i, row in enumerate(rows):
            least = row.get("least", row)
            asked = f"{row['share']:.0%}" + (f" refused: {least.get('share', 0):.0%}" if least is not row else "")
            head = result["name"] if i == 0 else "  in float64" if row is result.get("double") else ""
            if "compiled" not in least:
                table.add_row(head, asked, mib(result["plain"]), least.get("refused", "")[:60])
                continue
            bytes_of = [mib(least[name]) for name in ("budget", "compiled", "predicted")]
            rest = [
                str(least["compilations"]),
                f"{least['flops_ratio']:.2f}",
                f"{least['error']:.0e}",
                f"{row.get('rounding', result['rounding']):.0e}",
                f"{least['seconds']:.1f}",
            ]
            table.add_row(head, asked, "" if head.startswith(" ") else mib(result["plain"]), *bytes_of, *rest)
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    same = [result["spare"].get("same_program") for result in results if "spare" in result]
    console.print(
        f"with memory to spare: {same.count(True)} programs are those of jax.jit, {same.count(False)} are not"
    )
    console.print(accuracy(results))


def main(config: Config) -> None:
    if unknown := set(config.models) - CASES.keys():
        raise SystemExit(f"--models must be some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    path = record.RESULTS / "jit_public.json"
    keep = config.models and path.exists() and not config.small
    before = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if keep else {}
    found: dict[str, dict[str, Any]] = {}
    names = config.models or (_SMALL if config.small else CASES)
    common = {"public": str(config.models_path), "shares": config.shares, "double": config.double}
    cases = [{"name": name} | common for name in names]
    module, environ = "benchmarks.cases.jit_public.measure", {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(FLAGS)}
    for case, result in record.in_fresh_processes(module, cases, environ, jobs=config.jobs):
        name = case["name"]
        found[name] = {"name": name} | {key: value for key, value in result.items() if value != case.get(key)}
        print(json.dumps(found[name]), flush=True)
        if not config.small:
            every = before | found
            record.save("jit_public", [every[name] for name in CASES if name in every], on_cpu=True)
    show([found[name] for name in names])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
