import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax._attention.block import merge
from memjax.shard import hide_hops, metp_attention, positions, ring, unzigzag, zigzag
from tests.shard.rings import FIRST, ROWS, normal, outputs_and_gradients, sharded


def plain(q, k, v, *, causal=False, segment_ids=None, window=None, scale=None, softcap=None):
    """On one device, all products at once."""
    length, dim = q.shape[1], q.shape[3]
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    ahead = np.arange(length) - np.arange(length)[:, None]
    visible = np.ones((1, 1, length, length), bool)
    if causal:
        visible = visible & (ahead <= 0)
    if window is not None:
        visible = visible & (abs(ahead) < window)
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids >= 0)[:, :, None]
        visible = visible & same[:, None]
    weights = jnp.where(visible, jnp.exp(logits - logits.max(-1, keepdims=True)), jnp.zeros((), q.dtype))
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshd->bthd", weights / jnp.where(total == 0, jnp.ones((), q.dtype), total), v)


def over_ring(size, layout="zigzag", segment_ids=None, **options):
    """As `plain`, of whole sequences in their own order."""
    order, back = (zigzag, unzigzag) if layout == "zigzag" else (lambda a, n: a, lambda a, n: a)

    def attention(q, k, v):
        extra = () if segment_ids is None else (order(jax.device_put(segment_ids), size),)
        local = lambda q, k, v, *segments: metp_attention(
            q, k, v, axis_name="ring", layout=layout, segment_ids=segments[0] if segments else None, **options
        )
        f = sharded(local, size, (ROWS,) * (3 + len(extra)), ROWS)
        return back(f(order(q, size), order(k, size), order(v, size), *extra), size)

    return attention


# Documents of several lengths, and padding that sees nothing and is seen by nothing.
SEGMENTS = np.asarray([[0] * 9 + [1] * 15 + [-1] * 8, [3] * 31 + [-1]], np.int32)
EVERYTHING = {"causal": True, "segment_ids": SEGMENTS, "window": 7, "softcap": 2.0, "scale": 0.7}


@pytest.mark.parametrize(
    ("size", "layout", "head_chunks", "options"),
    [
        (1, "zigzag", 2, EVERYTHING),
        (2, "contiguous", 1, {"causal": True}),
        (4, "contiguous", 2, {"window": 5, "segment_ids": SEGMENTS}),
        (8, "contiguous", 1, {"causal": True, "segment_ids": SEGMENTS}),
        (8, "zigzag", 2, EVERYTHING),
        (8, "zigzag", 1, {"causal": True}),
    ],
)
def test_is_that_of_one_device(x64, size, layout, head_chunks, options):
    q, k, v, do = normal((2, 32, 4, 3), (2, 32, 2, 3), (2, 32, 2, 3), (2, 32, 4, 3))
    attention = over_ring(size, layout, head_chunks=head_chunks, **options)
    got = outputs_and_gradients(attention, do, q, k, v)
    expected = outputs_and_gradients(lambda *args: plain(*args, **options), do, q, k, v)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    if "segment_ids" in options:
        nothing = SEGMENTS < 0
        assert all((np.asarray(a)[nothing] == 0).all() for a in got)


