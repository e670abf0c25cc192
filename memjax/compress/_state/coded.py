"""`memjax.compressed` of an optimizer: its state in codes between steps."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from memjax._core import check
from memjax._core.barriers import barrier
from memjax.compress._state import noise
from memjax.compress._state.minifloat import Coded, block_axis
from memjax.compress._state.operations import decode, encode
from memjax.compress._state.regions import by_kernels
from memjax.compress._state.roles import ROLES, known_class, map_roles
from memjax.compress._state.transformation import like

BITS = (8, 4)


class CodedState(NamedTuple):
    """State of a compressed optimizer. It consists of arrays and can be saved like any other.

    Attributes:
      step: updates so far; with a value's place it chooses how that is rounded.
      inner: state of the wrapped transformation, with codes in place of large arrays.
    """

    step: Int32[Array, ""]
    inner: Any


def coded_optimizer(
    tx: optax.GradientTransformation, bits: int | None, where: Any, wanted: Callable[[str, Any], bool], smallest: int
) -> optax.GradientTransformation:
    """`memjax.compressed` of an optimizer; `wanted` is what `where` says of a path and an array."""
    width = 8 if bits is None else bits
    if isinstance(width, bool) or width not in BITS:
        raise check.fail(ValueError, "bits", "8 or 4 for an optimizer", bits)
    extra = optax.with_extra_args_support(tx)

    def init(params: Any) -> CodedState:
        state, step, any_coded = extra.init(params), jnp.zeros((), jnp.int32), False

        def coded(role: str, path: str, x: Any) -> Any:
            nonlocal any_coded
            if not (_is_real(x) and x.size >= smallest and block_axis(x.shape) is not None and wanted(path, x)):
                return x
            any_coded = True
            # Most are zero. The compiler would compute their codes by itself, in seconds for each, if it knew.
            x = x + barrier(jnp.zeros((), x.dtype))
            return encode(x, noise.seed(step, 0), bits=width, signed=role == "signed")

        result = map_roles(coded, state)
        if where is not None and not any_coded:
            raise check.fail(
                ValueError, "where", "a pattern or predicate for paths in the state that has some in it", where
            )
        _warn_of_unknown(state, params, smallest)
        return CodedState(step, result)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, CodedState]:
        if not isinstance(state, CodedState):
            raise check.fail(TypeError, "state", "a state in codes", state, "pass what init returned")
        state, updates = compute(state, updates, params, extra_args)
        return updates, state

    @by_kernels
    def compute(state: CodedState, updates: Any, params: Any, extra_args: Any) -> tuple[Any, ...]:
        updates, inner = extra.update(updates, _decoded(state.inner), params, **extra_args)
        step = optax.safe_increment(state.step)
        return CodedState(step, _encoded(inner, state.inner, step)), updates

    return like(tx, init, update)


def decoded(state: Any) -> Any:
    """The state as the optimizer without `memjax.compressed` has it: arrays in place of codes.

    To go on without codes, or with others: see `encoded_like`.

    Args:
      state: of an optimizer that is compressed, or has compressed ones in it. A state without codes is returned as it is.
    """
    return jax.tree.map(lambda node: _decoded(node.inner) if _is_state(node) else node, state, is_leaf=_is_state)


def encoded_like(state: Any, template: Any) -> Any:
    """A state without codes in the codes that another has: the inverse of `decoded`.

    Args:
      state: of the optimizer without `memjax.compressed`.
      template: the state of the compressed optimizer, or `jax.eval_shape(tx.init, params)`; its values do not matter, but for
        the count of steps, by which values are rounded.

    Raises:
      ValueError: the states are not of the same optimizer.
    """

    def encoded(old: Any, new: Any) -> Any:
        if not _is_state(old):
            return new
        step = jnp.zeros((), jnp.int32) if isinstance(old.step, jax.ShapeDtypeStruct) else old.step
        return CodedState(step, _encoded(new, old.inner, step))

    return jax.tree.map(encoded, template, state, is_leaf=_is_state)


def _decoded(inner: Any) -> Any:
    return jax.tree.map(lambda node: decode(node) if _is_code(node) else node, inner, is_leaf=_is_code)


def _encoded(inner: Any, old: Any, step: Int32[Array, ""]) -> Any:
    """A state in the codes of an old one."""
    tree: Any
    leaves, tree = jax.tree.flatten(old, is_leaf=_is_code)
    # Signed and unsigned codes are numbered separately. So the two moments of an array get the same seed, and one hash
    # gives the random numbers of both.
    seeds: list[Any] = []
    counts = {True: itertools.count(), False: itertools.count()}

    def encoded(x: Any, code: Coded) -> Coded:
        number = next(counts[code.signed])
        if number == len(seeds):
            seeds.append(noise.seed(step, number))
        return encode(x, seeds[number], bits=code.bits, signed=code.signed)

    pairs = zip(tree.flatten_up_to(inner), leaves, strict=True)
    return tree.unflatten([encoded(x, code) if _is_code(code) else x for x, code in pairs])


def _is_real(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.floating))


def _is_code(node: Any) -> bool:
    return isinstance(node, Coded)


def _is_state(node: Any) -> bool:
    return isinstance(node, CodedState)


def _warn_of_unknown(state: Any, params: Any, smallest: int) -> None:
    """States of other libraries may hold anything. They stay exact, and this says so where it costs memory."""
    shapes = {jnp.shape(p) for p in jax.tree.leaves(params) if jnp.size(p) >= smallest}
    unknown = set()

    def see(node: Any) -> None:
        if known_class(node):
            children = [
                value for name, value in zip(node._fields, node, strict=True) if name not in ROLES[type(node).__name__]
            ]
        elif hasattr(node, "_fields"):
            children = list(node)
            if any(shape in shapes for value in children for shape in _shapes_of(value)):
                unknown.add(type(node).__name__)
        else:
            children = jax.tree.leaves(node, is_leaf=lambda child: child is not node and hasattr(child, "_fields"))
        for child in children:
            if not isinstance(child, jax.Array):
                see(child)

    see(state)
    if unknown:
        warnings.warn(
            f"memjax.compressed does not know what is in {', '.join(sorted(unknown))}: arrays there stay exact.",
            stacklevel=3,
        )


def _shapes_of(value: Any) -> set[tuple[int, ...]]:
    """The shapes of the float arrays in a tree, without those in states inside of it."""
    is_state = lambda node: hasattr(node, "_fields")
    leaves = jax.tree.leaves(value, is_leaf=is_state)
    return {leaf.shape for leaf in leaves if not is_state(leaf) and _is_real(leaf)}
