"""What is never held and never computed, read off the compiled programs, and the error of low precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from tests.linear_cross_entropy.oracle import example, grad, plain, relative_error

N, D, V = 2048, 256, 32000


def arguments(dtype=jnp.float32, tokens=N, dim=D, classes=V):
    struct = jax.ShapeDtypeStruct
    return struct((tokens, dim), dtype), struct((classes, dim), dtype), struct((tokens,), jnp.int32)


def temp_mb(loss, *argnums, **shapes):
    function = jax.value_and_grad(loss, argnums=argnums) if argnums else loss
    compiled = jax.jit(function).lower(*arguments(**shapes)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def loss_with(**options):
    return lambda x, w, labels: memjax.linear_cross_entropy(x, w, labels, **options)


@pytest.mark.smoke
def test_forward_grad_memory():
    logits, dw = 4 * N * V / 1e6, 4 * D * V / 1e6
    assert temp_mb(plain, 0, 1) > 1.9 * logits
    # A chunk of logits, and one dW beside the one that is returned.
    for chunks in (8, 32):
        bound = logits / chunks + dw + 2 * 4 * N * D / 1e6
        found = temp_mb(loss_with(implementation="forward_grad", chunk=N // chunks), 0, 1)
        assert found < bound
    assert found < 45


def test_dx_takes_the_place_of_x():
    """Where x is made for the loss alone, its gradient takes no memory beside it."""

    def loss(kernel, w, x, labels):
        hidden = jnp.tanh(x @ kernel)  # kept for its derivative
        return memjax.linear_cross_entropy(jnp.sin(hidden), w, labels, implementation="forward_grad", chunk=256)

    x, w, labels = arguments(tokens=4096, classes=64)
    kernel = jax.ShapeDtypeStruct((D, D), jnp.float32)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(kernel, w, x, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.2 * 4 * 4096 * D


@pytest.mark.parametrize("chunk", [1000, 3000])
def test_recompute_memory(chunk):
    formula = (4 * N * chunk + 4 * N * D + 2 * 4 * chunk * D) / 1e6
    assert temp_mb(loss_with(implementation="recompute", chunk=chunk), 0, 1) < 1.1 * formula
    assert temp_mb(loss_with(implementation="recompute", chunk=chunk)) < 1.1 * 4 * chunk * (N + D) / 1e6


@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
def test_value_alone_holds_a_chunk(implementation):
    assert temp_mb(loss_with(implementation=implementation)) < 1.1 * 4 * 1024 * (N + D) / 1e6


def matmul_results(function):
    """Shapes of the matmuls' results in the optimised program."""
    text = jax.jit(function).lower(*arguments(tokens=48, dim=24, classes=130)).compile().as_text()
    return [line.split("= ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line]


@pytest.mark.parametrize(
    ("implementation", "chunk", "logits", "dx", "dw"),
    [
        ("forward_grad", 16, "f32[16,130]", "f32[16,24]", "f32[130,24]"),
        ("recompute", 65, "f32[48,65]", "f32[48,24]", "f32[65,24]"),
    ],
)
def test_no_work_for_what_is_frozen(implementation, chunk, logits, dx, dw):
    loss = loss_with(implementation=implementation, chunk=chunk)
    both = matmul_results(jax.grad(loss, argnums=(0, 1)))
    assert {logits, dx, dw} <= set(both)
    frozen_head = matmul_results(jax.grad(loss, argnums=0))
    assert dx in frozen_head
    assert dw not in frozen_head
    frozen_input = matmul_results(jax.grad(loss, argnums=1))
    assert dw in frozen_input
    assert dx not in frozen_input
    value = matmul_results(loss)
    assert not {dx, dw} & set(value)


@functools.cache
def in_float64(dtype, scale=1.0):
    """An example and its gradients in float64."""
    x, w, labels = example(0, 4096, 16, 515, dtype=dtype, ignored=0.0)
    x = (np.asarray(x, np.float64) * scale).astype(dtype)
    with jax.enable_x64(True):
        oracle = grad(plain, argnums=(0, 1))(*(np.asarray(a, np.float64) for a in (x, w)), labels)
        return (x, w, labels), jax.device_get(oracle)


def errors(loss, dtype):
    arrays, oracle = in_float64(dtype)
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays)
    grads = lowered.compile({"xla_allow_excess_precision": False})(*arrays)
    return [relative_error(g, o) for g, o in zip(grads, oracle, strict=True)]


@functools.cache
def plain_errors(dtype):
    return errors(plain, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("implementation", ["forward_grad", "recompute"])
def test_error_is_that_of_plain_code(implementation, dtype):
    """Long sums and short chunks lose nothing: as near to float64 as full logits in the same dtype.

    Both are compiled to round where they say so. By default XLA may skip roundings where it fuses, and on a
    CPU it skips those of full logits and of their gradient, which are then float32.
    """
    for chunk in (4096, 64) if dtype == jnp.bfloat16 else (64,):
        found = errors(loss_with(implementation=implementation, chunk=chunk), dtype)
        for ours, plain_error in zip(found, plain_errors(dtype), strict=True):
            # Equal but for which of two neighbours a tie is rounded to.
            assert ours < 1e-6 if dtype == jnp.float32 else ours <= 1.005 * plain_error


def test_float16_gradients_survive_a_loss_scale():
    """The scale comes with the cotangent, after forward_grad has its gradients: 1 / N must not have rounded
    them to 0."""
    # Of so small values that gradients have few digits in float16 before they are scaled.
    (x, w, labels), (_, oracle) = in_float64(jnp.float16, scale=1 / 256)
    dw = grad(lambda w: 1024.0 * loss_with(chunk=256)(x, w, labels))(w)
    assert relative_error(np.asarray(dw, np.float32) / 1024, oracle) < 2e-3