def test_products_are_taken_in_chunks_of_rows(x64):
    shape = (1, 520, 1, 2)
    q, k, v, do = normal(shape, shape, shape, shape)
    got = outputs_and_gradients(over_ring(2, causal=True), do, q, k, v)
    for a, b in zip(got, outputs_and_gradients(lambda *x: plain(*x, causal=True), do, q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_bfloat16_is_as_exact_as_on_one_device():
    shapes = (1, 64, 4, 16), (1, 64, 2, 16), (1, 64, 2, 16), (1, 64, 4, 16)
    q, k, v, do = normal(*shapes, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        wide = [jax.device_put(np.asarray(a, np.float64)) for a in (do, q, k, v)]
        exact = [np.asarray(a) for a in outputs_and_gradients(lambda *x: plain(*x, causal=True), *wide)]
    error = lambda got: [np.linalg.norm(np.asarray(a, np.float64) - b) for a, b in zip(got, exact, strict=True)]
    ordinary = error(outputs_and_gradients(lambda *x: plain(*x, causal=True), do, q, k, v))
    for mine, theirs in zip(
        error(outputs_and_gradients(over_ring(8, causal=True), do, q, k, v)), ordinary, strict=True
    ):
        assert mine <= 1.1 * theirs


@pytest.mark.parametrize("size", [2, 4])
def test_products_held_are_one_part_in_p_cubed(size):
    tokens, heads = 4096, 2
    q = jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.float32)

    def step(q, k, v):
        value, pull = jax.vjp(
            sharded(lambda *a: metp_attention(*a, axis_name="ring", head_chunks=1), size, (ROWS,) * 3, ROWS), q, k, v
        )
        return pull(value)

    compiled = jax.jit(step).lower(q, q, q).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert largest == heads * tokens**2 // size**3


def test_a_step_is_one_product_without_branches():
    """Only keys, values and their gradients travel, and under a causal mask all devices do the same."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.bfloat16)
    f = sharded(lambda *a: metp_attention(*a, axis_name="ring", causal=True), 8, (ROWS,) * 3, ROWS)
    forward = jax.jit(f).lower(q, q, q)
    # In the first step, and twice in the loop's body, which is two steps.
    assert forward.as_text().count("collective_permute") == 2 * 3
    backward = jax.jit(lambda do, *a: jax.vjp(f, *a)[1](do)).lower(q, q, q, q)
    # Before and in the first step, twice as many in an odd one and in each of the loop's two, in the last step the sums, and
    # those on their way home.
    assert backward.as_text().count("collective_permute") == 2 * (3 + 1 + 1 + 2 + 4 + 1 + 1)
    # Compiled, for the choice of a kernel by platform is a branch of one case until then.
    for lowered in (forward, backward):
        assert " conditional(" not in lowered.compile().as_text()


def test_merge_survives_rows_that_saw_nothing():
    zeros, lse = np.zeros((1, 2, 1, 3), np.float32), np.float32([[[-np.inf, 0.0]]])
    merged, total = jax.jit(merge)(zeros, np.full_like(lse, -np.inf), zeros, lse)
    np.testing.assert_array_equal(total, lse)
    np.testing.assert_array_equal(merged, 0)


def test_zigzag_and_positions():
    sequence = np.arange(48).reshape(1, 48, 1)
    order = zigzag(sequence, 4)
    np.testing.assert_array_equal(unzigzag(order, 4), sequence)
    np.testing.assert_array_equal(unzigzag(zigzag(jax.device_put(sequence), 4), 4), sequence)
    for layout, whole in (("zigzag", order), ("contiguous", sequence)):
        parts = [positions(12, rank, 4, layout) for rank in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), whole.reshape(-1))
    with pytest.raises(ValueError, match=r"multiple of 2 size = 10, got an array of int.*: pad the sequence"):
        zigzag(sequence, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_chunks": 3}, "head_chunks must be a divisor of the 2 key-value heads, got 3"),
        ({"layout": "striped"}, "layout must be one of 'zigzag', 'contiguous', got 'striped'"),
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"softcap": -1.0}, "softcap must be a positive finite number, got -1.0"),
        ({"implementation": "cudnn"}, 'implementation must be one that can do this, got "cudnn": cuDNN'),
        ({"implementation": "flash"}, "implementation must be one of None"),
        ({"q": (2, 8, 3, 4)}, "k must be of a number of heads that divides q's 3"),
        ({"v": (2, 8, 1, 4)}, "v must be of k's shape"),
        ({"q": (2, 16, 4, 4)}, "k must be of shape"),
        ({"q": (2, 12, 2, 4), "k": (2, 12, 2, 4), "v": (2, 12, 2, 4)}, "even number of tokens per device"),
        ({"segment_ids": (2, 16)}, "segment_ids must be of shape"),
    ],
)
def test_wrong_input_is_refused(change, message):
    arrays = {"q": (2, 8, 4, 4), "k": (2, 8, 2, 4), "v": (2, 8, 2, 4)}
    options = {}
    for name, value in change.items():
        (arrays if isinstance(value, tuple) and name != "segment_ids" else options)[name] = value
    if "segment_ids" in options:
        options["segment_ids"] = jnp.zeros(options["segment_ids"], jnp.int32)
    zeros = [jnp.zeros(shape) for shape in arrays.values()]
    with pytest.raises(ValueError, match=re.escape(message)):
        sharded(lambda *a: metp_attention(*a, axis_name="ring", **options), 4, (ROWS,) * 3, ROWS)(*zeros)


def test_outside_of_shard_map_it_says_so():
    q = jnp.zeros((1, 4, 1, 2))
    with pytest.raises(ValueError, match=r"call this inside jax.shard_map over a mesh with that axis"):
        metp_attention(q, q, q, axis_name="ring")


def test_hops_that_are_not_hidden_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(ring, "_warned", False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    body = lambda carry, block, step: block if carry is None else carry + block
    total = lambda a: ring.scan(body, a, None, axis_name="ring")
    trace = lambda size: jax.eval_shape(sharded(total, size, FIRST, FIRST), jnp.zeros(size))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    hide_hops()
    others = "--xla_gpu_collective_permute_combine_threshold_bytes=1073741824 --xla_gpu_enable_triton_gemm=false"
    assert os.environ["XLA_FLAGS"] == f"--xla_gpu_autotune_level=4 --xla_gpu_collective_permute_mode=peer {others}"
    trace(2)  # warnings are errors here
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_collective_permute_mode=private")
    hide_hops()  # leaves what is chosen
    with pytest.warns(
        UserWarning, match=r"call memjax.shard.hide_hops\(\) .* or set XLA_FLAGS=--xla_gpu_coll\S+=peer\."
    ):
        trace(4)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    trace(8)
