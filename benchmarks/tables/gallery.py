"""The gallery: ten public training steps, and what they hold before and after."""

from typing import Any

from benchmarks.tables.markdown import Tables, load, table

_GITHUB = "https://github.com"
# What each is, and where.
_SHOWN = {
    "flax lm1b": ("a language model", "google/flax/tree/main/examples/lm1b"),
    "flax gemma": ("a language model, Gemma", "google/flax/tree/main/examples/gemma"),
    "flax wmt": ("translation", "google/flax/tree/main/examples/wmt"),
    "flax ogbg_molpcba": ("graph convolutions on molecules", "google/flax/tree/main/examples/ogbg_molpcba"),
    "haiku transformer": ("transformer", "google-deepmind/dm-haiku/tree/main/examples/transformer"),
    "equinox vision_transformer": ("vision transformer", "patrick-kidger/equinox/tree/main/docs/examples"),
    "equinox diffusion": ("diffusion by scores", "patrick-kidger/equinox/tree/main/docs/examples"),
    "optax adversarial_training": ("adversarial training", "google-deepmind/optax/tree/main/examples"),
    "purejaxrl ppo": ("reinforcement learning, environments included", "luchris429/purejaxrl/tree/main/purejaxrl"),
    "jax_md nequip": ("forces of molecules", "jax-md/jax-md"),
}


def steps() -> str:
    """A row for each step: its plan that holds the fewest bytes."""
    environment, rows = load("jit_public", failed=True)
    by_name = {row["name"]: row for row in rows}
    body = []
    for name, (what, where) in _SHOWN.items():
        row = by_name[name]
        least = min((one for one in row["rows"] if "compiled" in one), key=lambda one: one["compiled"])
        mib = [f"{nbytes / 2**20:.1f}" for nbytes in (row["plain"], least["compiled"])]
        share = f"{least['compiled'] / row['plain']:.0%}"
        body.append([f"[{name}]({_GITHUB}/{where})", what, *mib, share, _how(least)])
    header = ["step", "what it trains", "`jax.jit`, MiB", "`memjax.jit`, MiB", "share", "how"]
    return table(header, body, [environment], "gallery")


def _how(row: dict[str, Any]) -> str:
    ways = [f"{row['microbatches']} microbatches"] if row["microbatches"] > 1 else []
    ways += ["tiles"] if row["tiles"] else []
    return " and ".join(ways) or "activations computed again"


TABLES: Tables = {"gallery": steps}
