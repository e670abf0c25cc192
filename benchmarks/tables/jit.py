"""The tables of whole steps in `docs/benchmarks/jit.md`."""

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


TABLES: Tables = {"jit": decoder, "jit_mesh": layers}
