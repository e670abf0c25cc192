"""`memjax.explain`: where the activation memory of a training step goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from memjax._core import check
from memjax._core.arguments import options_of
from memjax._core.arrays import is_float
from memjax._core.clear_errors import option_errors
from memjax._core.compat import primitive_name
from memjax._core.platforms import traced_for_arguments
from memjax._core.program.costs import device
from memjax._core.program.hlo import parse
from memjax._core.program.reasons import asked_for_reasons
from memjax._core.program.scopes import Paths
from memjax._explain.explanation import Explanation
from memjax._explain.kept import Group, collapsed, groups, kept_arrays, template
from memjax._explain.line import line
from memjax._explain.logits import fused_loss, logits_in
from memjax._explain.nnx_scopes import nnx_scopes
from memjax._explain.parts import Peak, Remedy, Row, Timeline
from memjax._explain.peak import peak_of
from memjax._explain.remedies import Remedies
from memjax._explain.warn import warnings_of
from memjax._measure import remat_compiler_options
from memjax._program import Gradient, Program, gradient, of_jax, traced


@traced_for_arguments
def explain(
    fn: Callable,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    compiler_options: dict[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Where the activation memory of `fn(*args, **kwargs)` goes, module by module, and what would save it.

    `fn` is a loss or a training step over any model. Where it has no backward pass of its own, its value and gradient are
    explained, `jax.value_and_grad(fn, argnums)`. It is traced and compiled, and never run.

        print(memjax.explain(loss, params, batch))

    Two questions are answered. What does the forward pass keep for the backward pass (`rows`)? These are the bytes of
    `memjax.measure(jax.value_and_grad(fn, argnums), ...).residual_bytes`, array by array, on one device. And what is alive when
    the compiled program needs most (`peak`)? The compiler fuses, schedules and frees, so this can be less than the residuals, or
    more; `peak.difference` leads from one to the other.

    Paths are those of Linen's and NNX's modules and of `jax.named_scope`; elsewhere those of the functions that make an
    array. Flax NNX modules get scopes while `fn` is traced; a jitted function that was traced before has none then, and
    paths of methods instead.

    Args:
      fn: as in `memjax.measure`.
      *args: as in `memjax.measure`: `jax.ShapeDtypeStruct`s do.
      argnums: where `fn` has no backward pass of its own, which of `args` are differentiated, as for `memjax.plan`: all their
        floats, and of NNX modules the `nnx.Param`. So is what a module or method given as `fn` is bound to. `notes` say which
        float arguments are not; of functions that NNX has jitted all floats are.
      compiler_options, static_argnums, static_argnames: as in `memjax.measure`.
      **kwargs: like `args`; they are not differentiated.

    Returns:
      An `Explanation`: print it, draw it with `plot`, keep it with `to_json`.

    Raises:
      TypeError: `fn` is not a function, or JAX cannot trace it with these arguments.
      ValueError: `fn` cannot be differentiated, or the compiler does not know an option.
    """
    check.compiler_options(compiler_options)
    static: dict[str, Any] = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    positions = check.argnums(argnums, len(args)) if args else []
    with nnx_scopes(), asked_for_reasons() as said:
        program = traced("explain", fn, args, kwargs, static)
        wrt = program.floats_of(positions) if program.has_arrays_in_order else None
        found = gradient(program, wrt)
    needed = remat_compiler_options(program.device.platform)
    options = needed if compiler_options is None else dict(compiler_options)
    if isinstance(found, str):
        if wrt is not None and not any(wrt) and any(map(is_float, program.jaxpr.in_avals)):
            found = f"argnums={argnums} has no floats to differentiate: say which arguments have"
        raise check.fail(ValueError, "fn", "a loss or a training step", fn, found)
    paths = Paths(fn)
    arrays = kept_arrays(found.residuals.device)
    on_host = kept_arrays(found.residuals.host)
    residual_bytes, offloaded_bytes = found.residuals.device.nbytes, found.residuals.host.nbytes
    logits, alike = logits_in(arrays), groups(arrays, paths)
    remedies = Remedies(paths, residual_bytes, device(program.device))
    notes = program.notes
    if wrt is not None and not found.is_own:
        notes += _not_differentiated(program, positions)
    peak, timeline = _compiled(program, found, paths, options, residual_bytes, notes)
    return Explanation(
        rows=tuple(
            _row(group, residual_bytes, paths, (*fused_loss(group, logits), *remedies.of(group))) for group in alike
        ),
        offloaded=tuple(_row(group, offloaded_bytes, paths) for group in groups(on_host, paths)),
        residual_bytes=residual_bytes,
        offloaded_bytes=offloaded_bytes,
        peak=peak,
        timeline=timeline,
        warnings=warnings_of([program.jaxpr, found.jaxpr], alike, logits, paths, residual_bytes),
        notes=(*notes, *dict.fromkeys(said.notes)),
        dropped=tuple(dict.fromkeys(said.dropped)),
        line=line(fn, options_of(fn) | _given(static) | {"budget": "40GiB"}) if found.is_own else line(),
    )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _not_differentiated(program: Program, positions: Sequence[int]) -> list[str]:
    """Which arguments have floats and are not differentiated, if any."""
    none = program.floats_of([])
    others = [i for i in range(program.given) if i not in positions and program.floats_of([i]) != none]
    if not others:
        return []
    chosen, left = (" and ".join(map(str, some)) for some in (positions, others))
    return [f"differentiated with respect to argument {chosen}, and not {left}: argnums chooses"]


def _row(group: Group, whole: int, paths: Paths, remedies: tuple[Remedy, ...] = ()) -> Row:
    readers: dict[tuple[str, str], list[str]] = {}
    for array in group.arrays:
        for place in array.readers:
            where = paths.of(place)
            readers.setdefault((primitive_name(place[-1]), template(where)), []).append(where)
    own = template(group.paths[0])
    aval = group.arrays[0].value.aval
    return Row(
        path=group.path,
        bytes=group.nbytes,
        count=sum(array.count for array in group.arrays),
        share=group.nbytes / whole if whole else 0.0,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        producer=group.producer,
        readers=tuple(name if at == own else f"{name} in {collapsed(where)}" for (name, at), where in readers.items()),
        source=group.source,
        remedies=remedies,
        why=group.why,
    )


def _compiled(
    program: Program, found: Gradient, paths: Paths, options: dict[str, Any], residual_bytes: int, notes: list[str]
) -> tuple[Peak | None, Timeline | None]:
    if found.is_own:
        lowered = program.stage.lower()
    else:
        inputs = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
            for aval, sharding in itertools.zip_longest(found.jaxpr.in_avals, program.shardings)  # cotangents come last
        ]
        lowered = jax.jit(jaxpr_as_fun(found.jaxpr)).lower(*inputs)
    with option_errors(options):
        compiled = of_jax(lowered.compile(compiler_options=options or None))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    module = parse(text or "")
    if memory is None or not module.is_scheduled:
        notes.append("peak unknown: the backend gives no memory analysis, or no schedule of its program")
        return None, None
    return peak_of(module, paths, residual_bytes, memory.temp_size_in_bytes)
