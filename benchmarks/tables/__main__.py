"""Write the tables of README and of `docs/`, and their pictures, from results: `python -m benchmarks.tables`."""

import pathlib

from benchmarks.tables import (
    compress,
    densenet,
    dominated,
    gallery,
    jit,
    long_context,
    loss,
    mesh,
    metp,
    optimizer,
    overview,
    plan,
    scan,
    transformer,
)
from benchmarks.tables.markdown import Tables

ROOT = pathlib.Path(__file__).parents[2]
PAGES: dict[str, Tables] = {
    "README.md": overview.README | optimizer.README,
    "docs/benchmarks/index.md": overview.INDEX,
    "docs/gallery.md": gallery.TABLES,
    "docs/benchmarks/dense-block.md": densenet.TABLES,
    "docs/benchmarks/scan.md": scan.TABLES,
    "docs/benchmarks/linear-cross-entropy.md": loss.TABLES,
    "docs/benchmarks/compress.md": compress.TABLES,
    "docs/benchmarks/metp.md": metp.TABLES,
    "docs/benchmarks/mesh.md": mesh.TABLES,
    "docs/benchmarks/jit.md": jit.TABLES,
    "docs/benchmarks/long-context.md": long_context.TABLES,
    "docs/guides/long-context.md": long_context.GUIDE,
    "docs/guides/optimizer.md": optimizer.GUIDE,
    "docs/benchmarks/plan.md": plan.TABLES | dominated.TABLES,
    "docs/guides/plan.md": plan.GUIDE,
    "docs/benchmarks/transformer.md": transformer.TABLES,
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
    densenet.depth_picture(ROOT / "docs" / "densenet_memory.png")
    plan.picture(ROOT / "docs" / "plan.png")
    dominated.picture(ROOT / "docs" / "dominated.png")
    transformer.picture(ROOT / "docs" / "transformer.png")


if __name__ == "__main__":
    main()
