"""What every public name of the packages owes its users: a docstring, a line in `help`, annotations that can be evaluated."""

import importlib.metadata
import inspect
import pathlib
import re
import tomllib
import types
import typing

import pytest

import memjax
import memjax.compress
import memjax.remat
import memjax.shard

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = [memjax, memjax.compress, memjax.remat, memjax.shard]
NAMES = [(package, name) for package in PACKAGES for name in vars(package) if not name.startswith("_")]
label = lambda value: value if isinstance(value, str) else value.__name__
each_name = pytest.mark.parametrize(("package", "name"), NAMES, ids=label)

# Public modules inside the packages, and what each of them defines.
MODULES = [memjax.remat.policies, memjax.shard.baselines, memjax.shard.overlap, memjax.shard.ring]
MEMBERS = [
    (module, name)
    for module in MODULES
    for name, value in vars(module).items()
    if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
]


@pytest.mark.parametrize("package", PACKAGES, ids=label)
def test_all_has_the_public_names_and_no_other(package):
    public = {name for name in vars(package) if not name.startswith("_")}
    assert {name for name in package.__all__ if name != "__version__"} == public
    assert all(hasattr(package, name) for name in package.__all__)
    assert len(package.__all__) == len(set(package.__all__))


@each_name
def test_every_name_has_a_docstring_and_a_line_in_help(package, name):
    value = getattr(package, name)
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own
        assert not own.startswith(f"{name}("), "this is what dataclasses and named tuples write of themselves"
    assert re.search(rf"^\W*{name}\b.*\w{{3}}", package.__doc__, re.MULTILINE), f"help({package.__name__}) has no line"


def callables(value):
    """A function, or the methods and properties that a class of memjax defines itself."""
    if inspect.isroutine(value):
        yield value
    elif inspect.isclass(value):
        yield value
        for owner in value.__mro__:
            if not owner.__module__.startswith("memjax"):
                continue
            for name, member in vars(owner).items():
                member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                is_public = not name.startswith("_") or name in ("__init__", "__call__")
                if is_public and isinstance(member, types.FunctionType):
                    yield member


@pytest.mark.parametrize(("package", "name"), [*NAMES, *MEMBERS], ids=label)
def test_annotations_can_be_evaluated(package, name):
    for function in callables(getattr(package, name)):
        typing.get_type_hints(function)


@pytest.mark.parametrize(("module", "name"), MEMBERS, ids=label)
def test_a_line_says_what_each_member_of_a_public_module_is(module, name):
    assert getattr(module, name).__doc__.splitlines()[0].strip().endswith((".", ":"))


@pytest.mark.smoke
def test_version_is_the_one_of_the_metadata():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert memjax.__version__ == importlib.metadata.version("memjax") == declared


def test_the_citation_and_badges_say_what_the_package_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    lowest, bound = re.search(r"jax>=(.*?),<0\.(\d+)", " ".join(project["dependencies"])).groups()
    badges = "".join(re.findall(r"img.shields.io/badge/([^)]*)", (ROOT / "README.md").read_text()))
    wanted = [
        project["license"].replace("-", "--"),
        f"{pythons[0]}_to_{pythons[-1]}",
        f"{lowest}_to_0.{int(bound) - 1}",
    ]
    assert [text for text in wanted if text not in badges] == []


def test_pictures_of_the_readme_can_be_seen_from_anywhere():
    found = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    places = [place for place in found if not place.startswith("https://img.shields.io/badge/")]
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    start = home.replace("github.com", "raw.githubusercontent.com") + "/main/"
    assert places
    for place in places:
        assert place.startswith(start)
        assert (ROOT / place.removeprefix(start)).is_file()
