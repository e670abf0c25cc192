"""Numbers in sentences of README and docs: those that are measured are those of `benchmarks/results/`."""

import pathlib
import re

import pytest

from benchmarks.tables import __main__ as tables
from benchmarks.tables import prose
from tests.not_measured import NOT_MEASURED

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

# What looks measured: a number with a decimal point, or with a unit that measurements have.
FIGURE = re.compile(
    r"(?<![\w.^-])\d[\d,]*(?:\.\d+|(?:\.\d+)?(?:\s?%|[\s-](?:[KMGT]i?B|[mµ]?s|seconds?|minutes?|times)\b))"
)
# Versions, models and GPUs have numbers in their names.
NAMES = re.compile(
    r"\b(?:Python|JAX|Apache|Llama|Version) \d+(?:\.\d+)+(?: to \d+(?:\.\d+)+)?| \(\d+(?:\.\d+)+ to \d+(?:\.\d+)+\)"
    r"|\b[AHB]\d00 (?:of |\()\d+ GB"
)


def figures(text: str, checked: list[str], tables: list[str]) -> list[str]:
    """What looks measured in a page outside of code, `checked` and the generated `tables`, and what stands around it."""
    for name in tables:
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", " ", text, flags=re.DOTALL)
    text = " ".join(re.sub(r"^```.*?^```", " ", text, flags=re.MULTILINE | re.DOTALL).split())
    for one in checked:
        assert one in text, f"no longer there: {one}"
    for one in checked:
        text = text.replace(one, " ")
    text = NAMES.sub(" ", re.sub(r"\]\([^)]*\)|`[^`]*`", " ", text))
    return [text[max(0, one.start() - 40) : one.end() + 30] for one in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", PAGES)
def test_what_looks_measured_is_that_of_the_results(page):
    """A new figure belongs into `benchmarks/tables/prose/`, or into `tests/not_measured.py` if it is no measurement."""
    sentences = [sentence() for sentence in prose.SENTENCES.get(page, [])]
    checked = sentences + NOT_MEASURED.get(page, [])
    assert figures((ROOT / page).read_text(), checked, list(tables.PAGES.get(page, ()))) == []


@pytest.mark.parametrize(
    "sentence",
    [
        *(
            "7% less",
            "in 2.3 GiB",
            "at 512 MiB",
            "12 ms",
            "70 µs",
            "48 s",
            "1.24 of the time",
            "3 times",
            "5 minutes",
            "a 40 GiB array",
        )
    ],
)
def test_a_new_figure_is_found(sentence):
    text = f"On an H100 (80 GB) with JAX 0.11.2 it takes {sentence}.\n\n```python\nx = 0.5\n```\n`0.3` [text](a-1.5.md)"
    assert len(figures(text, [], [])) == 1
    assert figures(text, [sentence], []) == []


def test_what_is_no_measurement_is_on_pages_that_there_are():
    assert set(NOT_MEASURED) <= set(PAGES)
