"""Sentences of the guides, but for those on compressed activations."""

from collections.abc import Callable

import memjax
from benchmarks.tables.markdown import load
from benchmarks.tables.prose.rows import by, percent


def scan_guide() -> str:
    rows = by("bptt_planned_lstm", "name")
    plain, small = rows["jax.lax.scan"], rows["budget 15MiB"]
    return f"takes {small['temp'] / 2**20:.0f} MiB instead of {plain['temp'] / 2**20:.0f} in {small['ratio']:.2f} of the time."


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


def solves() -> str:
    rows = [row for row in load("solve_cpu")[1] if row["times"] is None]
    own, few, direct = (
        next(row for row in rows if row["how"] == how)
        for how in ("RecursiveCheckpointAdjoint()", "RecursiveCheckpointAdjoint(16)", "DirectAdjoint()")
    )
    least = min((row for row in rows if row["how"].startswith("budget")), key=lambda row: row["temp"])
    mib = lambda row: f"{row['temp'] / 2**20:.2f} MiB"
    return (
        f"took {mib(own)} of temporary memory with `RecursiveCheckpointAdjoint()`, and {mib(least)} by a plan, in "
        f"{least['ratio']:.2f} of its time. `DirectAdjoint()` without a plan took {mib(direct)} and {direct['ratio']:.1f} times "
        f"its time, `RecursiveCheckpointAdjoint(checkpoints=16)`, chosen by hand, {mib(few)} and {few['ratio']:.2f} times its "
        "time."
    )


def solves_at_times() -> str:
    rows = {row["how"].split()[0]: row for row in load("solve_cpu")[1] if row["times"] is not None}
    own, planned = rows["RecursiveCheckpointAdjoint()"], rows["budget"]
    return (
        f"With {own['times']} times in `SaveAt(ts=...)` it was {own['temp'] / 2**20:.2f} MiB by default, and "
        f"{planned['temp'] / 2**20:.2f} MiB in {planned['ratio']:.2f} of the time by a plan."
    )


def densenet() -> str:
    rows = load("densenet264_step")[1]
    torch = next(row for row in rows if row["library"] == "torch" and not row["memory_efficient"])
    block = next(row for row in rows if row.get("keep") == "convolutions")
    assert round(torch["peak_bytes"] / block["peak_bytes"]) == 6
    return (
        f"{torch['ms_streamed'] / block['ms_streamed']:.1f} times the images a second of torchvision's DenseNet-264, "
        "in a sixth of the memory."
    )


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


def never_slower() -> str:
    rows = [
        row
        for kind in ("unrolled", "scanned")
        for tokens in (16384, 131072)
        for row in load(f"plan_{kind}_{tokens}")[1]
        if "planned_ms" in row
    ]
    assert all(row["planned_ms"] < 1.01 * row["ms"] and row["planned_bytes"] <= row["bytes"] for row in rows)
    return "[never slower than a policy written by hand](benchmarks/plan.md) by more than 1%, in no more memory."


def ring_of_two() -> str:
    ring = by("metp_memory_2", "parallelism")
    return percent(ring["metp"]["milliseconds"] / ring["tp"]["milliseconds"] - 1)


def workspace() -> str:
    """The workspace of cuDNN's attention. Llama-3-8B has 32 heads of 128 features."""
    rows = load("jit_ahead_scan", failed=True)[1]
    (size,) = {round(row["workspace"] / (row["batch"][0] * row["batch"][1] * 32 * 128)) for row in rows}
    return f"about {size} bytes for each token, head and feature of a head"


def kib_of_a_token() -> str:
    rows = [row for row in load("long_context_compiled_whole")[1] if (row["shape"], row["tokens"]) == ("8B", 2**20)]
    kib = {row["recipe"]: row["kib_per_local_token"] for row in rows}
    return (
        f"compiles to {kib['tiled+groups+slots=8+bits=4']:.1f} KiB per token at 1,048,576 tokens, where `slots=4` alone takes "
        f"{kib['tiled+groups+slots=4']:.1f}."
    )


def all_weights() -> str:
    rows = by("optimizer_state", "kind")
    return (
        "weights and state of Llama-3-8B's shape take "
        f"{rows['rounded, 8 bits']['weights_and_state_bytes']:.2f} bytes a parameter."
    )


def larger_model() -> str:
    return f"five of a model of {load('finetune_large_14b')[1][0]['parameters'] / 1e9:.1f} 10^9 parameters."


def gradient_of_first_tokens() -> str:
    norms = load("finetune_gradients")[1][0]["first_norms"]
    return f"grows {round(norms[0] / norms[-1], -2):,.0f} times between the last layer and the embedding"


def losses_after_a_step() -> str:
    one, other = (load(f"finetune_large_14b_{name}")[1][0]["losses"][1] for name in ("16384", "16384_h200"))
    return f"were {one:.1f} after one step by one plan, and {other:.1f} by another"


def beside_torch() -> str:
    rows = by("optimizer_state_h200", "kind")
    ms, compiling = ({kind: row[key] for kind, row in rows.items()} for key in ("ms", "compile_s"))
    ours, theirs = ms["rounded, 8 bits"], "torchao, rounded, 8 bits"
    return (
        f"on an H200 optax's AdamW in float32 takes {ms['float32'] / ms['torch, float32']:.2f} of the time of "
        "`torch.optim.AdamW(fused=True)`, and bfloat16 weights rounded at random with 8 bits "
        f"{ours / ms['torch, float32']:.2f}: {ours:.1f} ms, where torchao's `AdamW8bit`, whose weights and state take as many "
        f"bytes, takes {ms[theirs]:.1f}. torchao compiles its update for {compiling[theirs]:.0f} s, memjax for "
        f"{compiling['rounded, 8 bits']:.0f} s."
    )


def state_on_the_host() -> str:
    with_host, without = (load(f"finetune_large_14b_{name}")[1][0] for name in ("host", "16384_h200"))
    gib, seconds = ([row[key] for row in (with_host, without)] for key in ("held", "step_s"))
    return (
        f"On one H200 a step of {with_host['parameters'] / 1e9:.1f} 10^9 parameters and {with_host['tokens']:,} tokens took "
        f"{seconds[0]:.2f} s in {gib[0] / 2**30:.1f} GiB, with state and activations on the host, and {seconds[1]:.2f} s in "
        f"{gib[1] / 2**30:.1f} GiB, with nothing there: {percent(seconds[1] / seconds[0])} of the throughput."
    )


def few_slots() -> str:
    passes = [memjax.remat.schedule(1000, slots).forward_steps / 1000 for slots in (2, 1)]
    return f"1,000 steps run {passes[0]:.0f} times each with two slots, and {passes[1]:.0f} times with one."


SENTENCES: dict[str, list[Callable[[], str]]] = {
    "docs/guides/scan.md": [scan_guide, few_slots],
    "docs/guides/long-context.md": [precision, kib_of_a_token],
    "docs/guides/chain.md": [chain],
    "docs/guides/diffrax.md": [solves, solves_at_times],
    "docs/guides/plan.md": [head_and_loss, graph_net],
    "docs/guides/dense-block.md": [densenet],
    "docs/guides/jit.md": [workspace],
    "docs/guides/optimizer.md": [
        all_weights,
        larger_model,
        gradient_of_first_tokens,
        losses_after_a_step,
        beside_torch,
        state_on_the_host,
    ],
    "docs/guides/metp.md": [lambda: f"on two GPUs a layer took {ring_of_two()} longer than with tensor parallelism."],
    "docs/which-tool.md": [never_slower, lambda: f"{ring_of_two()} of time against tensor parallelism on two GPUs"],
}
