"""Compresses the calls of Linen modules, which keep their fields, variables and names."""

from __future__ import annotations

import flax.core.lift
import flax.linen as nn
from flax.linen.transforms import lift_transform

from memjax.compress._transform.adapters.function import call_compressed
from memjax.compress._transform.array_codecs import ArrayCodecs
from memjax.compress._transform.keep.which import Which


def compressed_module(module: nn.Module, codecs: ArrayCodecs, which: Which) -> nn.Module:
    """The module, compressed as a whole. `which` selects by named scopes, of which each Linen module makes one."""
    original = type(module)

    def compress(function, variables=True, rngs=True):
        def inner(scope_of, repack, variable_groups, rng_groups, *args, **kwargs):
            def pure(lasting, passing):
                args, kwargs = passing
                scope = scope_of(*lasting)
                out = function(scope, *args, **kwargs)
                return out, repack(scope)

            variables_and_keys = variable_groups, rng_groups
            return call_compressed(pure, variables_and_keys, (args, kwargs), user=original, codecs=codecs, which=which)

        return flax.core.lift.pack(inner, (variables,), (variables,), (rngs,), name="compressed", enable_kwargs=True)

    new = lift_transform(compress, original)
    # Linen names submodules after their classes.
    new.__name__, new.__qualname__, new.__module__ = original.__name__, original.__qualname__, original.__module__
    # Inside another module's call `module` is registered there already: it is that object which has to change.
    result = module if module.parent is not None else module.clone()
    object.__setattr__(result, "__class__", new)
    return result
