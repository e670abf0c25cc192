"""Arguments of any kind as the arrays in them, so that JAX can trace a function that was not written for `jax.jit`."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from memjax._core import check
from memjax._core.compat import jit_options

_JAX_JIT = type(jax.jit(lambda: None))


def is_jitted(fn: Any) -> bool:
    """Whether `fn` traces itself: it comes from `jax.jit`, from a variant of it in Flax NNX, or is a step of memjax."""
    kind = type(fn)
    alike = kind.__module__.startswith(("flax.nnx.", "memjax.")) and hasattr(kind, "trace") and hasattr(kind, "lower")
    return isinstance(fn, _JAX_JIT) or alike


def options_of(f: Any) -> dict[str, Any]:
    """The options of `jax.jit` with which `f` is jitted. Numbers of arguments do not count those that it is bound to."""
    if isinstance(f, types.MethodType):
        inner, bound, names = f.__func__, 1, {}
    elif isinstance(f, functools.partial):
        inner, bound, names = f.func, len(f.args), f.keywords
    else:
        return jit_options(f)
    found = options_of(inner)
    statics = found.get("static_argnums", ())
    for name, value in found.items():
        if name.endswith("_argnums"):
            found[name] = tuple(i - bound for i in value if i >= bound)
        elif name.endswith("_argnames"):
            found[name] = tuple(one for one in value if one not in names)
        elif name == "in_shardings" and isinstance(value, tuple):
            found[name] = value[bound - sum(i < bound for i in statics) :]
    return {name: value for name, value in found.items() if value}


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, or the type of one."""
    return check.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_array_or_number(leaf: Any) -> bool:
    """Likewise, or a number of Python, which `jax.jit` traces as a scalar.

    `jax.jit` traces True and False, too. Here they are not: mostly they are flags, as of dropout, that a function tests by `if`.
    """
    return is_array(leaf) or (isinstance(leaf, int | float | complex) and not isinstance(leaf, bool))


class Static:
    """An argument that is not traced, whatever it is: a static one, or a number that a function is bound to."""

    def __init__(self, value: Any):
        self.value = value


def check_options(f: Callable[..., Any], options: dict[str, Any]) -> None:
    """Says which of the options `jax.jit` refuses, and why."""
    check.compiler_options(options.get("compiler_options"))
    one_by_one = [{name: value} for name, value in options.items()]
    for some in (*one_by_one, options):
        try:
            jax.jit(f, **some)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            [name] = some if len(some) == 1 else ["options"]
            kind = ValueError if isinstance(error, ValueError | RuntimeError) else TypeError
            value = some if name == "options" else some[name]
            raise check.fail(kind, name, "what jax.jit takes", value, f"it says {str(error)!r}") from error


class Statics:
    """Which arguments `jax.jit` takes to be static.

    Args:
      f: the function.
      static_argnums, static_argnames: as for `jax.jit`.
    """

    def __init__(self, f: Callable[..., Any], static_argnums: Any, static_argnames: Any):
        listed = lambda given, kind: () if given is None else (given,) if isinstance(given, kind) else tuple(given)
        numbers: Sequence[int] = listed(static_argnums, int)
        names: Sequence[str] = listed(static_argnames, str)
        try:
            parameters = list(inspect.signature(f).parameters)
        except (TypeError, ValueError):
            parameters = []
        count = len(parameters)
        self._numbers = {number % count if number < 0 and count else number for number in numbers}
        self._numbers |= {parameters.index(name) for name in names if name in parameters}
        self._names = {*names, *(parameters[i] for i in self._numbers if i < count)}

    def marked(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with the static ones marked as such."""
        marked = tuple(Static(arg) if i in self._numbers else arg for i, arg in enumerate(args))
        return marked, {name: Static(value) if name in self._names else value for name, value in kwargs.items()}

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
        """(the static values, the other arguments)."""
        if not self._numbers and not self._names:
            return (), args, kwargs
        numbered = tuple((i, arg) for i, arg in enumerate(args) if i in self._numbers)
        named = tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self._names)
        others = tuple(arg for i, arg in enumerate(args) if i not in self._numbers)
        for name, value in (*((f"argument {i}", arg) for i, arg in numbered), *named):
            try:
                hash(value)
            except TypeError:
                fix = "pass a tuple or a number, or do not name it static"
                raise check.fail(TypeError, name, "hashable, as it is static", value, fix) from None
        return (numbered, named), others, {name: value for name, value in kwargs.items() if name not in self._names}

    def joined(
        self, args: tuple, kwargs: dict[str, Any], others: tuple, named: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments with these in place of those that are not static: what `split` gives, taken back."""
        given = iter(others)
        return tuple(arg if i in self._numbers else next(given) for i, arg in enumerate(args)), kwargs | named


def _bound(tree: Any) -> Any:
    is_number = lambda leaf: is_array_or_number(leaf) and not is_array(leaf)
    return jax.tree.map(lambda leaf: Static(leaf) if is_number(leaf) else leaf, tree, is_leaf=is_nnx)


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Static) else leaf


