"""Sentences on compressed activations."""

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.record import RESULTS, mean_and_error
from benchmarks.tables.markdown import load
from benchmarks.tables.prose.rows import H200_BANDWIDTH, Row, by, percent, span

_TRAININGS = ("compressed_training", "compressed_training_alexnet", "compressed_training_resnet50")
_COARSE = "compressed_training_coarse"


def _layers(*names: str) -> list[list[Row]]:
    """The gradients of each training with compression."""
    return [row["layers"] for name in names for row in load(name)[1] if row["compressed"] and "layers" in row]


def _measured_by_predicted(*names: str) -> list[float]:
    return [layer["measured"] / layer["predicted"] for layers in _layers(*names) for layer in layers]


def _ratio(name: str, model: str) -> float:
    return statistics.mean(row["ratio"] for row in load(name)[1] if row["model"] == model and row["compressed"])


def predicted(before: str) -> str:
    assert all(abs(1 / one - 1) < 0.2 for one in _measured_by_predicted(*_TRAININGS))
    gradients, count = len(_measured_by_predicted(*_TRAININGS)), {11: "eleven"}[len(_layers(*_TRAININGS))]
    return before.format(gradients=gradients, trainings=count)


def within_deviation() -> str:
    shares = [statistics.mean(layer["within_sigma"] for layer in layers) for layers in _layers(*_TRAININGS)]
    return f"Divided by the deviation of their layer, {span(shares)} of the errors are within one"


def plain_runs() -> str:
    accuracies = [
        [100 * row["top1"] for row in load(name)[1] if row["model"] == "resnet50" and not row["compressed"]]
        for name in ("compressed_training_plain", "compressed_training_resnet50")
    ]
    first, second = (mean_and_error(one, 1) for one in accuracies)
    assert [len(one) for one in accuracies] == [3, 3]
    return f"Without compression the same three seeds gave {first}% in one run and {second}% in another."


def coarse() -> str:
    low = [1 - 1 / one for one in _measured_by_predicted(_COARSE) if 1 / one < 0.8]
    return (
        f"With 1.25, ResNet-50's ratio stays {_ratio(_COARSE, 'resnet50'):.1f}, and {len(low)} of "
        f"{len(_measured_by_predicted(_COARSE))} gradients have predictions too low by {span(low)}."
    )


def dither() -> str:
    worst = max(_measured_by_predicted("compressed_training_undithered"))
    return f"on ResNet-50 at 224x224 to {worst:.0f} times what independent ones would."


def signs() -> str:
    return f"had up to {max(_measured_by_predicted('compressed_training_signs')):.1f} times the predicted deviation."


def bitmaps() -> str:
    ratios = {"resnet18": _ratio("compressed_training", "resnet18"), "resnet50": _ratio(_TRAININGS[2], "resnet50")}
    saved = [1 - _ratio("compressed_training_one_bitmap", model) / ratio for model, ratio in ratios.items()]
    return f"Leaving out the bitmaps of channels without zeros saves {span(saved)} of what is kept."


def transactional() -> str:
    rows = [row for name in ("vgg16", "resnet50", "large") for row in load(f"compressed_{name}")[1]]
    both = [row for row in rows if {"milliseconds", "milliseconds_transactional"} <= {*row}]
    assert max(row["milliseconds_transactional"] - row["milliseconds"] for row in both) < 0.2
    return "`transactional` adds less than 0.2 ms to the step that it runs."


def bits_of_codes() -> str:
    return f"took {by('compressed_resnet50', 'case')['conv']['bits_per_value']:.1f} bits a value."


def filled() -> str:
    rows = by("compressed_fill_memory", "case")
    return (
        f"ResNet-50 trains with batches of {rows['uncompressed']['batch']:,} images in 16 GiB without compression, "
        f"and of {rows['compressed']['batch']:,} with it."
    )


def _of_loss(row: Row) -> float:
    return row["difference"] / row["test_loss"] if "difference" in row else 0.0


