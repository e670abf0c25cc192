"""The default implementation, against what was measured."""

import json
import pathlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax._linear_cross_entropy import choice
from memjax._linear_cross_entropy.gpu import hopper
from memjax._linear_cross_entropy.options import Operands, Options
from tests.linear_cross_entropy.oracle import example, grad, plain, relative_error, value_and_grad

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results/cross_entropy_choice.json"


class Shape(NamedTuple):
    tokens: int
    dim: int
    vocabulary: int
    dtype: str
    wanted: str  # arrays that are differentiated: "xw", or "x" for a frozen head


def measured():
    """{shape: {implementation: row}}"""
    rows = {}
    for row in json.loads(RESULTS.read_text())["rows"]:
        if "ms" in row:
            rows.setdefault(Shape(*(row[name] for name in Shape._fields)), {})[row["implementation"]] = row
    return rows


def operands_and_options(shape):
    """Those of a call on a GPU, as far as the model asks for them."""
    x, w = (jax.ShapeDtypeStruct((n, shape.dim), shape.dtype) for n in (shape.tokens, shape.vocabulary))
    operands = Operands(x, w, *[None] * (len(Operands._fields) - 2))
    return operands, Options(
        "vd", shape.vocabulary, 0.0, 0.0, None, 1.0, None, None, False, ("mosaic", "triton", "jnp")
    )


def chosen(shape):
    operands, options = operands_and_options(shape)
    mosaic = hopper.unsuited(operands, options) is None and choice.mosaic_is_faster(operands, options)
    recompute = choice.recompute_is_faster(operands, options, mosaic, frozenset(shape.wanted))
    return ("recompute/mosaic" if mosaic else "recompute/triton") if recompute else "forward_grad/triton"


def test_the_default_is_within_3_percent_of_the_fastest_that_holds_no_logits():
    rows = measured()
    assert len(rows) >= 10
    for shape, by_name in rows.items():
        fastest = min(row["ms"] for name, row in by_name.items() if name != "full")
        assert by_name[chosen(shape)]["ms"] <= 1.03 * fastest, shape


def test_predictions_are_near_what_was_measured():
    for shape, by_name in measured().items():
        for model in choice.COSTS:
            if row := by_name.get("forward_grad/triton" if model == "forward_grad" else model):
                predicted = choice.milliseconds(model, *operands_and_options(shape), frozenset(shape.wanted))
                assert 0.75 <= predicted / row["ms"] <= 1.25, (model, shape)


@pytest.mark.parametrize("options", [{}, {"return_aux": True}, {"chunk": 16}])
def test_a_sum_by_recomputation_is_the_same(monkeypatch, options):
    """What a GPU would choose for some shapes, forced here; a chunk counts tokens, so that with one nothing is chosen."""
    asked = []
    monkeypatch.setattr(choice, "recompute_is_faster", lambda *args: asked.append(args) or True)
    x, w, labels = example(0, 50, 8, 33)
    weights = np.linspace(0.0, 2.0, 50, dtype=np.float32)
    loss = lambda f: lambda x, w, weights: jnp.sin(jax.tree.leaves(f(x, w, labels, weights=weights))[0])
    ours = partial(memjax.linear_cross_entropy, **options)
    actual = jax.jit(jax.value_and_grad(loss(ours), argnums=(0, 1, 2)))(x, w, weights)
    expected = value_and_grad(loss(plain), argnums=(0, 1, 2))(x, w, weights)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 1e-5
    assert bool(asked) == ("chunk" not in options)
    x = np.where(np.asarray(labels)[:, None] == -100, np.float32(np.nan), x)
    assert np.isfinite(grad(loss(ours), argnums=1)(x, w, weights)).all()
