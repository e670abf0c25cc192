"""What modules of NNX and Linen share: layers of a `Sequential`, stacks of equal layers, and an RNN's scan over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax._core import check
from memjax._core.arrays import as_array
from memjax._core.clear_errors import call_errors
from memjax._core.compat import is_tracer


def check_layers(layers: Any, module: type) -> None:
    """Raises unless all layers are functions or instances of modules."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise check.fail(TypeError, "layers", "a sequence of modules and functions", layers)
    if not layers:
        raise check.fail(ValueError, "layers", "at least one module or function", layers)
    for i, layer in enumerate(layers):
        is_other = isinstance(layer, nn.Module | nnx.Module) and not isinstance(layer, module)
        if is_other or not callable(layer):
            fix = "memjax.remat.Chain takes modules of NNX, memjax.remat.linen.Chain those of Linen" if is_other else ""
            raise check.fail(TypeError, f"layers[{i}]", "a module or a function", layer, fix)
        check.function(f"layers[{i}]", layer)


def call(layer: Callable[..., Any], x: Any) -> Any:
    """The output of a layer: a tuple gives its arguments, a dict its keyword arguments, anything else its one argument."""
    with call_errors("layers", layer, {"an input": x}):
        if isinstance(x, tuple):
            return layer(*x)
        return layer(**x) if isinstance(x, Mapping) else layer(x)


def run_cell(
    rnn: Any,
    inputs: jax.Array,
    carry: Any,
    initial_carry: Callable[[tuple[int, ...]], Any],
    seq_lengths: Any,
    flip_sequences: Callable[..., jax.Array],
    flags: dict[str, bool],
) -> Any:
    """Flax's `RNN.__call__` around another scan.

    `rnn.scan_cell(wrap, carry, xs, reverse)` scans `wrap(cell)` over rows of `xs`; `initial_carry(shape)` makes a carry for
    inputs of one step; `flags` are those of `flags_of_call`.
    """
    return_carry, time_major, reverse, keep_order = flags.values()
    feature_axes, scan = rnn.cell.num_feature_axes, rnn.scan_cell
    time = 0 if time_major else inputs.ndim - (feature_axes + 1)
    batch_axes = inputs.ndim - feature_axes - 1
    length = inputs.shape[time]
    if seq_lengths is not None:
        batch = inputs.shape[1 : inputs.ndim - feature_axes] if time_major else inputs.shape[: -feature_axes - 1]
        if not jnp.issubdtype(check.array("seq_lengths", seq_lengths).dtype, jnp.integer) or seq_lengths.shape != batch:
            raise check.fail(TypeError, "seq_lengths", f"integers of shape {batch}, one for each sequence", seq_lengths)
        known = None if is_tracer(seq_lengths) else np.asarray(seq_lengths)
        if known is not None and not np.all((known >= 0) & (known <= length)):
            raise check.fail(ValueError, "seq_lengths", f"in [0, {length}], the steps of inputs", known.tolist())
    carry = initial_carry(inputs.shape[:time] + inputs.shape[time + 1 :]) if carry is None else carry

    def flip(x):
        return flip_sequences(x, seq_lengths, num_batch_dims=batch_axes, time_major=time_major)

    # Without padding the scan itself runs backwards, and the inputs are not copied.
    backwards = reverse and seq_lengths is None
    if reverse and not backwards:
        inputs = flip(inputs)
    xs = jnp.moveaxis(inputs, time, 0)
    carry = check.arrays("initial_carry", carry)

    def step_of(cell, carry, x):
        with call_errors("cell", type(cell), {"a carry": carry, "inputs of one step": x}):
            return cell(carry, x)

    if seq_lengths is None or not return_carry:
        carry, ys = scan(lambda cell: partial(step_of, cell), carry, xs, backwards)
    else:
        final = (jnp.minimum(seq_lengths, length) - 1) % length

        def wrap(cell):
            def step(carry, x):
                carry, last = carry
                x, i = x
                carry, y = step_of(cell, carry, x)
                return (
                    carry,
                    jax.tree.map(lambda new, old: jnp.where(_as_wide(i == final, new), new, old), carry, last),
                ), y

            return step

        # Zeros of the carry's own kind.
        start = (carry, jax.tree.map(jnp.zeros_like, carry))
        (_, carry), ys = scan(wrap, start, (xs, jnp.arange(length, dtype=seq_lengths.dtype)), backwards)
    outputs = jax.tree.map(lambda y: jnp.moveaxis(y, 0, time), ys)
    if backwards and not keep_order:
        outputs = jax.tree.map(lambda y: jnp.flip(y, time), outputs)
    if reverse and not backwards and keep_order:
        outputs = jax.tree.map(flip, outputs)
    return (carry, outputs) if return_carry else outputs


def flags_of_call(rnn: Any, inputs: Any, *values: Any) -> dict[str, bool]:
    """The flags that a module is called with, those that are None being the module's. Checked, and so are the inputs."""
    flags = {
        name: check.flag(name, getattr(rnn, name) if value is None else value)
        for name, value in zip(("return_carry", "time_major", "reverse", "keep_order"), values, strict=True)
    }
    least = rnn.cell.num_feature_axes + 1
    if check.array("inputs", inputs).ndim < least:
        raise check.fail(ValueError, "inputs", f"an array of at least {least} axes, time and features", inputs)
    return flags


