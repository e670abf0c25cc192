"""Sentences of `docs/benchmarks/`, but for those on compressed activations."""

from collections.abc import Callable
from types import SimpleNamespace

from benchmarks.tables.kernels import row_of
from benchmarks.tables.markdown import load
from benchmarks.tables.prose.guides import workspace
from benchmarks.tables.prose.rows import H200_BANDWIDTH, by, percent, span
from experiments.models.densenet import SIZES
from memjax._core.program import costs


def scan_in_turns() -> str:
    rows = by("bptt_planned_lstm", "name")
    plain, unrolled = rows.pop("jax.lax.scan"), rows.pop("jax.lax.scan, unroll=5")
    small, least = rows["budget 15MiB"], rows["budget 8.9MiB"]
    others = [row["ms"] for name, row in rows.items() if not name.startswith(("budget", "planned"))]
    assert small["ms"] < min(others)
    assert least["ms"] < plain["ms"]
    return (
        f"Down to {small['temp'] / 2**20:.0f} MiB it is faster than all rows but `unroll=5`, which takes "
        f"{unrolled['temp'] / 2**20:.0f} MiB, and down to {least['temp'] / 2**20:.0f} MiB faster than the plain loop."
    )


def loops() -> str:
    lstm, gru = (by(f"bptt_planned_{cell}", "name")["jax.lax.scan"]["temp"] / 2**20 for cell in ("lstm", "gru"))
    return f"Plain, the LSTM (256 features, batch 64) takes {lstm:.0f} MiB, the GRU (384 features, batch 32) {gru:.0f} MiB."


def scanned() -> str:
    first, *others = (row for row in load("plan_scanned_131072")[1] if "planned_ms" in row)
    (attention,) = (row for row in others if row["policy"] == "attention")
    (more,) = {percent(row["planned_ms"] / row["ms"] - 1) for row in others}
    assert first["planned_bytes"] < first["bytes"] < attention["bytes"]
    return (
        "In the first row the plan keeps attention's outputs, for which the policy that does so needs "
        f"{attention['bytes'] / 2**20:,.0f} MiB. In the others both programs run attention once; the plan takes less memory, "
        f"and {more} more time."
    )


def chunks() -> str:
    rows = load("recurrent")[1]
    by_hand = [row["ratio"] for row in rows if row["way"] == "by hand"]
    (jit,) = (row for row in rows if row["way"] == "jit" and row["share"] == 0.07)
    assert max(by_hand) / min(by_hand) < 1.2
    return (
        f"Chunks by hand take {min(by_hand):.2f} to {max(by_hand):.2f} of the time without. `memjax.jit` takes "
        f"{jit['ratio']:.2f} at {jit['of_plain']:.1%} of the memory"
    )


def gradients_of_head() -> str:
    (size,) = {
        row["output_bytes"] for row in load("cross_entropy")[1] if row["what"] == "time" and row["name"] == "plain JAX"
    }
    return f"the gradients take {size / 2**30:.2f} GiB."


def least_of_unrolled() -> str:
    least = min(row["bytes"] for row in load("plan_unrolled_16384")[1])
    return f"The least budget of the unrolled layers, {least / 2**20:,.0f} MiB,"


def noise() -> str:
    rows = {
        row["model"]: row for name in ("plan_public", "plan_public_convnext") for row in load(name)[1] if _equal(row)
    }
    return f"its ratio shows the noise: up to {percent(max(abs(_ratio(row) - 1) for row in rows.values()), 1)}."


def _equal(row: dict) -> bool:
    return row.get("policy") == "everything"


def _ratio(row: dict) -> float:
    return row["planned_ms"] / row["ms"]


def workspaces() -> str:
    rows = load("jit_ahead_scan", failed=True)[1]
    many, long = (
        {f"{row['workspace'] / 2**30:.1f} GiB" for row in rows if row["batch"] == batch}
        for batch in ([8, 8192], [1, 131072])
    )
    return f"On an H100 that of attention's backward pass was {many.pop()} for 8 x 8,192 tokens and {long.pop()} for 131,072"


def unrolled_ahead() -> str:
    (row,) = load("jit_ahead_unrolled_80")[1]
    assert row["tries"] == 2
    assert all(
        "held" not in row
        for row in load("jit_ahead_scan", failed=True)[1]
        if row["batch"] == [1, 131072] and row["budget_gib"] == 80
    )
    return f"Unrolled layers hold {(row['held'] + row['workspace']) / 2**30:.1f} GiB, found with two compilations."


def hidden() -> str:
    (row,) = load("metp_overlap_8")[1]
    both = {one["tokens"]: one["hidden"] for one in row["milliseconds"] if one["pass"] == "forward + backward"}
    assert all(share > 0.9 for tokens, share in both.items() if tokens >= 3072)
    return (
        "From 3,072 tokens on, nine tenths and more are hidden. With 2,048, where a hop takes as long as a step, what remains is "
        f"the fixed cost of a hop: one of a MiB takes {2**20 / row['link'][str(2**20)] * 1e6:.0f} µs."
    )


def attention() -> str:
    ring, four = (load(f"metp_attention_{name}")[1][0] for name in ("8", "4gpus"))
    rates = lambda row: f"{row['ring_tflops_per_gpu']:.0f} against {row['flash_tflops']:.0f}"
    assert percent(ring["share"]) == percent(four["share"])
    return (
        f"reaches {percent(ring['share'])} of one GPU's flash attention with as many tokens per GPU: {rates(ring)} "
        f"TFLOP/s.[^attention] A ring of four GPUs, 131,072 tokens, reaches {percent(four['share'])} too: {rates(four)}."
    )