def paired() -> str:
    files = {path.stem: by(path.stem, "kind") for path in RESULTS.glob("paired_*.json")}
    vit = files["paired_vit_gpu"]["4 bits"]
    above = [row for rows in files.values() for row in rows.values() if _of_loss(row) > 0.005]
    assert above == [vit]
    off = max(abs(_of_loss(row)) for row in files["paired_vit_cpu"].values())
    last = f"{100 * vit['training_difference_of_last_tenth']:.1f} ± {100 * vit['training_difference_error']:.1f}%"
    return (
        f"In float32 on a CPU trainings stay close together, and the ViT's losses differ by {percent(off, 2)}. A plain "
        "training in bfloat16 that is repeated on a GPU ends up to "
        f"{files['paired_gpt_gpu']['plain']['largest_difference_of_a_seed_between_runs']} away from itself. The ViT with 4 bits "
        f"there is the only one that ends above the plain one by more than 0.5%. Its training loss does not, {last} in the last "
        "tenth, and neither do"
    )


def _public_errors() -> list[float]:
    """The largest error of a gradient, of each public model."""
    return [
        max(one[at]["compressed"] for one in row["gradients"] for at in ("first", "last"))
        for row in load("public_models")[1]
    ]


def public_at_most() -> str:
    assert max(_public_errors()) < 0.04
    return "With the default of 8 bits it was off by at most 4% of its norm on"


def llama_codes() -> str:
    rows = by("transformer_codes_llama", "case")
    cost = lambda case: f"{rows[case]['temp_mib'] / 2**10:.1f} GiB and {rows[case]['ms']:.1f} ms"
    policy, plain = rows["kept: attention, qkv, x2"], rows["plain"]
    return (
        f"8 bits take {cost('compressed, 8 bits')}, and the error is about that of bfloat16. With nothing recomputed it is "
        f"{cost('plain')}. 4 bits take {cost('compressed, 4 bits')}, and gradients are off by "
        f"{percent(rows['compressed, 4 bits']['gradient_error'])}: check the training. A policy of `jax.checkpoint` that "
        f"recomputes the feed-forward part takes {policy['temp_mib'] / 2**10:.1f} GiB and {policy['ms'] / plain['ms']:.2f} "
        "times the time of plain layers."
    )


def llama_shares() -> str:
    rows = by("transformer_codes_llama", "case")
    ratio = lambda case, key: rows[f"compressed, {case} bits"][key] / rows["plain"][key]
    assert ratio(8, "temp_mib") < 0.5
    off = " and ".join(percent(rows[f"compressed, {bits} bits"]["gradient_error"]) for bits in (4, 3))
    return (
        f"8 bits take less than half of the memory of plain layers for {ratio(8, 'ms'):.3f} times their time, 4 bits "
        f"{percent(ratio(4, 'temp_mib'))} of it for {ratio(4, 'ms'):.2f} times, 3 bits {percent(ratio(3, 'temp_mib'))} for "
        f"{ratio(3, 'ms'):.2f} times. In 4 and 3 bits gradients are off by {off}"
    )


def llama_distance() -> str:
    rows = by("transformer_codes_llama", "case")
    (order,) = {percent(row["gradient_error"], 1) for case, row in rows.items() if case.startswith("kept")}
    eight = rows["compressed, 8 bits"]["gradient_error"]
    return f"With 8 bits the distance is {percent(eight, 2)}, of which {order} is what any other order of operations makes."


def against_policies(model: str, how: str) -> list[tuple[float, float]]:
    """MiB and time of each row of this way; the time by that of the line that joins the best policies, less one.

    The best are those that no other one beats in both memory and time.
    """
    rows = sorted(load(f"transformer_codes_{model}")[1], key=lambda row: (row["temp_mib"], row["ms"]))
    best: list[Row] = []
    for row in rows:
        if row["case"].startswith("kept") and (not best or row["ms"] < best[-1]["ms"]):
            best.append(row)
    line = lambda mib: np.interp(mib, [row["temp_mib"] for row in best], [row["ms"] for row in best])
    return [
        (row["temp_mib"], float(row["ms"] / line(row["temp_mib"]) - 1)) for row in rows if row["case"].startswith(how)
    ]


