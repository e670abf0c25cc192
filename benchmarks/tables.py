"""Write the tables of README and of `docs/`, and their pictures, from results: `python -m benchmarks.tables`."""

import pathlib

from benchmarks import (
    compress_tables,
    densenet_tables,
    long_context_tables,
    loss_tables,
    metp_tables,
    overview_tables,
    plan_tables,
    scan_tables,
    transformer_tables,
)
from benchmarks.markdown import Tables

ROOT = pathlib.Path(__file__).parent.parent
PAGES: dict[str, Tables] = {
    "README.md": overview_tables.README,
    "docs/benchmarks/index.md": overview_tables.INDEX,
    "docs/benchmarks/dense-block.md": densenet_tables.TABLES,
    "docs/benchmarks/scan.md": scan_tables.TABLES,
    "docs/benchmarks/linear-cross-entropy.md": loss_tables.TABLES,
    "docs/benchmarks/compress.md": compress_tables.TABLES,
    "docs/benchmarks/metp.md": metp_tables.TABLES,
    "docs/benchmarks/long-context.md": long_context_tables.TABLES,
    "docs/guides/long-context.md": long_context_tables.GUIDE,
    "docs/benchmarks/plan.md": plan_tables.TABLES,
    "docs/benchmarks/transformer.md": transformer_tables.TABLES,
}


def written(page: str, tables: Tables) -> str:
    """The page with each table between its two comments."""
    text = (ROOT / page).read_text()
    for name, make in tables.items():
        before, old = text.split(f"<!-- {name} -->")
        after = old.split(f"<!-- /{name} -->")[1]
        text = f"{before}<!-- {name} -->\n{make()}\n<!-- /{name} -->{after}"
    return text


def main() -> None:
    for page, tables in PAGES.items():
        (ROOT / page).write_text(written(page, tables))
    densenet_tables.depth_picture(ROOT / "docs" / "densenet_memory.png")
    plan_tables.picture(ROOT / "docs" / "plan.png")
    transformer_tables.picture(ROOT / "docs" / "transformer.png")


if __name__ == "__main__":
    main()
