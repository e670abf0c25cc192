"""What the model of memory counts, on GPUs, which need not be there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import memjax
from memjax._core.program import costs
from memjax._core.program.jaxpr import calls_in_place
from memjax._core.program.working import hoisted_bytes, lent_to, peak_bytes
from memjax._plan.budget.digest import digest
from memjax._plan.derivative import Derivative
from memjax._plan.memory.lent import lent_to_pieces
from memjax._plan.solve.chain import Chain
from memjax._plan.solve.order import as_compiled
from tests.plan.networks import inputs, parameters, unrolled_loss

ROWS, WIDTH, LAYERS = 512, 64, 4
[H200] = [rates for rates in costs._DEVICES if rates.kind == "H200"]


def chain(f, *args):
    closed = jax.make_jaxpr(f)(*args)
    wrt = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.in_avals]
    return Chain(Derivative(closed, closed.in_avals, wrt, [True], {}), H200)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_other_names_for_the_same_bytes_count_once():
    """A residual stream, and a view of it that the next layer reads."""

    def loss(ws, x, *, views):
        for w in ws:
            rows = x.reshape(-1, WIDTH) if views else x
            x = x + jnp.tanh(rows @ w).reshape(x.shape)
        return jnp.sum(x**2)

    ws = [array(WIDTH, WIDTH) for _ in range(LAYERS)]
    with_views = chain(lambda ws, x: loss(ws, x, views=True), ws, array(1, ROWS, WIDTH))
    without = chain(lambda ws, x: loss(ws, x, views=False), ws, array(ROWS, WIDTH))
    for one, other in zip(with_views.frontier, without.frontier, strict=True):
        assert one[0] == other[0]


def test_what_is_scattered_into_zeros_and_added_takes_no_array_of_zeros():
    """The derivative of a loss of one label for each row: two arrays of the size of the logits' gradient, not three."""

    def twice(x, i, y):
        return jnp.tanh(x) * jnp.arange(4.0) + jnp.zeros_like(x).at[i].add(y)

    def names(eqns):
        return [eqn.primitive.name for eqn in eqns]

    closed = jax.make_jaxpr(twice)(array(8, 4), array(2, dtype=jnp.int32), array(2, 4))
    before, after = closed.jaxpr.eqns, as_compiled(closed.jaxpr.eqns, "cuda")
    assert names(after) == [name for name in names(before)[:-1] if name != "scatter-add"] + ["scatter-add"]
    assert after[-1].outvars == before[-1].outvars
    assert after[-1].invars[0] is before[-1].invars[0]
    elsewhere = jax.make_jaxpr(lambda x, i, y: x + x.at[i].add(y))(array(8, 4), array(2, dtype=jnp.int32), array(2, 4))
    assert as_compiled(elsewhere.jaxpr.eqns, "cuda") == elsewhere.jaxpr.eqns


def test_arrays_lie_in_results_of_earlier_pieces_one_in_each_the_closest_in_size():
    made = [[16, 4], [8], [], [100]]
    assert lent_to_pieces(made, [[4], [4, 16], [8, 8], []], [[], [], [4], []]) == [[], [16, 4], [8], []]
    assert lent_to([16, 3, 4, 50], [4, 16]) == 20