def little_memory() -> str:
    rows = {row["case"]: row for row in load("kernels")[1]}
    plain, little = rows["plain loss"], rows["loss in little memory"]
    product = lambda tokens, dim: 2e-12 * tokens * dim * 128256  # TFLOP
    products = sum(kernel["ms"] for kernel in plain["longest"] if kernel["name"].startswith("nvjet"))
    rate = 3 * product(4096, 4096) / products
    return (
        f"For 32,768 tokens and 2,560 features that takes {little['ms']:.0f} ms and {little['temp_bytes'] / 2**20:,.0f} MiB. "
        "At the rate of plain JAX's three products above, after a rest, the four would take "
        f"{4 * product(32768, 2560) / rate:.0f} ms."
    )


def gradients_of_features() -> str:
    row = row_of(load("kernels")[1], "densenet")
    ms = next(kernel["ms"] for kernel in row["longest"] if kernel["name"] == "convolve_backward")
    layers, growth = SIZES[264]
    channels, side, read = 2 * growth, 56, 0  # pairs of a pixel and a channel
    for block in layers:
        read += 64 * side**2 * sum(channels + growth * layer for layer in range(block))
        channels, side = (channels + growth * block) // 2, side // 2
    rate = costs.device(SimpleNamespace(device_kind="H200", platform="gpu")).nbytes
    return (
        f"Those {10 * read / 1e9:.0f} GB alone would take {1e3 * 10 * read / rate:.1f} of its {ms:.1f} ms "
        f"at {rate / 1e12:.0f} TB/s."
    )


def predicted_of_mesh() -> str:
    ahead = {row["budget"]: row for row in load("jit_mesh_8b_ahead")[1]}
    rows = [row for row in load("jit_mesh_8b")[1] if "policy" in row]
    nothing, attention, products = sorted(rows, key=lambda row: row["held"])
    of = lambda row: (
        ahead[f"{row['held']}B"]["predicted_time"] / ahead[f"{products['held']}B"]["predicted_time"],
        row["planned_ms"] / products["planned_ms"],
    )
    (first, took), (second, took_too) = of(nothing), of(attention)
    [unrolled] = load("jit_mesh_8b_ahead_unrolled")[1]
    plain, planned = load("jit_mesh_8b_unrolled")[1]
    pairs = [(ahead[f"{row['held']}B"], row) for row in rows] + [(unrolled, planned)]
    off = [one["planned_held"] / ran["planned_held"] - 1 for one, ran in pairs]
    return (
        f"the plans for the budgets of the H200's scan hold from {percent(-min(off))} less to {percent(max(off))} more than "
        f"those that ran. The first two were predicted to take {first:.2f} and {second:.2f} of the third one's time, and took "
        f"{took:.2f} and {took_too:.2f}; the unrolled one {unrolled['predicted_time']:.2f} of plain, and took "
        f"{planned['planned_ms'] / plain['ms']:.2f}."
    )


def tiles() -> str:
    """Why a feed-forward layer takes longer in tiles."""
    _, rows = load("long_context_feed_forward")
    weights, sums = {"8B": 3 * 4096 * 14336, "1B": 3 * 2048 * 8192}, []
    for whole, in_tiles in zip(rows[::2], rows[1::2], strict=True):
        moved = 8 * weights[whole["shape"]] * whole["length"] / 8192  # bytes: each tile reads and writes the sums
        sums.append(moved / H200_BANDWIDTH * 1e3 / whole["ms"])
        assert in_tiles["ms"] / whole["ms"] - 1 < sums[-1]
    plain, tiled = (row_of(load("kernels")[1], case) for case in ("feed forward", "feed forward, tiled"))

    def products(row: dict, adding: bool | None = None) -> float:
        """Milliseconds of matrix products; "NTT": those that make gradients of weights."""
        found = [kernel for kernel in row["longest"] if kernel["name"].startswith("nvjet")]
        return sum(k["ms"] for k in found if adding is None or k["name"].endswith("NTT") == adding)

    more, adding = (products(tiled, which) - products(plain, which) for which in (None, True))
    return (
        "Each tile adds gradients of weights to sums in float32. By count these move as much memory as takes "
        f"{span(sums, 1)} of the time, more than tiles were measured to take. In a trace of an earlier run the products of the "
        f"first row took {products(tiled):.1f} ms in tiles in place of {products(plain):.1f}, and {adding:.1f} of these "
        f"{more:.1f} ms were in those that add.[^tiles]"
    )


SENTENCES: dict[str, list[Callable[[], str]]] = {
    "docs/benchmarks/dense-block.md": [gradients_of_features],
    "docs/benchmarks/scan.md": [scan_in_turns, loops, chunks],
    "docs/benchmarks/plan.md": [scanned, least_of_unrolled, noise],
    "docs/benchmarks/linear-cross-entropy.md": [gradients_of_head, little_memory],
    "docs/benchmarks/jit.md": [workspaces, unrolled_ahead, predicted_of_mesh],
    "docs/benchmarks/metp.md": [hidden, attention],
    "docs/benchmarks/long-context.md": [workspace, tiles],
}