def scanned_plans() -> str:
    off = against_policies("llama_scanned", "planned")
    rows = load("transformer_codes_llama_scanned")[1]
    assert off[0][0] < min(row["temp_mib"] for row in rows if not row["case"].startswith("planned"))
    (best_at, best), *_, (worst_at, worst) = sorted(off, key=lambda one: one[1])
    assert worst < 0
    return (
        f"Every plan takes less time than the line that joins the best policies at its memory, by {percent(-worst, 1)} at "
        f"{worst_at:,.0f} MiB to {percent(-best, 1)} at {best_at:,.0f}. The first one fits {off[0][0]:,.0f} MiB, less than the "
        "least that a policy takes."
    )


def _small(how: str) -> list[list[float]]:
    return [[off for _, off in against_policies(model, how)] for model in ("gpt2_medium", "vit_l")]


def small_codes() -> str:
    off = [share for of_model in _small("compressed") for share in of_model]
    return (
        f"It then does what a policy of `jax.checkpoint` does, and takes {span(off, 1)} longer than the "
        "line that joins the best of those written by hand."
    )


def small_plans() -> str:
    off = _small("planned")
    assert [(len(one), sum(share <= 0 for share in one)) for one in off] == [(6, 4), (6, 4)]
    return (
        "Of the six plans for each model four are on that line or below it, and the others take at most "
        f"{percent(max(map(max, off)), 1)} longer."
    )


def fastest_plans() -> str:
    found = []
    for model in ("gpt2_medium", "vit_l"):
        rows = load(f"transformer_codes_{model}")[1]
        policy = min(row["ms"] for row in rows if row["case"].startswith("kept"))
        plan = min((row for row in rows if row["case"].startswith("planned")), key=lambda row: row["ms"])
        least, most = (pick(row["temp_mib"] for row in rows) for pick in (min, max))
        assert (most - plan["temp_mib"]) / (most - least) > 0.75
        found.append((plan["temp_mib"], 1 - plan["ms"] / policy))
    (gpt, gpt_less), (vit, vit_less) = found
    return (
        f"From {gpt:,.0f} MiB (GPT-2) and {vit:,.0f} MiB (ViT) on they take {percent(gpt_less, 1)} and {percent(vit_less, 1)} "
        "less time than the fastest policy: more than three quarters of what lies between the least memory and that of plain"
    )


def resnet_codecs() -> str:
    rows = by("compressed_default", "case")

    def cost(case: str) -> tuple[str, str]:
        row = rows[case]
        return percent(row["temp_mib"] / rows["plain"]["temp_mib"]), percent(row["ms"] / rows["plain"]["ms"] - 1)

    two = cost("ErrorBounded(2**-5, bits_per_value=12), where=conv; ChannelQuantized(4) for the rest")
    default, four = cost("compressed(model)"), cost("compressed(model, bits=4)")
    return (
        f"in {two[0]} of the temporary memory for {two[1]} more time, where the default takes {default[0]} for {default[1]}, "
        f"and `bits=4` {four[0]} for {four[1]}."
    )


def resnet_times() -> str:
    rows = by("compressed_default", "case")
    more = [row["ms"] / rows["plain"]["ms"] - 1 for case, row in rows.items() if not case.startswith("plain")]
    return f"on a GPU {span(more)} of a ResNet-50 step, by codec"


def position_errors() -> str:
    rows = by("codec_dense_kernel", "codec")
    error = {bits: rows[f"PositionQuantized(bits={bits}, group=128)"]["relative_error"] for bits in (8, 6, 4, 3)}
    return (
        f"`PositionQuantized` has a relative error of {percent(error[8], 1)} at 8 bits, {percent(error[6], 1)} at 6, "
        f"{percent(error[4])} at 4 and {percent(error[3])} at 3"
    )


# Of the Llama layers: features, those of keys, those of the feed-forward layer, positions of a sequence, layers.
_WIDTH, _KEYS, _HIDDEN, _POSITIONS, _LAYERS = 2048, 512, 8192, 4096, 8
_CODED = ((8, _WIDTH), (6, _WIDTH), (5, _HIDDEN), (5, _HIDDEN))  # bits and features in a layer with 4 bits, on a GPU


