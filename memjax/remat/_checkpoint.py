"""`jax.checkpoint` with policies by name that are checked against the names in the function."""

import difflib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from memjax._core import check
from memjax._core.arguments import Parts, objects_in, put_changes, with_changes
from memjax._core.arrays import is_float
from memjax._core.backward.passes import vjp
from memjax._core.compat import bodies, eval_jaxpr
from memjax._core.lists import Arrays
from memjax._core.program.scopes import function_in, function_name
from memjax.remat._modules import wrapped
from memjax.remat.policies import NamePolicy


class UnmatchedNameWarning(UserWarning):
    """A policy keeps a name that no value of the checkpointed function has."""


def checkpoint(
    f: Callable,
    *,
    policy: NamePolicy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable:
    """`f`, which for the backward pass keeps its inputs and what `policy` names, and recomputes everything else.

    The same as `jax.checkpoint`, with three differences. What is no array in the arguments (`train=True`, a text, a number of
    Python) is static, as for `memjax.planned`. `policy` comes from `memjax.remat.policies`. And each time `f` is traced, a name
    of the policy that no value in it has (nor in the bodies of `jit`, `scan`, `cond`, custom derivatives and nested
    checkpoints) is an `UnmatchedNameWarning`, which lists the names there are.

    Memory between forward and backward: the inputs of `f`, plus the bytes of every value with a saved name;
    the bytes of values with an offloaded name are in host memory. Time: at most one more forward pass of `f`.
    On a CPU compile with `memjax.remat_compiler_options()`, or the compiler may undo the recomputation.

    Args:
      f: a function of pytrees of arrays and of NNX objects, whose variables it may update. What it closes over
        (parameters, Flax modules) is differentiated as usual. Or a Flax module or class of modules, Linen or NNX: the
        result is one of the same kind with the same variables, whose `__call__` is checkpointed. A class of Linen is
        named as by `nn.remat`; an instance of NNX shares its variables with the one given.
      policy: what to keep, `policies.save("conv_output") | policies.offload("mlp_hidden")`. None: nothing
        but the inputs.
      prevent_cse: as in `jax.checkpoint`: False inside a `scan`, whose loop keeps forward and recomputation
        apart.
      static_argnums: positions of arguments that are static as a whole, as in `jax.checkpoint`: arrays in them are not
        differentiated. Of a module's `__call__`, `self` is position 0, as in `nn.remat`.

    Raises:
      TypeError: `f` is not callable, `policy` is not from `memjax.remat.policies`, or a position is no integer.
      ValueError: when called, a position that no argument has; NNX objects whose structure `f` changes.
    """
    check.flag("prevent_cse", prevent_cse)
    if policy is not None and not isinstance(policy, NamePolicy):
        fix = "for the policies of jax.checkpoint_policies use jax.checkpoint"
        raise check.fail(TypeError, "policy", "made by memjax.remat.policies.save or offload", policy, fix)
    positions = static_argnums if isinstance(static_argnums, Sequence) else (static_argnums,)
    static = tuple(check.integer("static_argnums", position, what="positions of arguments") for position in positions)
    wrap = functools.partial(_checkpoint, policy=policy, prevent_cse=prevent_cse)
    module = wrapped(wrap, f, static)
    if module is not None:
        return module
    return wrap(check.function("f", f), static_argnums=static)


def _checkpoint(
    f: Callable, *, policy: NamePolicy | None, prevent_cse: bool, static_argnums: tuple[int, ...]
) -> Callable:
    @functools.wraps(f)
    def run(*args, **kwargs):
        arrays, of_arrays = _of_arrays(f, args, kwargs, static_argnums)

        # Called by jax.checkpoint when, and only when, it traces. `f` itself runs once; its equations are then
        # replayed.
        def checked(arrays):
            assert policy is not None
            jaxpr, out_shape = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
            _warn_of_unmatched(f, policy, jaxpr)
            return jax.tree.unflatten(jax.tree.structure(out_shape), jaxpr_as_fun(jaxpr)(*arrays))

        kept, to_keep = (of_arrays, None) if policy is None else (checked, policy.to_jax())
        out, changes = jax.checkpoint(kept, prevent_cse=prevent_cse, policy=to_keep)(arrays)
        put_changes(objects_in((args, kwargs)), changes)
        return out

    return run


def _of_arrays(
    f: Callable, args: tuple, kwargs: dict[str, Any], static_argnums: tuple[int, ...]
) -> tuple[Arrays, Callable[[Arrays], Any]]:
    """The arrays in the arguments, and `f` as a function of them to (result, changes in NNX objects). All else is static."""
    for position in static_argnums:
        if not -len(args) <= position < len(args):
            raise check.fail(ValueError, "static_argnums", f"positions among {len(args)} arguments", position)
    fixed = {position % len(args) for position in static_argnums}
    parts = Parts(tuple(None if i in fixed else arg for i, arg in enumerate(args)), kwargs)

    def of_arrays(arrays):
        others, named, _ = parts.rebuild(arrays)
        return with_changes(f, [arg if i in fixed else others[i] for i, arg in enumerate(args)], named)

    return parts.arrays, of_arrays


def _warn_of_unmatched(f: Callable, policy: NamePolicy, closed_jaxpr) -> None:
    present = set(_names(closed_jaxpr.jaxpr))
    if policy.names - present:
        # Only now, for it is a second trace: names that custom derivative rules give.
        present |= _names_when_differentiated(closed_jaxpr)
    occur = f"the names in it are {sorted(present)}" if present else "no value in it has a name"
    # The call stack is JAX's here, so the warning points to where `f` is defined.
    code = getattr(function_in(f), "__code__", None)
    where = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 1)
    for name in sorted(policy.names - present):
        near = difflib.get_close_matches(name, present, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        warnings.warn_explicit(
            f"policy keeps {name!r}, but nothing in {function_name(f)} is called so{hint}: {occur}. "
            "Name the value with jax.ad_checkpoint.checkpoint_name, or leave the name out of the policy.",
            UnmatchedNameWarning,
            filename=where[0],
            lineno=where[1],
        )


def _names(jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        # The form that names take under jax_remat3, off by default up to JAX 0.12.
        if type(eqn.params.get("_prim")).__name__ == "CheckpointName":
            yield eqn.params["_prim"].name
        for body in bodies(eqn):
            yield from _names(body)


def _names_when_differentiated(closed_jaxpr) -> set[str]:
    values: list[Any] = [*closed_jaxpr.consts, *closed_jaxpr.in_avals]
    structs = [jax.ShapeDtypeStruct(jnp.shape(value), value.dtype) for value in values]
    constants = len(closed_jaxpr.consts)

    def forward(*values):
        run = lambda inputs: eval_jaxpr(closed_jaxpr.jaxpr, inputs[:constants], inputs[constants:])
        return vjp(run, values, list(map(is_float, values)))[0]

    try:
        return set(_names(jax.make_jaxpr(forward)(*structs).jaxpr))
    except (NotImplementedError, TypeError, ValueError):
        return set()  # no derivative, so no rules; whoever differentiates it gets JAX's own error
