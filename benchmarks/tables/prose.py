"""Sentences with numbers that are measured, as pages have them. Results that change make the tests ask for other words."""

from collections.abc import Callable
from typing import Any

from benchmarks.tables.markdown import load


def _by(name: str, key: str) -> dict[str, Any]:
    return {row[key]: row for row in load(name)[1] if key in row}


def _percent(share: float) -> str:
    return f"{share:.0%}"


def scan_guide() -> str:
    rows = _by("bptt", "name")
    plain, small = rows["jax.lax.scan"], rows["budget 14.5MiB"]
    return f"takes {small['temp'] / 2**20:.0f} MiB instead of {plain['temp'] / 2**20:.0f} in {small['ratio']:.2f} of the time."


def scan_by_flax() -> str:
    rows = _by("bptt", "name")
    flax, small = rows["nn.scan of nn.remat"], rows["budget 14.5MiB"]
    assert flax["ms"] < small["ms"] < rows["jax.lax.scan"]["ms"]
    return (
        f"Down to {small['temp'] / 2**20:.0f} MiB it is faster than `jax.lax.scan`, because it writes less to memory. "
        f"`nn.scan` of `nn.remat` is faster still, at {flax['temp'] / 2**20:.0f} MiB."
    )


def head_and_loss() -> str:
    rows = {row["loss"]: row for row in load("plan_head")[1] if row["part"] == "head"}
    cost = lambda row: (f"{row['bytes'] / 2**20:,.0f} MiB", f"{row['ms']:.1f} ms")
    (plain, plain_ms), (planned, planned_ms), (by_hand, by_hand_ms) = (
        cost(rows[how]) for how in ("plain", "planned", "by hand")
    )
    return (
        f"take {plain} of temporary memory and {plain_ms} on an H200 as written, {planned} and {planned_ms} planned with tiles, "
        f"and {by_hand} and {by_hand_ms} with [`memjax.linear_cross_entropy`]"
    )


def graph_net() -> str:
    (row,) = load("jit_public_graph_net")[1]
    quarter = next(one for one in row["rows"] if one["share"] == 0.25)
    half = next(one for one in row["rows"] if one["share"] == 0.5)
    assert quarter["kept_budget"]
    assert f"{half['flops_ratio']:.2f}" == "1.00"
    return (
        "trains under `memjax.jit` in a quarter of its temporary memory, at "
        f"{quarter['flops_ratio']:.2f} times the FLOPs in products ({row['double']['flops_ratio']:.2f} in float64)"
    )


def llama_codes() -> str:
    rows = _by("transformer_codes_llama", "case")
    cost = lambda case: f"{rows[case]['temp_mib'] / 2**10:.1f} GiB and {rows[case]['ms']:.1f} ms"
    policy, plain = rows["kept: attention, qkv, x2"], rows["plain"]
    return (
        f"8 bits take {cost('compressed, 8 bits')}, and the error is about that of bfloat16. With nothing recomputed it is "
        f"{cost('plain')}. 4 bits take {cost('compressed, 4 bits')}, and gradients are off by "
        f"{_percent(rows['compressed, 4 bits']['gradient_error'])}: check the training. A policy of `jax.checkpoint` that "
        f"recomputes the feed-forward part takes {policy['temp_mib'] / 2**10:.1f} GiB and {policy['ms'] / plain['ms']:.2f} "
        "times the time of plain layers."
    )


def llama_shares() -> str:
    rows = _by("transformer_codes_llama", "case")
    ratio = lambda case, key: rows[f"compressed, {case} bits"][key] / rows["plain"][key]
    assert ratio(8, "temp_mib") < 0.5
    off = " and ".join(_percent(rows[f"compressed, {bits} bits"]["gradient_error"]) for bits in (4, 3))
    return (
        f"8 bits take less than half of the memory of plain layers for {ratio(8, 'ms'):.3f} times their time, 4 bits "
        f"{_percent(ratio(4, 'temp_mib'))} of it for {ratio(4, 'ms'):.2f} times, 3 bits {_percent(ratio(3, 'temp_mib'))} for "
        f"{ratio(3, 'ms'):.2f} times. In 4 and 3 bits gradients are off by {off}"
    )


def resnet_codecs() -> str:
    rows = _by("compressed_default", "case")

    def cost(case: str) -> tuple[str, str]:
        row = rows[case]
        return _percent(row["temp_mib"] / rows["plain"]["temp_mib"]), _percent(row["ms"] / rows["plain"]["ms"] - 1)

    two = cost("ErrorBounded(2**-5, bits_per_value=12), where=conv; ChannelQuantized(4) for the rest")
    default, four = cost("compressed(model)"), cost("compressed(model, bits=4)")
    return (
        f"in {two[0]} of the temporary memory for {two[1]} more time, where the default takes {default[0]} for {default[1]}, "
        f"and `bits=4` {four[0]} for {four[1]}."
    )


