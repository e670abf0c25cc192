"""Which equations wait for the codes of what batch norms read: that decides in which pass a compiler makes them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from memjax import compressed
from memjax._core.program.dataflow import is_literal
from memjax._core.program.jaxpr import evaluate
from memjax.compress import ChannelQuantized
from memjax.compress._codecs.codec import FixedRate
from memjax.compress._transform import array_codecs
from tests.compress.networks import batch_norm, conv, images

ONES, ZEROS = jnp.ones(16), jnp.zeros(16)
WEIGHTS = [jax.random.normal(jax.random.key(i), (3, 3, 16, 16)) * 0.1 for i in range(4)]


def waiting(f):
    """For each barrier with codes of four bits their number, and the primitives that read the other arrays in it."""
    x = images()
    forward = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)))(WEIGHTS, x)
    in_place = lambda *args: evaluate(forward.jaxpr, forward.consts, args, differentiable=False)
    jaxpr = jax.make_jaxpr(in_place)(*WEIGHTS, x).jaxpr
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.optimization_barrier_p:
            codes = [out for out in eqn.outvars if out.aval.dtype == jnp.uint4]
            others = {out for out in eqn.outvars if out.aval.size >= x.size} - {*codes}
            readers = [e.primitive.name for e in jaxpr.eqns if any(a in others for a in e.invars if not is_literal(a))]
            found += [(len(codes), sorted(set(readers)))] if codes else []
    return found


class Bits(FixedRate):
    """Nothing changes. To the other codec it looks as kernels of `ErrorBounded` do: codes are integers, and masks follow."""

    keeps_zeros, elementwise = True, False

    def encode(self, x):
        return lax.bitcast_convert_type(x, jnp.uint32)

    def decode(self, code):
        return lax.bitcast_convert_type(code, jnp.float32)


def both(f):
    return compressed(compressed(f, Bits(), where="conv"), ChannelQuantized(4))


def norm(y):
    return batch_norm(y, ONES, ZEROS)


def test_the_next_convolution_waits_for_a_code_made_where_its_input_is():
    def f(weights, x):
        y = jax.nn.relu(norm(conv(x, weights[0])))
        return jnp.sum(conv(y, weights[1]))

    assert waiting(both(f)) == [(1, ["conv_general_dilated"])]


def test_branches_that_are_added_have_codes_made_where_they_are_added():
    def f(weights, x):
        shortcut, y = norm(conv(x, weights[0])), jax.nn.relu(norm(conv(x, weights[1])))
        y = norm(conv(y, weights[2]))
        return jnp.sum(conv(jax.nn.relu(y + shortcut), weights[3]))

    assert waiting(both(f)) == [(1, ["conv_general_dilated"]), (2, ["conv_general_dilated"])]


def test_no_code_is_made_where_a_mask_is_packed():
    def f(weights, x):
        y = norm(conv(x, weights[0]))
        y = jnp.where(y > 0, y, y / 16)
        return jnp.sum(conv(y, weights[1]))

    [(count, readers)] = waiting(both(f))
    assert count == 1
    assert "conv_general_dilated" not in readers  # but all of the batch norm


def test_a_mask_is_packed_from_what_a_convolution_reads():
    """So the code of what the norm reads is made where that is normalised, although the mask is kept beside it."""

    def f(weights, x):
        y = jax.nn.relu(norm(conv(x, weights[0])))
        return jnp.sum(conv(y, weights[1]))

    assert waiting(compressed(f, ChannelQuantized(4))) == [(1, ["conv_general_dilated"])]


def barriers_with_codes(f):
    """How many barriers of both passes have a code of four bits."""
    program = jax.make_jaxpr(jax.grad(f))(WEIGHTS, images())
    in_place = lambda *args: evaluate(program.jaxpr, program.consts, args, differentiable=False)
    eqns = jax.make_jaxpr(in_place)(*WEIGHTS, images()).eqns
    barriers = [eqn for eqn in eqns if eqn.primitive is lax.optimization_barrier_p]
    return sum(any(out.aval.dtype == jnp.uint4 for out in eqn.outvars) for eqn in barriers)


def test_on_a_gpu_what_a_product_reads_is_decoded_in_the_backward_pass(monkeypatch):
    """It is written to memory. What a norm reads is decoded where it is read, and waits for nothing."""
    monkeypatch.setattr(array_codecs, "traced_device", lambda: SimpleNamespace(platform="gpu"))
    product = lambda weights, x: jnp.sum(conv(jnp.tanh(conv(x, weights[0])), weights[1]))
    assert barriers_with_codes(compressed(product, ChannelQuantized(4))) == 1 + 1
    assert (
        barriers_with_codes(compressed(lambda weights, x: jnp.sum(norm(conv(x, weights[0]))), ChannelQuantized(4))) == 1
    )