def _repeated() -> float:
    """The share of a layer's arithmetic that runs again with codes of 4 bits: the products of queries, keys and values."""
    products = 2 * _WIDTH * (2 * _WIDTH + 2 * _KEYS + 3 * _HIDDEN)  # of a token, forward
    attention = 2 * _POSITIONS * _WIDTH  # causal: half of two products with all keys
    return 2 * _WIDTH * (_WIDTH + 2 * _KEYS) / (3 * products + 3.5 * attention)


def repeated_products() -> str:
    return f"by count {percent(_repeated(), 1)} of its arithmetic."


def llama_limits() -> str:
    """What 4 bits of Llama layers cost by count."""
    rows, tokens = by("transformer_codes_llama", "case"), 4 * _POSITIONS
    plain, four = rows["plain"], rows["compressed, 4 bits"]
    share = lambda nbytes: nbytes / 2**20 / plain["temp_mib"]
    codes = [tokens * features * (bits + 0.25) / 8 for bits, features in _CODED]
    kept = _LAYERS * (sum(codes) + tokens * (2 * _WIDTH + 4 * 32))  # with the input and log-sum-exps of 32 heads, exact
    factors = _LAYERS * sum(codes[-2:])
    factor, fewer = 2 * tokens * _HIDDEN, _LAYERS * 2 * tokens * _HIDDEN / 8
    read = sum(tokens * features * 2 for _, features in _CODED)
    moved = _LAYERS * (read + sum(codes)) / H200_BANDWIDTH * 1e3 / plain["ms"]
    more = four["ms"] / plain["ms"] - 1
    assert factors > kept / 2
    assert share(kept + factor) < four["temp_mib"] / plain["temp_mib"] < share(kept + factor) + 0.02
    return (
        f"What is kept takes {percent(share(kept), 1)} of the plain layers' memory by count, more than half of it codes of the "
        f"two factors of the feed-forward layer, of 5 bits, and one factor in bfloat16, {percent(share(factor), 1)}, is there "
        f"besides. Factors of 4 bits would take {percent(share(fewer), 1)} less, but their errors are twice as large. If all "
        f"time went into products and attention, the three products would take {percent(_repeated(), 1)} more, and one pass that "
        f"reads what is encoded and writes codes at 4.8 TB/s {percent(moved, 1)}: {percent(_repeated() + moved, 1)} together, "
        f"before any code is read, of {percent(more, 1)} that were measured."
    )


SENTENCES: dict[str, list[Callable[[], str]]] = {
    "docs/benchmarks/compress.md": [
        *(
            paired,
            within_deviation,
            plain_runs,
            coarse,
            dither,
            signs,
            bitmaps,
            transactional,
            bits_of_codes,
            filled,
        ),
        lambda: predicted(
            "All {gradients} gradients of the {trainings} trainings with compression have predictions within 20% of "
            "what was measured."
        ),
    ],
    "docs/benchmarks/transformer.md": [
        *(
            llama_shares,
            repeated_products,
            llama_limits,
            llama_distance,
            scanned_plans,
            small_codes,
            small_plans,
            fastest_plans,
        )
    ],
    "docs/guides/compress.md": [
        *(llama_codes, resnet_codecs, position_errors),
        lambda: f"Their gradients were off by {span(_public_errors(), 1)}.",
        lambda: (
            "is as fast as a policy written by hand at its memory, to about "
            f"{percent(max(map(max, _small('compressed'))), 1)}."
        ),
        lambda: (
            f"take {span([-off for _, off in against_policies('llama_scanned', 'planned')], 1)} less time than the line that "
            "joins the best policies at their memory."
        ),
    ],
    "docs/guides/adaptive.md": [
        lambda: predicted("[All {gradients} gradients of {trainings} trainings]"),
        lambda: predicted("had errors within 20% of the prediction."),
    ],
    "docs/how-it-works.md": [
        lambda: (
            f"[{max(_measured_by_predicted('compressed_training_undithered')):.0f} times as much as independent ones]"
        )
    ],
    "docs/which-tool.md": [resnet_times, public_at_most],
}
