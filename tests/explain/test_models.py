"""Explanations of small models of many kinds: sums, attribution to modules, and the walk against the compiler's own figure."""

import contextlib
import functools
import inspect
import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console

import memjax
from memjax._program import gradient, traced

from . import models


@functools.cache
def explained(name):
    f, args = models.MODELS[name]()
    return memjax.explain(f, *args, argnums=range(len(args))), gradient(
        traced("explain", f, args, {})
    ).residuals.device.nbytes


each_model = pytest.mark.parametrize("name", models.MODELS)


@each_model
def test_rows_have_all_residual_bytes_and_a_module_each(name):
    explanation, expected = explained(name)
    assert sum(row.bytes for row in explanation.rows) == explanation.residual_bytes == expected
    assert sum(row.bytes for row in explanation.rows if row.path) >= 0.95 * expected
    assert sum(row.share for row in explanation.rows) == pytest.approx(1)
    assert all(row.source.startswith(("models.py:", "test_")) for row in explanation.rows if row.share > 0.05)


@each_model
def test_the_peak_is_the_compilers_and_belongs_to_modules(name):
    peak = explained(name)[0].peak
    assert peak.ratio == pytest.approx(1, abs=0.1)
    assert sum(row.bytes for row in peak.rows) == peak.bytes == sum(count for _, count in peak.difference)
    assert sum(row.bytes for row in peak.rows if row.path) >= 0.9 * peak.bytes


@each_model
def test_paths_begin_with_names_in_the_models_code(name):
    explanation = explained(name)[0]
    names = re.findall(r"\w+", inspect.getsource(models))
    for row in (*explanation.rows, *explanation.peak.rows):
        assert not row.path or re.match(r"\w+", row.path)[0] in names


@each_model
def test_the_timeline_reaches_the_peak_and_comes_back(name):
    explanation, _ = explained(name)
    timeline = explanation.timeline
    alive = [sum(column) for column in zip(*timeline.bytes, strict=True)]
    assert max(alive) == explanation.peak.bytes
    assert alive[0] < 0.5 * max(alive)
    assert alive[-1] < 0.5 * max(alive)
    assert len(timeline.modules) == len(timeline.bytes)


@each_model
def test_json_keeps_everything(name):
    explanation, _ = explained(name)
    assert memjax.Explanation.from_json(explanation.to_json()) == explanation


@pytest.mark.parametrize("name", ["linen_mlp", "llama", "nnx_transformer"])
def test_the_sum_is_what_measure_says(name):
    f, args = models.MODELS[name]()
    assert explained(name)[0].residual_bytes == memjax.measure(f, *args).residual_bytes


PATHS = {
    "linen_transformer": ["Transformer/layers[0..1]/mlp", "Transformer/layers[0..1]/attention"],
    "linen_scan": ["Transformer/layers/mlp", "Transformer/layers/attention"],
    "nnx_transformer": ["NnxTransformer/layers[0..1]/attention", "NnxTransformer/layers[0..1]/up"],
    "llama": ["layer"],
    "pytree": ["Net/Residual", "Net/Residual/Linear"],
    "rnn": ["Tagger/RNN_0/LSTMCell_0"],
    "unet": ["UNet/GroupNorm[0..1]", "UNet"],
    "linen_cnn": ["CNN/ConvBlock_0/BatchNorm_0"],
    "mixture": ["Transformer/layers[0..1]/mlp"],
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_those_of_the_model(name):
    assert set(PATHS[name]) <= {row.path for row in explained(name)[0].rows}


def test_turns_of_a_loop_count():
    rows = [row for row in explained("linen_scan")[0].rows if row.path == "Transformer/layers/attention"]
    probabilities = next(row for row in rows if row.producer == "div")
    assert (probabilities.count, probabilities.shape) == (4, (4, 4, 32, 32))
    assert probabilities.bytes == 4 * 4 * 4 * 32 * 32 * 4
    assert probabilities.readers == ("dot_general",)


def test_a_carry_is_the_layers_output():
    row = explained("llama")[0].rows[0]
    assert (row.path, row.producer, row.count, row.bytes) == ("layer", "add", 4, 4 * 4 * 32 * 32 * 4)


def test_what_runs_again_is_alive_at_the_peak():
    peak = explained("llama")[0].peak
    assert {row.kind for row in peak.rows} >= {"residual", "backward", "recomputed"}
    assert "computed again in the backward pass" in dict(peak.difference)


def test_an_explanation_prints_the_same_facts():
    explanation, _ = explained("linen_transformer")
    text = str(explanation)
    for expected in (
        "Kept between the passes",
        "Transformer/layers[0..1]/mlp",
        "What would save it",
        "the peak",
        "models.py",
    ):
        assert expected in text
    assert "Transformer/layers[0..1]/mlp" in repr(explanation)
    assert len(max(text.splitlines(), key=len)) < 300


def test_long_paths_are_short_in_tables_alone():
    def loss(x):
        names = "Model", "Transformer", "layers_0", "MultiHeadAttention_0", "projection"
        with contextlib.ExitStack() as stack:
            [stack.enter_context(jax.named_scope(name)) for name in names]
            return jnp.sum(jnp.sin(x))

    explanation = memjax.explain(loss, jnp.ones(8))
    assert explanation.rows[0].path == "Model/Transformer/layers_0/MultiHeadAttention_0/projection"
    assert "  Model/.../MultiHeadAttention_0/projection  " in str(explanation)
    assert "Transformer" not in str(explanation).partition("What would")[0]


def test_rich_shows_brackets_as_they_are():
    console = rich.console.Console(width=250, record=True, file=io.StringIO())
    console.print(explained("linen_transformer")[0])
    assert "Transformer/layers[0..1]/mlp" in console.export_text()


def test_the_picture_is_a_file(tmp_path):
    explained("linen_transformer")[0].plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_a_trace_has_all_bytes_at_each_instruction(tmp_path):
    """In the JSON of Chrome: counters of all modules add up to that of the whole, whose largest value is the peak."""
    explanation = explained("linen_transformer")[0]
    explanation.trace(tmp_path / "memory.json")
    explanation.trace(file := io.BytesIO())
    assert (tmp_path / "memory.json").read_bytes() == file.getvalue()
    events = json.loads(file.getvalue())["traceEvents"]
    whole, modules = {}, {}
    for event in events:
        if event["ph"] == "C":
            of = whole if event["name"] == "temporary memory" else modules
            of[event["ts"]] = of.get(event["ts"], 0) + event["args"]["bytes"]
    assert whole == modules
    assert max(whole.values()) == explanation.peak.bytes
    forward, backward = (event for event in events if event["ph"] == "X")
    assert (forward["ts"], forward["dur"]) == (0, backward["ts"])
    assert backward["ts"] + backward["dur"] > max(whole)


def test_figures_are_numbers_by_name():
    explanation = explained("linen_transformer")[0]
    figures = explanation.figures()
    assert all(isinstance(value, int) for value in figures.values())
    of = lambda kind: sum(value for name, value in figures.items() if name.startswith(kind))
    assert of("kept/") == figures["residual_bytes"] == explanation.residual_bytes
    assert of("peak/") == figures["peak_bytes"] == explanation.peak.bytes
