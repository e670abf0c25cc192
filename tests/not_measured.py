"""What looks measured on pages and is not: settings, sizes, definitions, arithmetic, and bounds that tests have.

`tests/test_prose.py` reads it. A number that someone has measured belongs into `benchmarks/results/` and
`benchmarks/tables/prose/` instead.
"""

NOT_MEASURED: dict[str, list[str]] = {
    "docs/benchmarks/compress.md": [
        "GPT of 0.5M parameters",
        "ViT of 0.5M parameters",
        "have steps of up to 1.25 mean magnitudes.",
    ],
    "docs/benchmarks/dense-block.md": ["72.7M parameters", "The same network in 12 GiB of GPU memory"],
    "docs/benchmarks/jit.md": [
        *("JAX may use 75% of the card, its default.", "A budget is 70% or 50% of the step's"),
        "cannot be kept within 80 GiB as it is written",
        "the arrays of a feed-forward layer take 3.5 GiB each.",  # 131,072 x 14,336 in bfloat16
    ],
    "docs/benchmarks/metp.md": ["80 GB of each.", "More than 100% says"],
    "docs/benchmarks/plan.md": ["plans get 1.2 times the bytes of that.", "takes over 1.03 of its time."],
    "docs/gallery.md": ["The budget was 50% or 70% of the step's"],
    "docs/guides/adaptive.md": ["`sigma` (0.01)", "`coarsest` (1.0)"],
    "docs/guides/compress.md": [
        "where e = 1.5 / (2^bits - 1)",
        *("| 8.125 (4.125); 8.25 (4.25) unless bfloat16 |", "4 or 3, and 0.25 |"),
        "in 8.125 or 4.125 bits per value, or 8.0625 or 4.0625 in bfloat16,",
        "compute capability 9.0 and later",
    ],
    "docs/guides/dense-block.md": ["19% more arithmetic of convolutions in DenseNet-264"],  # 58% of it is in 1x1 ones
    "docs/guides/linear-cross-entropy.md": ["the logits take 4 GiB in bfloat16"],
    "docs/guides/optimizer.md": [
        # 2, and a power of two for 32 neighbours.
        *("| 2.06 | 6.06 |", "| 2.06 | 4.06 |", "| 1.06 | 3.06 |"),
        # A closed form, and the bounds of tests/compress/state/test_coded.py.
        "with b2 = 0.99 a closed form has 7% of the update's own",
        "in 4 bits it is less than 60%.",
        *("at the 3.35 TB/s of the data sheet", "Numbers above 2.5e38 in a state"),
        "XLA pins no more than 64 GB of the host's memory",  # its default
    ],
    "docs/guides/plan.md": [
        "the compiler reserves 512 KiB besides",  # what the page's code prints
        "up to 5% over the budget if it would be 2% faster",
        *("costs little: 0.1% of the step altogether", "takes over 5% more than predicted"),
    ],
    "docs/guides/trainers.md": ["haliax 1.4.dev453"],
    "docs/tutorial.md": ["About 34 MiB of temporary memory"],  # what the page's code prints
}
