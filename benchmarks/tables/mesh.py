"""The table of tools on a mesh in `docs/benchmarks/mesh.md`."""

from benchmarks.tables.markdown import Tables, load, table

_RUNS = {
    "mesh_loss_triton": "loss, 32,768 tokens, vocabulary 128,256",
    "mesh": "the same without jax-triton",
    "mesh_long": "feed-forward layer in tiles, 131,072 tokens",
}


def against_hand() -> str:
    body, environments = [], []
    for name, title in _RUNS.items():
        environment, rows = load(name)
        environments.append(environment)
        for tool, of_tool in (("linear_cross_entropy", title), ("tiled", "feed-forward layer in tiles, 32,768 tokens")):
            ways = {row["how"]: row for row in rows if row["tool"] == tool}
            if not ways:
                continue
            hand = ways["by hand"]
            label = of_tool if name != "mesh_long" else title
            ratios = [
                f"{ways[how]['ms'] / hand['ms']:.3f}, {ways[how]['temp_bytes'] / hand['temp_bytes']:.3f}"
                for how in ("automatic", "explicit")
            ]
            body.append([label, f"{hand['ms']:.1f} ms, {hand['temp_bytes'] / 2**20:,.0f} MiB", *ratios])
    header = [
        "gradients, tokens sharded",
        "`shard_map` by hand",
        "automatic axes: time, bytes",
        "explicit axes: time, bytes",
    ]
    return table(header, body, environments, "mesh")


def vocabulary() -> str:
    environment, rows = load("mesh_vocabulary")
    body = [[row["how"], f"{row['ms']:.1f}", f"{row['temp_bytes'] / 2**20:,.0f}"] for row in rows]
    return table(["loss over a sharded vocabulary", "ms", "temp MiB"], body, [environment], "vocabulary")


TABLES: Tables = {"mesh": against_hand, "vocabulary": vocabulary}
