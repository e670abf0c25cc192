"""Equal layers as one pytree with a leading layer axis, which loops over layers take, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memjax._core import check
from memjax._core.arrays import as_array


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