def is_nnx(value: Any) -> bool:
    """Whether `value` is an object that Flax NNX can update in place."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def objects_in(tree: Any) -> list[Any]:
    """The NNX objects in a pytree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_nnx) if is_nnx(leaf)]


def with_changes(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What `f` returns, and what it changes in the NNX objects among its arguments, for `put_changes`.

    A transform of JAX gives `f` copies of the objects: what changes in them is lost, unless it is a result as well.

    Raises:
      ValueError: `f` adds or removes variables of the objects, or changes what is no variable.
    """
    objects = objects_in((args, kwargs))
    before, old = _split(objects)
    out = f(*args, **kwargs)
    after, new = _split(objects)
    if after != before:
        names = ", ".join(type(one).__name__ for one in objects)
        raise ValueError(
            f"NNX objects must keep their structure where memjax differentiates a call, but the call changes one of {names}: it "
            "adds, removes or replaces variables, submodules or other attributes. Make them in __init__, and change a variable "
            "by variable[...] = value"
        )
    return out, [None if is_same else value for is_same, value in zip(map(operator.is_, old, new), new, strict=True)]


def _split(objects: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The structure of NNX objects, and the values of their variables now."""
    graph, state = nnx.split(objects)
    return graph, jax.tree.leaves(state)


def put_changes(objects: Sequence[Any], changes: Sequence[Any], state: Any = None) -> None:
    """Changes the objects as `with_changes` tells. What stays may be a value of an outer trace, and is not written to.

    Args:
      state: of the objects, by `nnx.split`, where the caller has it: splitting takes as long as a small step.
    """
    if any(change is not None for change in changes):
        leaves, tree = jax.tree.flatten(nnx.split(objects)[1] if state is None else state)
        new = [old if change is None else change for old, change in zip(leaves, changes, strict=True)]
        nnx.update(objects, jax.tree.unflatten(tree, new))


class Parts:
    """Arguments taken apart into `arrays` and what is static. A variable that several NNX objects share is there once.

    Args:
      args, kwargs: the arguments.
      is_dynamic: whether a leaf is one of `arrays`.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], is_dynamic: Callable[[Any], bool] = is_array):
        self._is_dynamic = is_dynamic
        self._structure: Any
        self._leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
        objects = [leaf for leaf in self._leaves if is_nnx(leaf)]
        self._graph, state = nnx.split(objects)
        plain = [leaf for leaf in self._leaves if not is_nnx(leaf)]
        self._value_structure: Any
        self._values, self._value_structure = jax.tree.flatten((plain, state))
        self.arrays = [value for value in self._values if is_dynamic(value)]

    def rebuild(self, arrays: Sequence) -> tuple[tuple, dict[str, Any], list]:
        """(args, kwargs, the NNX objects among them) with other arrays. The objects are new; the original ones do not change."""
        remaining = iter(arrays)
        values = [next(remaining) if self._is_dynamic(value) else value for value in self._values]
        plain, state = self._value_structure.unflatten(values)
        objects = nnx.merge(self._graph, state)
        plain_left, objects_left = iter(plain), iter(objects)
        leaves = [next(objects_left if is_nnx(leaf) else plain_left) for leaf in self._leaves]
        args, kwargs = self._structure.unflatten(map(_value, leaves))
        return args, kwargs, objects


def of_arrays(fn: Callable, parts: Parts) -> Callable[[Sequence], tuple[Any, list]]:
    """`fn` as a function of `parts.arrays`. It gives the arrays of the result and all that `fn` changes in place.

    Items of a tuple stay apart, so that a loss is still told from what comes with it.
    """

    def run(arrays: Sequence) -> tuple[Any, list]:
        args, kwargs, objects = parts.rebuild(arrays)
        out = fn(*args, **kwargs)
        unchanged = {id(array) for array in arrays}
        updates = [leaf for leaf in _arrays(objects) if id(leaf) not in unchanged]
        if isinstance(out, _Updated):
            out, updates = out.result, updates + _arrays(out.updates)
        return tuple(map(_arrays, out)) if isinstance(out, tuple) else _arrays(out), updates

    return run


def _arrays(tree: Any) -> Any:
    if is_array(tree):
        return tree
    leaves = jax.tree.leaves(tree, is_leaf=is_nnx)
    states = [nnx.split(leaf)[1] if is_nnx(leaf) else leaf for leaf in leaves]
    return [leaf for leaf in jax.tree.leaves(states) if is_array(leaf)]


def unbound(fn: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, tuple, dict[str, Any]]:
    """The function behind a module, a method or a `functools.partial`; what it is bound to joins the arguments.

    Closed over, a module's variables would be constants of the program, and its updates would be lost. Numbers that it is
    bound to stay as they are.
    """
    while True:
        if isinstance(fn, nn.Module):
            fn, args, kwargs = _linen(fn, "__call__", args, kwargs)
        elif isinstance(fn, types.MethodType) and _is_linen_method(fn):
            module: Any = fn.__self__
            fn, args, kwargs = _linen(module, fn.__name__, args, kwargs)
        elif isinstance(fn, types.MethodType) and (is_jitted(fn.__func__) or _has_state(fn.__self__)):
            fn, args = fn.__func__, (_bound(fn.__self__), *args)
        elif isinstance(fn, functools.partial) and _binds_state(fn):
            fn, args, kwargs = fn.func, (*_bound(fn.args), *args), {**_bound(fn.keywords), **kwargs}
        elif not is_jitted(fn) and _has_state(fn):
            fn, args = type(fn).__call__, (_bound(fn), *args)
        else:
            break
    if is_jitted(fn):
        args, kwargs = jax.tree.map(_value, (args, kwargs), is_leaf=is_nnx)
    return fn, args, kwargs


def _has_state(value: Any) -> bool:
    """Whether `value` is an NNX object, or another pytree that holds arrays."""
    return is_nnx(value) or any(map(is_array, jax.tree.leaves(value)))


def _binds_state(partial: functools.partial) -> bool:
    bound = jax.tree.leaves((partial.args, partial.keywords), is_leaf=is_nnx)
    return (
        is_jitted(partial.func)
        or isinstance(partial, jax.tree_util.Partial)
        or any(map(is_nnx, bound))
        or unbound(partial.func, (), {})[0] is not partial.func
    )


def _is_linen_method(method: types.MethodType) -> bool:
    module = method.__self__
    return isinstance(module, nn.Module) and module.scope is not None and not hasattr(nn.Module, method.__name__)


class _Updated:
    """A result, and the new values of variables that come with it."""

    def __init__(self, result: Any, updates: Any):
        self.result, self.updates = result, updates


def _linen(module: nn.Module, method: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, tuple, dict]:
    if module.scope is None:
        raise TypeError(
            f"fn must be a Linen module bound to variables, got {type(module).__name__} without: "
            "call measure(module.bind(variables), ...) or measure(module.apply, variables, ...)"
        )
    rngs = {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}
    mutable = module.scope.mutable
    detached, variables = module.unbind()

    def apply(variables: Any, rngs: dict, *args: Any, **kwargs: Any) -> Any:
        out = detached.apply(variables, *args, rngs=rngs, mutable=mutable, method=method, **kwargs)
        return _Updated(*out) if mutable is not False else out

    return apply, (variables, rngs, *args), kwargs
