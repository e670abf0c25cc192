"""The tables of whole steps in `docs/benchmarks/jit.md`."""

from typing import Any

from benchmarks.tables.markdown import Tables, load, table


def decoder() -> str:
    environment, rows = load("jit_gpt")
    other, again = load("jit_gpt_second_process")
    peer = next(row for row in rows if row["case"] == "nnx.jit")
    plain_again = next(row for row in again if row["case"] == "nnx.jit")
    seconds = {
        row["batch"]: f"{row['first_s'] / plain_again['first_s']:.1f}" for row in again if row is not plain_again
    }
    body = []
    for row in rows:
        planned = row["case"] == "memjax.jit"
        held = f"{row['nbytes'] / 2**30:.1f} of {row['budget'] / 2**30:.1f} GiB" if planned else ""
        body.append(
            [
                f"`{row['case']}`, batch {row['batch']}",
                held,
                str(row["microbatches"]) if planned else "",
                f"{row['tokens_per_s']:,}",
                f"{row['tokens_per_s'] / peer['tokens_per_s']:.3f}",
                f"{row['predicted_time']:.3f}" if planned else "",
                f"{row['first_s'] / peer['first_s']:.1f}",
                seconds.get(row["batch"], "") if planned else "",
            ]
        )
    header = [
        "909M decoder, AdamW",
        "holds",
        "microbatches",
        "tokens a second",
        "to plain",
        "predicted time",
        "first step, to plain",
        "in a second process, to plain",
    ]
    return table(header, body, [environment, other], "jit")


def layers() -> str:
    environment, rows = load("jit_mesh", failed=True)
    body = []
    for row in rows:
        planned = "planned_ms" in row
        body.append(
            [
                row["mode"],
                row["policy"],
                f"{row['held'] / 2**30:.2f}",
                f"{row['ms']:.1f}",
                f"{row['planned_held'] / 2**30:.2f}" if planned else "refused",
                f"{row['planned_ms']:.1f}" if planned else "",
                f"{row['time']:.3f}" if planned else "",
            ]
        )
    header = ["layers", "kept by hand", "GiB", "ms", "`memjax.jit`, GiB", "ms", "time to by hand"]
    return table(header, body, [environment], "jit_mesh")


def ahead() -> str:
    names = ("scan", "unrolled_8192", "unrolled_131072", "unrolled_80", "unrolled_139", "scan_tiled", "unrolled_tiled")
    loaded = [load(f"jit_ahead_{name}", failed=True) for name in names]
    machine = loaded[0][1][0]["machine"].replace(", not run", " and not run")
    found: dict[Any, dict[float | None, dict[str, Any]]] = {}
    for _, rows in loaded:
        for row in rows:
            of_row = (*row["batch"], row["mode"], row["tile"])
            row["held"] = row["held"] + row["workspace"] if "held" in row else None
            found.setdefault(of_row, {})[row["budget_gib"]] = row
    body = []
    for (examples, length, mode, tile), by_budget in sorted(
        found.items(), key=lambda one: (one[0][1], one[0][3], one[0][2])
    ):
        way = f"{mode}, feed-forward layers in tiles of {tile:,}" if tile else mode
        cells = [f"{examples} x {length:,}", way, f"{by_budget[None]['held'] / 2**30:.1f}" if None in by_budget else ""]
        for budget in (80.0, 139.0):
            planned = by_budget.get(budget, {})
            fits = planned.get("held") is not None
            cells.append(f"{planned['held'] / 2**30:.1f}" if fits else "refused" if planned else "")
            cells.append(f"{planned['predicted_time']:.2f}" if fits else "")
        body.append(cells)
    header = ["tokens of a device", "layers", "`jax.checkpoint` a layer, GiB"]
    for budget in (80, 139):
        header += [f"`memjax.jit`, {budget} GiB", "predicted time"]
    sources = [{**environment, "accelerator": machine} for environment, _ in loaded]
    return table(header, body, sources, "jit_ahead")


def scheduler() -> str:
    names = ("jit_ahead_scan", "jit_ahead_unrolled_8192", "jit_ahead_scheduler")
    loaded = [load(name) for name in names]
    machine = loaded[0][1][0]["machine"].replace(", not run", " and not run")
    rows = [row for _, rows in loaded for row in rows if row["policy"] == "checkpoint" and row["batch"] == [8, 8192]]
    of = lambda mode, off: next(
        r["held"] + r["workspace"] for r in rows if (r["mode"], bool(r["compiler_options"])) == (mode, off)
    )
    body = []
    for mode in ("scan", "unrolled"):
        default, off = of(mode, False), of(mode, True)
        body.append([mode, f"{default / 2**30:.1f}", f"{off / 2**30:.1f}", f"{off / default:.3f}"])
    header = ["layers, a checkpoint each", "as XLA does by default, GiB", "scheduler off, GiB", "ratio"]
    return table(header, body, [{**environment, "accelerator": machine} for environment, _ in loaded], "jit_scheduler")


def whole_decoder() -> str:
    """Llama 3 8B over four GPUs."""
    loaded = [load(f"jit_mesh_8b{name}") for name in ("_2", "_131072", "", "_unrolled")]
    gib = lambda row, name: f"{row[name] / 2**30:.2f}" if name in row else ""
    seconds = lambda row, name: f"{row[name] / 1e3:.3f}" if name in row else ""
    body = []
    for environment, rows in loaded:
        for row in rows:
            budget = row.get("budget", "")
            body.append(
                [
                    f"{environment['accelerator'].split(', ')[0].split()[1]}, {row['tokens']:,}",
                    row["mode"],
                    row.get("policy", f"(budget {budget.replace('GiB', ' GiB')})"),
                    gib(row, "held"),
                    seconds(row, "ms"),
                    gib(row, "planned_held"),
                    seconds(row, "planned_ms"),
                    f"{row['time']:.3f}" if "time" in row else "",
                    f"{row['tries']}" if "tries" in row else "",
                ]
            )
    header = [
        "GPU, tokens of each",
        "layers",
        "by hand",
        "GiB",
        "s",
        "`memjax.jit`, GiB",
        "s",
        "time to by hand",
        "compiled",
    ]
    return table(header, body, [environment for environment, _ in loaded], "jit_mesh_8b")


def public_steps() -> str:
    """Steps that others published, within 70% and 50% of their temporary bytes."""
    environment, every = load("jit_public", failed=True)
    mib = lambda nbytes: f"{nbytes / 2**20:.3g}"
    body = []
    for row in every:
        if "rows" not in row:
            continue
        cells = [row["name"], mib(row["plain"])]
        for planned in (one for one in row["rows"] if one["share"] in (0.7, 0.5)):
            if "refused" in planned:
                cells += [mib(planned["asked"]), f"refused; {mib(planned['least']['compiled'])} runs"]
            else:
                cells += [mib(planned["asked"]), mib(planned["compiled"])]
            cells.append(str(planned["compilations"]))
        body.append(cells)
    header = ["step", "plain, MiB", "70%: budget", "holds", "compiled", "50%: budget", "holds", "compiled"]
    return table(header, body, [environment], "jit_public")


TABLES: Tables = {
    "jit": decoder,
    "jit_mesh": layers,
    "jit_mesh_8b": whole_decoder,
    "jit_ahead": ahead,
    "jit_scheduler": scheduler,
    "jit_public": public_steps,
}
