"""What `benchmarks.dominated` measures: a network with a loss, and the same loss by special tools."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
from flax import nnx

Loss = Callable[..., Any]


class Tool(NamedTuple):
    """The loss by a special tool.

    Attributes:
      loss: of the same arguments as the plain one.
      rounds: whether its gradients are rounded; then those of the plan beside it may be, too.
    """

    loss: Loss
    rounds: bool = False


class Network(NamedTuple):
    """A network at a size for a CPU.

    Attributes:
      loss: plain JAX; its first argument is differentiated.
      args: arrays.
      tools: by name.
    """

    loss: Loss
    args: tuple[Any, ...]
    tools: Mapping[str, Tool]


def split(model: nnx.Module) -> tuple[Any, Any, Any]:
    """The graph of a model, its parameters as a dict of arrays, and the rest of its state."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    return parts[0], nnx.to_pure_dict(parts[1]), parts[2]


def within(change: Callable[[], contextlib.AbstractContextManager[Any]], loss: Loss) -> Loss:
    """The loss, traced while something of the model is changed."""

    def changed(*args: Any) -> Any:
        with change():
            return loss(*args)

    return changed


@contextlib.contextmanager
def checkpointed(*classes: type, policy: Any = None) -> Iterator[None]:
    """Meanwhile each call of these NNX modules is under `jax.checkpoint`."""

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **named: Any) -> Any:
            arrays, others = _split(args)
            again = nnx.remat(lambda self, *arrays: call(self, *others(arrays), **named), policy=policy)
            return again(self, *arrays)

        return run

    with contextlib.ExitStack() as stack:
        for one in classes:
            stack.enter_context(mock.patch.object(one, "__call__", calling(one.__call__)))
        yield


def _split(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], list[Any]]]:
    """The arrays among positional arguments, and a function that puts others in their places."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, jax.Array)]

    def joined(arrays: Any) -> list[Any]:
        found = dict(zip(places, arrays, strict=True))
        return [found.get(i, arg) for i, arg in enumerate(args)]

    return [args[i] for i in places], joined


@contextlib.contextmanager
def linen_checkpointed(module: Any, name: str, policy: Any = None) -> Iterator[None]:
    """Meanwhile the Linen class of that name in a Python module is under `nn.remat`; its variables are called the same."""
    original = getattr(module, name)
    again: Any = nn.remat(original, policy=policy)
    again.__name__ = original.__name__
    with mock.patch.object(module, name, again):
        yield
