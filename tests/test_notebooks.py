"""Notebooks: every cell runs, in order, and nothing of a run is kept in them."""

import json
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/memjax/memjax/blob/main/notebooks/"
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path):
    return json.loads(path.read_text())["cells"]


@each
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_cells_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    with jax.numpy_dtype_promotion("standard"):
        for cell in cells(path):
            if cell["cell_type"] == "code":
                # What installs memjax where it is not there is IPython's.
                code = re.sub(r"^( *)%.*$", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)
                exec(compile(code, f"{path.name}:{cell['id']}", "exec"), names)
    assert "nan" not in capsys.readouterr().out.lower()


@each
def test_outputs_are_not_kept(path):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells(path))


@each
def test_the_site_links_to_them_on_colab(path):
    assert f"{COLAB}{path.name}" in (ROOT / "docs/quick-start.md").read_text()