def test_gradients_lend_their_memory_to_what_is_kept():
    """With rows as many as columns, each layer's input fits into the gradient of a layer before it."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def least(rows):
        return chain(loss, [array(WIDTH, WIDTH) for _ in range(16)], array(rows, WIDTH)).frontier[0][0]

    assert least(WIDTH + 1) > 2 * least(WIDTH)


def working(f, *args):
    closed = jax.make_jaxpr(f)(*args)
    return peak_bytes(closed.jaxpr.eqns, closed.jaxpr.invars, [], [], closed.jaxpr.outvars, "cuda")


def test_gradients_of_pools_find_the_largest_of_each_window_first():
    """Its place, in 32 bits for each of the four dimensions, compiled ahead for an H200: 128 MiB for 2^23 windows."""

    def gradient(x, ct):
        pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.vjp(pool, x)[1](ct)[0]

    assert working(gradient, array(4, 32, 32, 8), array(4, 16, 16, 8)) >= 4 * 4 * (4 * 16 * 16 * 8)


def test_gradients_of_pools_on_cpus_take_indices_of_the_padded_array():
    def gradient(x, ct):
        pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.tanh(jax.vjp(pool, x)[1](ct)[0])

    types = array(4, 8, 8, 8), array(4, 4, 4, 8)
    program = jax.make_jaxpr(gradient)(*types).jaxpr
    predicted = peak_bytes(program.eqns, program.invars, [], [], program.outvars, "cpu")
    compiled = jax.jit(gradient).lower(*types).compile().memory_analysis().temp_size_in_bytes
    assert predicted + hoisted_bytes(program.eqns, "cpu") == pytest.approx(compiled, rel=0.2)


def test_on_cpus_what_a_reduction_and_others_read_is_written():
    """Targets that are made of labels: two sums of products with them."""

    def sums(x, w, labels):
        logits = x @ w
        targets = jnp.where(jnp.arange(w.shape[1]) == labels[:, None], 0.9, 0.001)
        return jnp.sum(targets * logits, 1), jnp.sum(targets * logits**2, 1)

    types = array(ROWS, WIDTH), array(WIDTH, 8 * WIDTH), array(ROWS, dtype=jnp.int32)
    program = calls_in_place(jax.make_jaxpr(sums)(*types), differentiable=False)
    predicted = peak_bytes(program.eqns, program.invars, [], [], program.outvars, "cpu")
    compiled = jax.jit(sums).lower(*types).compile().memory_analysis().temp_size_in_bytes
    assert predicted == pytest.approx(compiled, rel=0.02)


def test_random_bits_are_two_words_until_they_are_read():
    """The mask is made of them in both of its readers."""

    def dropped(key, x, w):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum(jnp.where(keep, jnp.where(keep, x, 0.0) @ w, 0.0))

    types = jax.eval_shape(lambda: jax.random.key(0)), array(ROWS, WIDTH), array(WIDTH, WIDTH)
    program = calls_in_place(jax.make_jaxpr(dropped)(*types), differentiable=False)
    predicted = peak_bytes(program.eqns, program.invars, [], [], program.outvars, "cpu")
    compiled = jax.jit(dropped).lower(*types).compile().memory_analysis().temp_size_in_bytes
    assert predicted == pytest.approx(compiled, rel=0.02)


def test_convolutions_that_are_padded_more_on_one_side_copy_their_operand():
    """A kernel of even width, but not one of odd width, with or without strides, nor its gradient."""

    def convolved(x, kernel, padding, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, even, odd = array(4, 32, 32, 8), array(2, 2, 8, 8), array(3, 3, 8, 8)
    assert working(lambda x, k: convolved(x, k, "SAME"), x, even) == 4 * 4 * 33 * 33 * 8
    assert working(lambda x, k: convolved(x, k, "SAME"), x, odd) == 0
    assert working(lambda x, k: convolved(x, k, ((1, 1), (1, 1)), 2), x, odd) == 0
    gradient = lambda x, k: jax.grad(lambda k: jnp.sum(convolved(x, k, ((1, 1), (1, 1)), 2)))(k)
    closed = jax.make_jaxpr(gradient)(x, odd)
    [eqn] = [
        eqn
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated" and eqn.params["rhs_dilation"] == (2, 2)
    ]
    assert eqn.params["padding"] == ((1, 0), (1, 0))
    assert peak_bytes([eqn], eqn.invars, [], [], eqn.outvars, "cuda") == 0


def test_layers_that_differ_in_the_keys_of_their_dropout_are_solved_once():
    """`fold_in` of a layer's number is a literal of its own in each layer."""

    def loss(params, x, key):
        for i, w in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(keep, jax.nn.gelu(x @ w), 0.0)
        return jnp.sum(x**2)

    def solved(layers):
        args = [jnp.ones((16, 16))] * layers, jnp.ones((64, 16)), jax.random.key(0)
        return len(chain(loss, *args)._frontiers)

    assert solved(12) == solved(9)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_the_last_turns_of_a_loop_keep_is_gone_when_the_others_run_again(reverse):
    """The first turns make a wide array again, for one that the others keep."""

    def loss(ws, x):
        factor = lambda x, w: jax.lax.stop_gradient(jnp.tanh(x @ w["up"]) @ w["down"])
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x) * factor(x, w), None), x, ws, reverse=reverse)[0] ** 2)

    ws = {"up": array(LAYERS, WIDTH, 8 * WIDTH), "down": array(LAYERS, 8 * WIDTH, WIDTH)}
    found = chain(loss, ws, array(ROWS, WIDTH))
    [at] = [i for i, cut in enumerate(found.cuts) if cut in found.loops]
    options = found.options(at, at + 1)
    [moving] = {one.working - one.nbytes - one.parts[0][1].working for one in options if len(one.parts) == 1}
    both = [one for one in options if len(one.parts) == 2]
    assert both
    for option in both:
        (first, less), (turns, more) = option.parts[::-1] if reverse else option.parts
        assert less.working > more.working
        before = option.nbytes - turns * more.nbytes
        stacks = lambda turns, one: turns * one.nbytes if turns > 1 else 0  # of one turn there are no copies beside
        earlier = before - first * less.nbytes + stacks(first, less) + less.working
        assert option.working == max(earlier, before + stacks(turns, more) + more.working) + moving