def _as_wide(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


# Equal layers as one pytree with a leading layer axis, which loops over layers take, and back.


def stack_layers(layers: Sequence[Any]) -> Any:
    """Equal layers as one pytree of the same kind, each of whose arrays has a leading layer axis.

    What `jax.lax.scan` and `memjax.remat.scan` take as `xs`, so that a program does not grow with the number of layers:

        stacked = stack_layers(model.layers)
        x, _ = memjax.remat.scan(lambda x, layer: (layer(x), None), x, stacked, slots=6)

    Args:
      layers: NNX modules, or pytrees of arrays such as Linen's variables, alike in everything but the values of arrays.

    Returns:
      an NNX module whose variables hold all layers, or a pytree like each of `layers`. In the scan's step it is one layer
      again. What a layer changes there (running statistics, counts of random numbers) is lost, as it is with any pytree:
      return it from the step to keep it.

    Memory: the arrays are copied. Stack once, before training, and train what is stacked: inside a differentiated step all
    parameters, and their gradients, would exist twice.

    Raises:
      ValueError: no layers, layers without arrays, or that differ; the message names the layer and the leaf or attribute.
      TypeError: `layers` is no sequence, or a leaf is no array.
    """
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise check.fail(TypeError, "layers", "a sequence of modules or pytrees", layers)
    if not layers:
        raise check.fail(ValueError, "layers", "at least one module or pytree", layers)
    for i, layer in enumerate(layers):
        _refuse_other_leaves(f"layers[{i}]", layer)
    for i, layer in enumerate(layers[1:], start=1):
        if found := _difference(layers[0], layer):
            path, wanted, got = found
            raise ValueError(
                f"layers[{i}]{path} must be {wanted}, as layers[0]{path}, got {got}: stack equal layers only, and unequal "
                "ones in stacks of their own"
            )
    return jax.tree.map(lambda *leaves: jnp.stack([as_array(leaf) for leaf in leaves]), *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """The layers of what `stack_layers` gave, as copies: for `model.layers = nnx.List(unstack_layers(stacked))`, say.

    Args:
      stacked: an NNX module or a pytree whose arrays all have the same leading axis.

    Returns:
      a list of modules or pytrees of the same kind, without that axis.

    Raises:
      ValueError: no arrays, or arrays of different leading axes.
    """
    first = ""
    count: int | None = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
        name = f"stacked{jax.tree_util.keystr(path)}"
        if not jnp.ndim(leaf):
            raise check.fail(ValueError, name, "an array with a leading layer axis", leaf, "stack_layers makes such")
        if count is None:
            first, count = name, len(leaf)
        if len(leaf) != count:
            raise check.fail(ValueError, name, f"of {count} layers, as {first}", leaf)
    if count is None:
        raise check.fail(ValueError, "stacked", "a module or pytree with arrays", stacked)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)]


def _refuse_other_leaves(name: str, layer: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    if not leaves:
        fix = "leave out what stands for no layer"
        raise check.fail(ValueError, name, "a module or pytree with arrays", layer, fix)
    for path, leaf in leaves:
        if not check.is_number_or_array(leaf):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise check.fail(TypeError, where, "an array or a number", leaf, "keep static values out of the pytree")


def _difference(a: Any, b: Any, path: str = "") -> tuple[str, str, str] | None:
    """Where two trees begin to differ, and what they have there; values of arrays do not count."""
    (below_a, node_a), (below_b, node_b) = _one_level(a), _one_level(b)
    if node_a != node_b:
        arrays = {jax.tree_util.keystr(key, simple=True) for key, _ in [*below_a, *below_b]}
        return path, *_in_words(a, b, arrays)
    if not below_a:
        return None
    if jax.tree_util.treedef_is_leaf(node_a):
        types = [jax.typeof(as_array(leaf)).update(weak_type=False) for leaf in (a, b)]
        return None if types[0] == types[1] else (path, types[0].str_short(), types[1].str_short())
    for (key, x), (_, y) in zip(below_a, below_b, strict=True):
        if found := _difference(x, y, path + jax.tree_util.keystr(key)):
            return found
    return None


def _one_level(tree: Any) -> tuple[list[Any], Any]:
    """The children of a node with their keys, and what kind of node it is."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _in_words(a: Any, b: Any, children: set[str]) -> tuple[str, str]:
    """How two nodes differ whose kinds do: not in their children."""
    if type(a) is not type(b):
        return type(a).__name__, type(b).__name__
    if isinstance(a, dict):
        return f"a dict of {sorted(map(str, a))}", f"one of {sorted(map(str, b))}"
    if isinstance(a, list | tuple):
        return f"of length {len(a)}", f"one of {len(b)}"
    ours, theirs = ({**getattr(node, "__dict__", {})} for node in (a, b))
    for name in [*ours, *theirs]:
        pair = [repr(values.get(name, "nothing")) for values in (ours, theirs)]
        if name not in children and pair[0] != pair[1] and not name.startswith("_pytree"):
            return f"a {type(a).__name__} with {name} = {pair[0]:.100}", f"one with {name} = {pair[1]:.100}"
    return f"a {type(a).__name__} with the same static attributes", "one with others"
