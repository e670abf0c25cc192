"""Bytes that compiled programs move, against what they have to."""

import jax
import jax.numpy as jnp
import pytest

from memjax._core.traffic import moved_bytes

N = 1 << 16


def moved(f, *shapes) -> int:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return moved_bytes(jax.jit(f).lower(*args).compile().as_text())


def test_an_elementwise_chain_reads_and_writes_once():
    assert moved(lambda x: jnp.abs(x * 2 + 1) * 3, (N,)) == 2 * 4 * N


def test_each_operand_counts():
    assert moved(lambda x, y: x * y, (N,), (N,)) == 3 * 4 * N


def test_a_product_reads_both_and_writes_one():
    n = 256
    assert moved(lambda x, y: x @ y, (n, n), (n, n)) == pytest.approx(3 * 4 * n * n, rel=0.01)


def test_a_sum_writes_a_number():
    assert moved(jnp.sum, (N,)) == pytest.approx(4 * N, rel=0.05)


def test_of_a_slice_only_its_part_is_read():
    take = lambda x, i: jax.lax.dynamic_slice(x, (jnp.int32(i[0]), 0), (1, 1024)) * 2
    assert moved(take, (64, 1024), (1,)) < 4 * 4 * 1024


def test_a_loop_counts_as_often_as_it_turns():
    """Each turn reads a slice of the stack and what is carried, and writes what is carried: never the whole stack."""
    turns, n = 16, 1 << 14
    step = lambda c, one: (jnp.sin(c) * one, None)
    found = moved(lambda x, stack: jax.lax.scan(step, x, stack)[0], (n,), (turns, n))
    least, all_of_stack = 3 * 4 * n * turns, 4 * n * turns * turns
    assert 0.9 * least < found < least + 0.3 * all_of_stack


def test_what_a_loop_stacks_is_written_in_slices():
    turns, n = 16, 1 << 14
    step = lambda c, _: (jnp.sin(c), jnp.sin(c))
    found = moved(lambda x: jax.lax.scan(step, x, None, length=turns)[1], (n,))
    assert found < 0.5 * (4 * n * turns) * turns


def test_a_condition_counts_its_larger_branch():
    large = lambda x: jnp.sort(jnp.sin(x))
    assert moved(lambda x: jax.lax.cond(x[0] > 0, large, lambda x: x, x), (N,)) >= 2 * 4 * N


def test_no_program_moves_nothing():
    assert moved_bytes("") == 0
    assert moved_bytes("HloModule x") == 0


LIBRARY_CALL = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %product = (f32[64,64]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %y = f32[64,64]{1,0} get-tuple-element(%product), index=0
}
"""


def test_scratch_of_a_library_does_not_count():
    """How much room a library takes to work in differs from run to run, and says nothing of what it moves."""
    assert moved_bytes(LIBRARY_CALL) == 2 * 4 * 64 * 64
    whole = LIBRARY_CALL.replace("-> f32[64,64] {", "-> (f32[64,64], s8[4194304]) {")
    whole = whole.replace("ROOT %y = f32[64,64]{1,0} get-tuple-element(%product), index=0", "").replace(
        "%product =", "ROOT %product ="
    )
    assert moved_bytes(whole) == 2 * 4 * 64 * 64 + 4194304
