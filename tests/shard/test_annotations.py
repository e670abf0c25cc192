"""Annotations that can be evaluated, and the list of public names."""

import inspect
import typing

import pytest

import memjax
from memjax import shard

MODULES = (shard, shard.baselines, shard.overlap, shard.ring)


def public():
    yield memjax.linear_cross_entropy
    for module in MODULES:
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "").startswith("memjax"):
                yield value


@pytest.mark.parametrize("function", dict.fromkeys(public()), ids=lambda f: f.__qualname__)
def test_annotations_are_real_and_a_line_says_what_it_is(function):
    for f in (function, *(m for m in vars(function).values() if inspect.isfunction(m))):
        typing.get_type_hints(f)
    assert function.__doc__.splitlines()[0].strip().endswith((".", ":"))


def test_all_names_are_there():
    assert {"metp", "metp_attention", "vocab_cross_entropy", "MetpMlp", "overlap"} <= set(shard.__all__)
    assert all(hasattr(shard, name) for name in shard.__all__)
