"""Special tools beside plans of exactly their bytes, on a CPU: `python -m benchmarks.dominated`, which takes long.

Each network of the papers, and public ones, is differentiated by the tools made for it: `memjax.remat.scan`, `DenseBlock`,
`compressed`, `linear_cross_entropy`, `remat.tiled`, checkpoints by hand, diffrax's own. The plain loss is planned for the
temporary bytes of each tool by `memjax.planned`, and, where that is refused or slower, by `memjax.jit` for what the tool's
program holds. Plans beside tools that round may round, too. All run in turns: `time` is the median over rounds of the ratio to
the plain loss, in seconds of the processor, and `to_tool` that to the tool. A tool dominates where no plan is made, or the
faster one takes over 1.03 of the tool's time. Of METP's layer bytes and FLOPs are compared, on eight simulated devices.

`--models-path` is a folder with Flax's `examples` and Bonsai's `bonsai`; the GraphNet needs jraph, the ODE diffrax.
Rows are saved as they come. `--networks LSTM head` measures some, and leaves other rows as they are; `--missing` those that
have no rows.
"""

import dataclasses
import json
import pathlib
from typing import Any

import tyro

from benchmarks import record
from benchmarks.cases.dominated import NETWORKS, ring

NAME, MODULE = "dominated_cpu", "benchmarks.cases.dominated.measure"
NAMES = *NETWORKS, ring.NAME


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    models_path: pathlib.Path = pathlib.Path("public")
    """A folder with Flax's `examples` and Bonsai's `bonsai`."""
    networks: tuple[str, ...] = ()
    """Which networks; none: all."""
    missing: bool = False
    """Only networks that have no rows yet."""


def main(config: Config) -> None:
    if unknown := set(config.networks) - {*NAMES}:
        raise SystemExit(f"--networks must be some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    path = record.RESULTS / f"{NAME}.json"
    keeps = (config.networks or config.missing) and path.exists()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if keeps else []
    names = config.networks or NAMES
    if config.missing:
        names = tuple(name for name in names if name not in {row["network"] for row in rows if "tool" in row})
    for name in names:
        case = {"network": name, "models_path": str(config.models_path)}
        result = record.in_fresh_process(MODULE, case, ring.ENVIRON if name == ring.NAME else None, timeout=1800)
        found = [{"network": name} | row for row in result.get("rows", [{"error": result.get("error")}])]
        for row in found:
            print(json.dumps(row), flush=True)
        rows = [row for row in rows if row["network"] != name] + found
        rows.sort(key=lambda row: NAMES.index(row["network"]))
        record.save(NAME, rows, on_cpu=True)
    record.save(NAME, rows, on_cpu=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