def test_a_loop_of_one_turn_takes_what_its_body_takes_without_a_loop():
    def loss(ws, x, *, scanned):
        turn = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"], None)
        x = jax.lax.scan(turn, x, ws)[0] if scanned else turn(x, jax.tree.map(lambda w: w[0], ws))[0]
        return jnp.sum(x**2)

    ws = {"up": array(1, WIDTH, 8 * WIDTH), "down": array(1, 8 * WIDTH, WIDTH)}
    loop, straight = (
        chain(functools.partial(loss, scanned=scanned), ws, array(ROWS, WIDTH)).frontier for scanned in (True, False)
    )
    wide, gradients, narrow = 4 * 8 * ROWS * WIDTH, 4 * 2 * 8 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    # Beside it there are gradients of a turn, which are no results, the cotangent before and after, and what it starts from.
    assert loop[-1][0] == straight[-1][0] + gradients + 3 * narrow < straight[-1][0] + wide


def test_what_a_loop_carries_to_a_result_lies_in_it():
    """The gradient of the input of layers in a loop takes no memory beside the result."""

    def loss(ws, x):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]
        return jnp.sum(x**2)

    closed = jax.make_jaxpr(loss)(array(LAYERS, WIDTH, WIDTH), array(ROWS, WIDTH))

    def working(*wrt):
        found = Chain(Derivative(closed, closed.in_avals, wrt, [True], {}), H200)
        [at] = [i for i, cut in enumerate(found.cuts) if cut in found.loops]
        return [one.working for one in found.options(at, at + 1)]

    for of_both, of_one in zip(working(True, True), working(True, False), strict=True):
        assert of_both == of_one - 4 * ROWS * WIDTH


def test_a_gradient_penalty_takes_no_more_than_with_a_checkpoint():
    args = parameters(jnp.float32, 4), inputs(jnp.float32, 1024)

    def nbytes(f):
        of_inputs = lambda *args: jnp.sum(jax.grad(f, 1)(*args) ** 2)
        lowered = jax.jit(jax.grad(of_inputs)).lower(*args)
        return lowered.compile(memjax.remat_compiler_options()).memory_analysis().temp_size_in_bytes

    ours = nbytes(memjax.planned(unrolled_loss, budget="min"))
    assert ours < 0.8 * nbytes(unrolled_loss)
    assert ours <= nbytes(jax.checkpoint(unrolled_loss))


def test_a_name_is_that_of_the_passes_as_they_are_now():
    passes = chain(lambda w, x: jnp.sum(jnp.tanh(x @ w)), array(WIDTH, WIDTH), array(ROWS, WIDTH)).derivative
    before = digest(passes)
    passes.wrt = tuple(not one for one in passes.wrt)
    changed = digest(passes)
    assert changed != before
    passes.backward = dataclasses.replace(passes.backward, eqns=passes.backward.eqns[:-1])
    assert digest(passes) not in (before, changed)
