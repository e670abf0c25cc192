"""What imports what: the arrows of ARCHITECTURE.md, no circles, and JAX's private modules in few places."""

import ast
import functools
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
PRIVATE_JAX = {
    "memjax._core.compat",
    "memjax._core.compat.partitioner",
    "memjax.compress._error_bounded.kernel_memory",
    "memjax._attention.cudnn",
}


def modules(folder: str) -> dict[str, pathlib.Path]:
    """Every module below a folder, by its name; a package is its `__init__`."""
    paths = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}


def imported(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """Names of the modules that a file imports, anywhere in it; a name of a package that is a module counts as that."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            assert node.module is not None
            parts = (f"{node.module}.{alias.name}" for alias in node.names)
            names.update(part if part in known else node.module for part in parts)
    return names


LIBRARY = modules("memjax")


@functools.cache
def imports_of_all() -> dict[str, set[str]]:
    """Not before a test asks: every process that runs tests imports this file."""
    return {name: imported(path, LIBRARY) for name, path in LIBRARY.items()}


def arrows() -> dict[str, set[str]]:
    """The rooms that each room may import, directly or through others, as the drawing in ARCHITECTURE.md has them."""
    drawing = re.search(r"```mermaid\nflowchart BT\n(.*?)```", ARCHITECTURE, re.DOTALL)[1]
    names = dict(re.findall(r"(\w+)\[(.+?)\]", drawing))
    name = lambda node: f"memjax.{names.get(node, node).replace('/', '.')}"
    direct: dict[str, set[str]] = {}
    for tail, head in re.findall(r"(\w+)(?:\[.+?\])? --> (\w+)", drawing):
        direct.setdefault(name(tail), set()).add(name(head))
        direct.setdefault(name(head), set())
    below: dict[str, set[str]] = {}
    for room in graphlib.TopologicalSorter(direct).static_order():  # raises CycleError
        below[room] = direct[room].union(*(below[other] for other in direct[room]))
    return below


def room_of(module: str, rooms: dict[str, set[str]]) -> str | None:
    """The room that a module is in. The files of `measure` are named after it."""
    module = re.sub(r"^memjax\._(measurement|program|residuals)$", "memjax._measure", module)
    return next((room for room in rooms if module == room or module.startswith(f"{room}.")), None)


def test_imports_follow_the_arrows():
    rooms = arrows()
    for module, imports in imports_of_all().items():
        assert not {name.split(".")[0] for name in imports} & {"experiments", "benchmarks", "tests"}, module
        room = room_of(module, rooms)
        if room is None:
            assert LIBRARY[module].name == "__init__.py", f"{module} is in no room of ARCHITECTURE.md"
            continue
        for other in imports:
            if other.split(".")[0] == "memjax":
                assert room_of(other, rooms) in {room, *rooms[room]}, f"{module} imports {other}"


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter(imports_of_all()).prepare()  # raises CycleError, which names the circle


def test_private_modules_of_jax_are_imported_behind_doors():
    assert {
        name for name, imports in imports_of_all().items() if any("jax._src" in other for other in imports)
    } <= PRIVATE_JAX


def having(pattern: str, rooms: tuple[str, ...] = ("memjax",)) -> set[str]:
    """The modules of some rooms that have a text in them."""
    inside = (name for name in LIBRARY if any(f"{name}.".startswith(f"{room}.") for room in rooms))
    return {name for name in inside if re.search(pattern, LIBRARY[name].read_text())}


ENGINE = (
    *(f"memjax.{room}" for room in ("_core", "_plan", "_jit", "_explain")),
    "memjax.remat._chain",
    "memjax.remat._scan",
)


def test_one_module_builds_the_passes_of_derivatives():
    """Others ask it; those named here take the derivative of an expression of their own."""
    own = {"memjax.remat._dense.xla", "memjax.remat._tiled.heads", "memjax.remat._scan.scan", "memjax._core.tiles"}
    own |= {"memjax.remat._chain.block", "memjax.shard._metp"}
    assert having(r"(?<!`)jax\.(vjp|linearize)\(") - own == {"memjax._core.backward.passes"}


def test_one_module_says_what_depends_on_what():
    walk = r"for (\w+) in [^\n]+ for \w+ in (variables\()?\1\.(in|out)vars"
    assert having(walk, ENGINE) == {"memjax._core.program.dataflow"}


def test_one_module_solves_flows():
    assert having(r"\bmaximum_flow\b|\bmax_flow\b") == {"memjax._core.backward.minimum_cut"}


def test_one_module_holds_the_rates_of_devices():
    examples = {"memjax.shard.overlap"}  # in its documentation
    assert having(r"\b\d+(\.\d+)?e1\d\b") - examples == {"memjax._core.program.costs"}


def test_one_module_makes_barriers():
    """Others ask whether an equation is one: the primitive ends in "_p"."""
    made = r"\blax\.optimization_barrier(?!_p\b|`)|\boptimization_barrier_p\.bind|import .*\boptimization_barrier\b"
    assert having(made) == {"memjax._core.barriers"}


def test_the_harness_knows_no_experiment():
    harness = modules("experiments/harness")
    for name, path in harness.items():
        others = imported(path, modules("experiments"))
        assert all(o in harness for o in others if o.startswith("experiments")), f"{name} imports an experiment"
