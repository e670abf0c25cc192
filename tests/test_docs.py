"""README and docs: their code runs, their links lead somewhere, their tables are those of the results, and the site builds."""

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from unittest import mock

import jax
import numpy as np
import pytest

import memjax
from benchmarks import public_decoder
from benchmarks.tables import __main__ as tables

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import run_page  # noqa: E402

DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
RAW = HOME.replace("github.com", "raw.githubusercontent.com")
ON_GITHUB = (f"{HOME}/blob/main/", f"{HOME}/tree/main/", f"{RAW}/main/")
each_page = pytest.mark.parametrize("page", PAGES)

# What README's short examples leave out.
README_SETUP = """
import jax

train_step = lambda state, batch: jax.tree.map(lambda p, g: p - g, state, jax.grad(lambda p: (p * batch).sum() ** 2)(state))
state, batch = jax.numpy.ones(3), jax.numpy.arange(3.0)
"""


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in text_of(page)])
def test_code_runs(page, capsys):
    with mock.patch.dict(os.environ), jax.numpy_dtype_promotion("standard"):
        names = run_page.run(ROOT / page, README_SETUP if page == "README.md" else "")
        if page == "README.md":
            batch = jax.numpy.arange(3.0)
            np.testing.assert_allclose(names["step"](jax.numpy.ones(3), batch), 1 - 2 * batch.sum() * batch)
    assert "nan" not in capsys.readouterr().out.lower()


NEEDED = [
    (page, name)
    for page in DOCS
    for name in re.findall(r'^```python title="needs (\w+)"$', text_of(page), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "library"), sorted(set(NEEDED)))
@pytest.mark.filterwarnings("ignore")  # those of the library
def test_code_for_other_libraries_runs_where_they_are_installed(page, library):
    pytest.importorskip(library)
    with jax.numpy_dtype_promotion("standard"):
        run_page.run(ROOT / page, library=library)


FIRST_SCREEN = 2000  # letters, about


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/index.md",
        "docs/quick-start.md",
        "docs/tutorial.md",
        "docs/faq.md",
        "docs/guides/out-of-memory.md",
    ],
)
def test_whoever_comes_first_meets_the_whole_step(page):
    assert "memjax.jit" in text_of(page)[:FIRST_SCREEN]


@each_page
def test_no_code_is_left_untested(page):
    languages = set(re.findall(r"^```(\S*)\n(?=.)", text_of(page), re.MULTILINE)) - {""}
    assert languages <= {"python", "sh", "yaml", "mermaid", "text", "bibtex"}


def test_the_guide_shows_the_ten_lines_that_the_benchmark_runs():
    (shown,) = blocks("docs/guides/long-context.md", "text")
    assert len([line for line in shown.splitlines() if line]) == 10
    assert "layers = stack_layers(model.layers)\n" in shown
    assert all(inspect.getsource(f) in shown for f in (public_decoder.layer, public_decoder.loss))


@each_page
def test_commands_name_files_and_flags_that_exist(page):
    commands = "\n".join(blocks(page, "sh") + blocks(page, "yaml")).replace("\\\n", " ")
    for script, rest in re.findall(r"python (\w+/\w+\.py)(.*)", commands):
        assert (ROOT / script).is_file()
        if script.startswith("experiments/"):
            fields = "\n".join(path.read_text() for path in (ROOT / "experiments").rglob("*.py"))
            for flag in re.findall(r"--([a-z-]+)", rest):
                assert re.search(rf"\b{flag.removeprefix('no-').replace('-', '_')}\b", fields), flag
    for module in re.findall(r"python -m (benchmarks\.\w+)", commands):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    for command in blocks(page, "sh"):
        shlex.split(command, comments=True)


def named(name):
    """What `memjax.…` stands for. A function may hide the module that it is in from attribute access."""
    package, _, attribute = name.rpartition(".")
    if package in sys.modules and hasattr(sys.modules[package], attribute):
        return getattr(sys.modules[package], attribute)
    return functools.reduce(getattr, name.split(".")[1:], memjax)


def slugs(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        here = (ROOT / page).parent
        for start in ON_GITHUB:
            if path.startswith(start):
                path, here = path.removeprefix(start), ROOT
        if "://" in path:
            continue
        target = (here / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if page in DOCS:
            assert here == ROOT or target.is_relative_to(ROOT / "docs"), f"{link} leaves the site: use an address"
        if anchor and target.suffix == ".md":
            assert anchor in slugs(str(target.relative_to(ROOT))), f"{page} links to {link}"


@each_page
def test_names_exist(page):
    """What a page calls `memjax.…` in code is there. CHANGELOG may speak of what is gone."""
    if page == "CHANGELOG.md":
        pytest.skip("speaks of what is gone, too")
    for name in re.findall(r"(?<![\w/.])memjax(?:\.[A-Za-z]\w*)+", text_of(page)):
        assert named(name) is not None


def test_reference_has_every_public_name_once():
    reference = "\n".join(text_of(page) for page in DOCS if page.startswith("docs/reference/"))
    documented = re.findall(r"^::: (memjax[\w.]*)", reference, re.MULTILINE)
    assert len(documented) == len(set(documented))
    found = {id(named(name)) for name in documented}
    pages = {"__version__", "remat", "compress", "shard"}  # of which the packages have pages of their own
    for package in (memjax, memjax.remat, memjax.compress, memjax.shard):
        missing = [name for name in package.__all__ if name not in pages and id(getattr(package, name)) not in found]
        assert missing == [], f"docs/reference/ lacks them, of {package.__name__}"


def test_docstrings_describe_parameters_that_exist():
    """The site takes names before a colon as they are: several may share a line."""
    for package in (memjax, memjax.remat, memjax.compress, memjax.shard):
        for name, value in ((name, getattr(package, name)) for name in package.__all__):
            section = re.search(r"^Args:\n((?:  .*\n|\n)*)", f"{inspect.getdoc(value)}\n", re.MULTILINE)
            if section and (inspect.isclass(value) or inspect.isroutine(value)):
                entries = re.findall(r"^  (\*{0,2}\w[\w, *]*):", section[1], re.MULTILINE)
                described = {word.strip("* ") for entry in entries for word in entry.split(",")}
                function = value if dataclasses.is_dataclass(value) or inspect.isroutine(value) else value.__init__
                parameters = set(inspect.signature(function).parameters)
                assert described <= parameters, f"{package.__name__}.{name}"


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_those_of_the_results(page):
    assert tables.written(page, tables.PAGES[page]) == text_of(page), "run `python -m benchmarks.tables`"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    assert sorted(f"docs/{page}" for page in re.findall(r"[\w/-]+\.md", config)) == DOCS


def test_architecture_names_what_is_there():
    paths = re.findall(r"`([\w/.]+(?:/|\.(?:py|md|yml|toml)))`", text_of("ARCHITECTURE.md"))
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("zensical", reason="needs the extra 'docs'")
    config = (ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: [{ROOT}]")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "mkdocs.yml").write_text(config)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert (tmp_path / "site" / "reference" / "remat" / "index.html").is_file()
    assert [*(tmp_path / "site").rglob("*.py")] == []
