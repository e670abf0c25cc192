"""FLOPs and times of equations, against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from memjax._attention.choice import causal_attention
from memjax._core.program import costs
from memjax._core.program.primitives import expensive

H200 = next(rates for rates in costs._DEVICES if rates.kind == "H200")


def equations(f, *shapes, dtype=jnp.bfloat16):
    return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr.eqns


def test_a_product_has_two_flops_for_each_pair_and_a_loop_as_many_times_and_as_much_time():
    w = (64, 64)
    [eqn] = equations(lambda x, w: x @ w, (32, 64), w)
    assert costs.flops(eqn) == 2 * 32 * 64 * 64
    [loop] = equations(lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0], (32, 64), w)
    assert costs.flops(loop) == 5 * costs.flops(eqn)
    one, all_turns = (costs.seconds(*found, lambda var: True) for found in ((eqn, costs.in_turns(H200)), (loop, H200)))
    assert all_turns == pytest.approx(5 * one)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_kernels_have_the_flops_of_their_products(causal, monkeypatch):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)  # tracing needs no cuDNN
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    attend = lambda q, k, v: fused.dot_product_attention(q, k, v, mask_type=mask)
    shapes = (2, 128, 8, 64), (2, 256, 4, 64), (2, 256, 4, 64)
    closed = jax.make_jaxpr(lambda *a: jax.vjp(attend, *a)[1](jnp.ones((2, 128, 8, 64), jnp.bfloat16)))(
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    )
    kernels = [eqn for eqn in closed.jaxpr.eqns if "attention" in eqn.primitive.name]
    products = 2 * 2 * 8 * 128 * 256 * 64 * (0.5 if causal else 1)
    assert [costs.flops(eqn) for eqn in kernels] == [2 * products, 5 * products]
    assert all(map(expensive, kernels))


def test_of_kernels_for_several_platforms_the_one_that_runs_counts():
    shape = (1, 2048, 8, 64)
    jaxpr = jax.make_jaxpr(causal_attention)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 3).jaxpr
    kernel = H200.start + 2 * 2 * 8 * 2048**2 * 64 / 2 / H200.attention
    on_gpu, elsewhere = (costs.program_seconds(jaxpr, H200._replace(platform=name)) for name in ("cuda", "tpu"))
    passes = 20 * 2 * 2048 * 8 * 64 / H200.nbytes  # conversions, the mask's positions
    assert kernel < on_gpu < kernel + passes + 10 * H200.start
    logits = 8 * 2048**2 / 2 * 4
    assert elsewhere > on_gpu + 2 * logits / H200.nbytes


def test_what_only_a_barrier_reads_is_written_on_a_cpu():
    """Beside an operand that a reduction along rows computes on the way."""

    def rows(x):
        _total, doubled = jax.lax.optimization_barrier((jnp.sum(x), x * 2))
        return jnp.sum(jnp.exp(doubled - 1), -1)

    jaxpr = jax.make_jaxpr(rows)(jnp.zeros((4, 8))).jaxpr
    by_name = {eqn.primitive.name: eqn for eqn in jaxpr.eqns}
    written = costs.stored(jaxpr.eqns, jaxpr.outvars, "cpu")
    assert {*by_name["optimization_barrier"].invars, *by_name["optimization_barrier"].outvars} <= written
    assert written.isdisjoint(by_name["exp"].outvars)


def test_an_elementwise_chain_is_one_pass_over_memory():
    def chain(x):
        y = x * 2
        return jnp.sin(y.reshape(-1)) + 1

    jaxpr = jax.make_jaxpr(chain)(jax.ShapeDtypeStruct((1 << 20,), jnp.float32)).jaxpr
    passes = (costs.program_seconds(jaxpr, H200) - H200.start) * H200.nbytes
    assert passes == pytest.approx(2 * 4 * (1 << 20))


def test_what_a_product_reads_is_written_to_memory_under_any_of_its_names():
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.sin(x).reshape(8, 4) @ w)(
        jax.ShapeDtypeStruct((32,), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    ).jaxpr
    sine, reshaped = jaxpr.eqns[0].outvars[0], jaxpr.eqns[1].outvars[0]
    assert {sine, reshaped} <= costs.stored(jaxpr.eqns, jaxpr.outvars)


def test_slices_cost_what_they_move_however_large_the_array_is():
    def turn(stack, row):
        new = jax.lax.dynamic_slice(stack, (3, 0, 0), row.shape) + row
        return jax.lax.dynamic_update_slice(stack, new, (3, 0, 0))

    row = (1, 1024, 1024)
    for length in (8, 64):
        eqns = equations(turn, (length, *row[1:]), row)
        found = sum(costs.seconds(eqn, H200, lambda var: True) for eqn in eqns)
        assert found == pytest.approx(3 * H200.start + (2 + 3 + 2) * 2**21 / H200.nbytes)


def test_what_moves_to_the_host_passes_the_link():
    space = jax.memory.Space
    eqns = equations(lambda x, y: jax.device_put((x, y), (space.Host, space.Device)), (1024, 1024), (8,))
    found = sum(costs.seconds(eqn, H200, lambda var: True) for eqn in eqns)
    assert found == pytest.approx(H200.start + 2 * 2**20 / H200.link)
