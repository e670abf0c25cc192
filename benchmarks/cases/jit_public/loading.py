"""Public programs as they stand: files and cells of notebooks, with stand-ins for what only loads data or draws."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
from flax import nnx

_STANDINS = (
    "albumentations",
    "brax",
    "cv2",
    "datasets",
    "dp_accounting",
    "grain",
    "gym",
    "gymnasium",
    "IPython",
    "navix",
    "seaborn",
    "sentencepiece",
    "sklearn",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
    "torch",
    "torchvision",
    "tqdm",
    "transformers",
)


class Step(NamedTuple):
    """A training step.

    Attributes:
      f: the function.
      args: of it.
      options: that its authors give `jax.jit`.
      again: from what it returned and its arguments to those of the next step; NNX objects are updated in place.
    """

    f: Callable[..., Any]
    args: tuple
    options: dict[str, Any]
    again: Callable[[Any, tuple], tuple]


def begins_with(out: Any, args: tuple) -> tuple:
    """Results that take the places of the first arguments, in order; what is left over are metrics."""

    def kind(tree: Any) -> tuple[str, list[Any]]:
        return str(jax.tree.structure(tree)), [*map(jax.typeof, jax.tree.leaves(tree))]

    count = 0
    for one, other in zip(out, args, strict=False):
        if kind(one) != kind(other):
            break
        count += 1
    return (*out[:count], *args[count:])


def in_place(out: Any, args: tuple) -> tuple:
    return args


def first(out: Any, args: tuple) -> tuple:
    """The result, or its first part, is the state."""
    structure: Callable[[Any], Any] = jax.tree.structure
    whole = structure(out) == structure(args[0])
    return (out if whole else out[0], *args[1:])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of which everything can be imported and called, and nothing comes of it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] not in _STANDINS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        # Others ask whether arrays are of its types.
        value: Any = type(name, (), {}) if name[0].isupper() else mock.MagicMock(name=f"{self.__name__}.{name}")
        value.__version__ = "0"
        setattr(self, name, value)
        return value


sys.meta_path.insert(0, _Finder())  # the same whatever is installed


def module(path: pathlib.Path, *, above: int = 0, name: str | None = None) -> Any:
    """A file as a module, with its folder among those that modules are imported from.

    Args:
      path: of the file.
      above: how many folders higher the imports begin.
      name: under which it is imported; None: that of the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--models-path has no {path}")
    folder = path.parent
    for _ in range(above):
        folder = folder.parent
    sys.path.insert(0, str(folder))
    if above:
        return importlib.import_module(".".join(path.relative_to(folder).with_suffix("").parts))
    name = name or path.stem.lstrip("0123456789_")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # where dataclasses look
    spec.loader.exec_module(found)
    return found


def notebook(path: pathlib.Path, wanted: Sequence[str], **given: Any) -> Any:
    """The cells of a notebook that have one of these texts in them, run in order, as a module.

    Args:
      path: of the notebook.
      wanted: texts.
      given: names that exist before: sizes, and data in place of those that other cells load.
    """
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    if missing := [text for text in wanted if not any(text in cell for cell in cells)]:
        raise ValueError(f"{path} has no cell with {missing}")
    found = types.ModuleType("public_notebook")
    sys.modules[found.__name__] = found
    vars(found).update(given)
    for cell in cells:
        if any(text in cell for text in wanted):
            lines = [line for line in cell.splitlines() if not line.startswith(("!", "%"))]
            exec(compile("\n".join(lines), str(path), "exec"), vars(found))
    return found


class Reached(Exception):
    """A jitted function is about to be called."""

    def __init__(self, f: Callable[..., Any], args: tuple, options: dict[str, Any]):
        super().__init__(f)
        self.f, self.step_args, self.options = f, args, options


@contextlib.contextmanager
def _stopping_at(name: str) -> Iterator[None]:
    """Functions of this name that are jitted meanwhile raise `Reached` when they are called."""

    def stopping(jit: Callable[..., Any]) -> Callable[..., Any]:
        def jitted(f: Any = None, **options: Any) -> Any:
            if f is None:
                return lambda f: jitted(f, **options)
            if getattr(f, "__name__", None) != name:
                return jit(f, **options)

            def reached(*args: Any) -> Any:
                raise Reached(f, args, options)

            return reached

        return jitted

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(jax, "jit", stopping(jax.jit)))
        stack.enter_context(mock.patch.object(nnx, "jit", stopping(nnx.jit)))
        with contextlib.suppress(ImportError):
            equinox: Any = importlib.import_module("equinox")
            stack.enter_context(mock.patch.object(equinox, "filter_jit", stopping(equinox.filter_jit)))
        yield


def reached(name: str, run: Callable[[], Any], again: Callable[[Any, tuple], tuple] = begins_with) -> Step:
    """The step of that name that a public program jits and calls, at its first call."""
    try:
        with _stopping_at(name):
            run()
    except Reached as found:
        return Step(found.f, found.step_args, found.options, again)
    raise ValueError(f"no jitted function {name} was called")


def of_arrays(step: Step) -> Step:
    """A step under `equinox.filter_jit`: what is no array is no argument, and no result."""
    import equinox

    arrays, others = equinox.partition(step.args, equinox.is_array)

    def f(*arrays: Any) -> Any:
        return equinox.filter(step.f(*equinox.combine(arrays, others)), equinox.is_array)

    f.__name__ = step.f.__name__
    return Step(f, jax.tree.map(jax.numpy.asarray, arrays), {}, step.again)
