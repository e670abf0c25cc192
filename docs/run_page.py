"""Run the Python blocks of a page in order: `python docs/run_page.py docs/tutorial.md`. The tests run every page so."""

import pathlib
import re
import sys

BLOCK = re.compile(r"^```python(?: title=\"needs (\w+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: pathlib.Path, setup: str = "", library: str | None = None) -> dict[str, object]:
    """Run `setup` and then every block, all in one namespace. Returns that. Of blocks that need a library, those of `library`."""
    text = page.read_text()
    names: dict[str, object] = {"__name__": "page"}
    exec(setup, names)
    for block in BLOCK.finditer(text):
        if block[1] not in (None, library):
            continue
        # Empty lines before the code, so that a traceback has the page's own line numbers.
        lines_before = text[: block.start(2)].count("\n")
        exec(compile("\n" * lines_before + block[2], str(page), "exec"), names)
    return names


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(pathlib.Path(name))