def resnet_times() -> str:
    rows = _by("compressed_default", "case")
    more = [row["ms"] / rows["plain"]["ms"] - 1 for case, row in rows.items() if case != "plain"]
    return f"on a GPU {_percent(min(more))} to {_percent(max(more))} of a ResNet-50 step, by codec"


def densenet() -> str:
    rows = load("densenet264_step")[1]
    torch = next(row for row in rows if row["library"] == "torch" and not row["memory_efficient"])
    block = next(row for row in rows if row.get("keep") == "convolutions")
    assert round(torch["peak_bytes"] / block["peak_bytes"]) == 6
    return (
        f"{torch['ms_streamed'] / block['ms_streamed']:.1f} times the images a second of torchvision's DenseNet-264, "
        "in a sixth of the memory."
    )


def filled() -> str:
    rows = _by("compressed_fill_memory", "case")
    return (
        f"ResNet-50 trains with batches of {rows['uncompressed']['batch']:,} images in 16 GiB without compression, "
        f"and of {rows['compressed']['batch']:,} with it."
    )


def loops() -> str:
    lstm, gru = (_by(f"bptt_planned_{cell}", "name")["jax.lax.scan"]["temp"] / 2**20 for cell in ("lstm", "gru"))
    return f"Plain, the LSTM (256 features, batch 64) takes {lstm:.0f} MiB, the GRU (384 features, batch 32) {gru:.0f} MiB."


def precision() -> str:
    rows = load("long_context_precision", failed=True)[1]  # "error" is that of the gradient
    errors = [row["error"] for row in rows if row["recipe"] == "plain"]
    tiled = {row["seed"]: row["ratio"] for row in rows if row["recipe"] == "tiled=16+slots=2"}
    assert all(abs(row["ratio"] - tiled[row["seed"]]) < 0.01 for row in rows if "groups" in row["recipe"])
    return (
        f"the error of the gradient against float64 was {min(errors):.1%} to {max(errors):.1%}, and with tiles and a schedule "
        f"{min(tiled.values()):.2f} to {max(tiled.values()):.2f} times that; two or eight groups of heads changed it by less "
        "than 0.01 times"
    )


def chain() -> str:
    rows = [row for row in load("plan_chain_16384")[1] if "planned_ms" in row and row["policy"] != "everything"]
    ratios = [row["planned_ms"] / row["ms"] for row in rows]
    assert all(row["planned_bytes"] <= row["bytes"] for row in rows)
    assert max(ratios) < 1.005
    count = {10: "ten", 11: "eleven"}[len(load("plan_chain_16384")[1])]
    return (
        f"Eight Llama layers took as long as with {count} policies written by hand, or up to {1 - min(ratios):.0%} less, "
        "in as many bytes or fewer"
    )


def scanned() -> str:
    first, *others = (row for row in load("plan_scanned_131072")[1] if "planned_ms" in row)
    (attention,) = (row for row in others if row["policy"] == "attention")
    (more,) = {_percent(row["planned_ms"] / row["ms"] - 1) for row in others}
    assert first["planned_bytes"] < first["bytes"] < attention["bytes"]
    return (
        "In the first row the plan keeps attention's outputs, for which the policy that does so needs "
        f"{attention['bytes'] / 2**20:,.0f} MiB. In the others both programs run attention once; the plan takes less memory, "
        f"and {more} more time."
    )


def _ring_of_two() -> str:
    ring = _by("metp_memory_2", "parallelism")
    return _percent(ring["metp"]["milliseconds"] / ring["tp"]["milliseconds"] - 1)


SENTENCES: dict[str, list[Callable[[], str]]] = {
    "docs/guides/scan.md": [scan_guide],
    "docs/benchmarks/scan.md": [scan_by_flax, loops],
    "docs/benchmarks/plan.md": [scanned],
    "docs/guides/long-context.md": [precision],
    "docs/guides/chain.md": [chain],
    "docs/guides/plan.md": [head_and_loss, graph_net],
    "docs/guides/compress.md": [llama_codes, resnet_codecs],
    "docs/benchmarks/transformer.md": [llama_shares],
    "docs/which-tool.md": [resnet_times, lambda: f"{_ring_of_two()} of time against tensor parallelism on two GPUs"],
    "docs/guides/dense-block.md": [densenet],
    "docs/benchmarks/compress.md": [filled],
    "docs/guides/metp.md": [
        lambda: f"on two GPUs a layer took {_ring_of_two()} longer than with tensor parallelism.",
    ],
}
