import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from memjax._core.compat import bodies, scan_counts
from memjax.shard import metp, metp_mlp, ring
from tests.shard.rings import FIRST, ROWS, normal, outputs_and_gradients, sharded


def gated(x, w_in, w_gate, w_out):
    return (jax.nn.silu(x @ w_gate) * (x @ w_in)) @ w_out


def gated_ring(size, recompute=True):
    return sharded(
        lambda x, w_in, w_gate, w_out: metp_mlp(
            x, w_in, w_out, activation=jax.nn.silu, w_gate=w_gate, recompute=recompute, axis_name="ring"
        ),
        size,
        (ROWS, ROWS, ROWS, FIRST),
        ROWS,
    )


@pytest.mark.smoke
@pytest.mark.parametrize(("size", "recompute"), [(1, True), (2, True), (4, True), (8, True), (1, False), (4, False)])
def test_gated_mlp_is_that_of_one_device(x64, size, recompute):
    x, w_in, w_gate, w_out, do = normal((2, 16, 6), (6, 24), (6, 24), (24, 5), (2, 16, 5))
    expected = outputs_and_gradients(gated, do, x, w_in, w_gate, w_out)
    got = outputs_and_gradients(gated_ring(size, recompute), do, x, w_in, w_gate, w_out)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_product_of_matrices_with_any_function(x64):
    a, b, c, do = normal((24, 5), (5, 16), (16, 7), (24, 7))
    f = lambda z: jnp.sin(z) * z
    over_ring = sharded(lambda a, b, c: metp(f, a, b, c, axis_name="ring"), 4, (FIRST, ROWS, FIRST), FIRST)
    expected = outputs_and_gradients(lambda a, b, c: f(a @ b) @ c, do, a, b, c)
    for got, want in zip(outputs_and_gradients(over_ring, do, a, b, c), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_bfloat16_is_as_exact_as_on_one_device():
    wide = normal((1, 64, 128), (128, 256), (128, 256), (256, 128), (1, 64, 128), dtype=jnp.float32)
    wide = [a * scale for a, scale in zip(wide, (1, 0.1, 0.1, 0.1, 1), strict=True)]
    *args, do = [a.astype(jnp.bfloat16) for a in wide]
    with jax.enable_x64(True):
        exact = outputs_and_gradients(gated, *[jax.device_put(np.asarray(a, np.float64)) for a in (do, *args)])
        exact = [np.asarray(a) for a in exact]
    error = lambda got: [np.linalg.norm(np.asarray(a, np.float64) - b) for a, b in zip(got, exact, strict=True)]
    plain = error(outputs_and_gradients(gated, do, *args))
    for mine, theirs in zip(error(outputs_and_gradients(gated_ring(8), do, *args)), plain, strict=True):
        assert mine <= 1.1 * theirs


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_no_array_is_larger_than_a_block_of_rows_by_a_block_of_columns(tokens):
    """And what is live at a time is what the docstring says."""
    dim, hidden, size = 64, 1024, 8
    x, w_in, w_gate, w_out, do = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, tokens, dim), (dim, hidden), (dim, hidden), (hidden, dim), (1, tokens, dim))
    )

    def step(do, *args):
        value, pull = jax.vjp(gated_ring(size), *args)
        return value, *pull(do)

    compiled = jax.jit(step).lower(do, x, w_in, w_gate, w_out).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    tile, block, rows = tokens // size * hidden // size, 3 * dim * hidden // size, tokens // size * dim
    assert largest <= max(2 * tile, 2 * block, rows)
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 4 * (7 * tile + 5 * 2 * block + 2 * rows)
    if tokens >= size * hidden:
        # With a long sequence all temporaries together are less than one of the arrays that tensor parallelism would hold.
        assert temp < 4 * tokens * hidden // size


def test_kept_products_are_not_multiplied_again():
    shapes = {"x": (1, 16, 4), "w_in": (4, 24), "w_gate": (4, 24), "w_out": (24, 4)}
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]

    def saved_and_matmuls(recompute):
        pull = jax.eval_shape(lambda *args: jax.vjp(gated_ring(8, recompute), *args)[1], *arrays)
        do = jax.ShapeDtypeStruct(shapes["x"], jnp.float32)
        text = jax.jit(lambda pull, do: pull(do)).lower(pull, do).as_text()
        return sum(a.size for a in jax.tree.leaves(pull)), text.count("stablehlo.dot_general")

    inputs, matmuls = saved_and_matmuls(True)
    assert inputs == sum(np.prod(shape) for shape in shapes.values())
    # One less in the first step, an odd one, the loop's two, the last one and that with the own block.
    assert saved_and_matmuls(False) == (inputs + 16 * 2 * 24, matmuls - 6)


def test_hops_are_as_many_as_they_need_be():
    x, w_in, w_gate, w_out, do = normal((1, 16, 4), (4, 16), (4, 16), (16, 4), (1, 16, 4), dtype=np.float32)
    forward = jax.jit(gated_ring(8)).lower(x, w_in, w_gate, w_out).as_text()
    # Of two arrays, in the first step, and twice in the loop's body, which is two steps.
    assert forward.count("collective_permute") == 2 * 3

    def backward(*args):
        _, pull = jax.vjp(gated_ring(8), *args)
        return pull(do)

    # Before and in the first step, twice as many in an odd one and in each of the loop's two, in the last step the sums, and
    # those on their way home.
    text = jax.jit(backward).lower(x, w_in, w_gate, w_out).as_text()
    assert text.count("collective_permute") == 2 * (1 + 1 + 2 + 4 + 1 + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_ring_visits_every_block_and_brings_sums_home(size, count):
    """Blocks of two dtypes; device r adds (r + 1) a and b for each piece (a, b)."""

    def local(a, b):
        rank = jax.lax.axis_index("ring")

        def body(seen, block, step):
            a, b = block
            seen = seen.at[b[0]].add(a[0] * (1 + jnp.float32(step)))
            return seen, (a * (rank + 1).astype(jnp.float32), b.astype(jnp.float32))

        start = jax.lax.pcast(jnp.zeros(size), "ring", to="varying")
        piece = lambda block, i: (block[0] * jnp.float32(i + 1), block[1])
        return ring.collect(body, (a, b), start, axis_name="ring", dtype=jnp.int32, count=count, piece=piece)

    ranks = np.arange(size)
    over_ring = jax.jit(sharded(local, size, (FIRST, FIRST), (FIRST, (ROWS, ROWS))))
    seen, (weighted, counted) = over_ring(jnp.asarray(ranks + 1, jnp.float32), jnp.asarray(ranks, jnp.int32))
    pieces = np.arange(1, count + 1)
    steps = (ranks[:, None] - ranks) % size
    np.testing.assert_array_equal(seen.reshape(size, size), pieces.sum() * (ranks + 1) * (1 + steps))
    np.testing.assert_array_equal(weighted, pieces[:, None] * (ranks + 1) * (size * (size + 1) // 2))
    np.testing.assert_array_equal(counted, np.broadcast_to(size * ranks, (count, size)))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("size", [4, 5, 8])
def test_a_step_waits_for_the_one_before(size):
    """Else XLA, which inlines a loop of one step, computes with two blocks at once and waits for hops before it does."""

    def local(a):
        seen = ring.scan(lambda seen, block, step: (0.0 if seen is None else seen) + block, a, None, axis_name="ring")
        return ring.collect(lambda seen, block, step: (seen + block, block), a, seen, axis_name="ring", dtype=a.dtype)

    (mapped,) = jax.make_jaxpr(sharded(local, size, FIRST, (FIRST, ROWS)))(jnp.ones((size, 4))).eqns
    found = list(equations(mapped.params["jaxpr"]))
    made_by = {out: e.primitive.name for e in found for out in e.outvars}
    hops, loops = ([e for e in found if e.primitive.name == name] for name in ("ppermute", "scan"))
    # All that leaves a loop's body passed a barrier, and so did what hops, but for the block that `collect` begins with.
    taken = [made_by.get(e.invars[0], "argument") for e in hops]
    assert set(taken) == {"argument", "optimization_barrier", "scan", "ppermute"} - ({"scan"} if size == 4 else set())
    assert taken.count("ppermute") == 1
    assert len(loops) == {4: 1, 5: 2, 8: 2}[size]
    for loop in loops:
        carried = bodies(loop)[0].outvars[: scan_counts(loop)[1]]
        assert {made_by[v] for v in carried if v.aval.shape} == {"optimization_barrier"}


def test_sums_hop_beside_the_first_of_two_functions_and_the_block_beside_the_second():
    def local(a):
        first = lambda seen, block, step: (seen, jnp.sin(block))
        second = lambda carry, block, step: (carry[0] + carry[1], jnp.cos(block))
        return ring.collect((first, second), a, jnp.zeros_like(a), axis_name="ring", dtype=a.dtype)

    over_ring = sharded(local, 4, FIRST, (FIRST, ROWS))
    (a,) = normal((4, 3), dtype=np.float32)
    seen, sums = over_ring(a)
    np.testing.assert_allclose(seen, np.tile(np.sin(a).sum(0), (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(sums[0], 4 * np.cos(a), rtol=1e-5)
    ((mapped,),) = (eqn.params["jaxpr"].eqns for eqn in jax.make_jaxpr(over_ring)(a).eqns)
    names = [e.primitive.name for e in mapped.params["jaxpr"].eqns]
    wait = "optimization_barrier"
    order = [name for name in names if name in ("ppermute", "sin", "cos", wait)]
    without_sums, without_block = ["sin", "ppermute", "cos"], ["ppermute", "sin", wait, "cos"]
    both = ["ppermute", "sin", wait, "ppermute", "cos"]
    assert order == ["ppermute", *without_sums, wait, *both, wait, *without_block, wait, *without_block, wait]


def test_no_block_is_copied_from_step_to_step():
    """A loop of single steps would: what arrives cannot be where what is sent still is."""
    a = jax.ShapeDtypeStruct((8 * 128, 128), jnp.float32)
    body = lambda seen, block, step: (0.0 if seen is None else seen) + block @ block
    over_ring = sharded(lambda a: ring.scan(body, a, None, axis_name="ring"), 8, FIRST, FIRST)
    text = jax.jit(over_ring).lower(a).compile().as_text()
    assert "collective-permute" in text
    assert not re.findall(r"f32\[128,128\]\S* copy\(", text)


def test_wrong_input_is_refused():
    x, w_in, w_out = normal((1, 16, 4), (4, 16), (16, 4), dtype=np.float32)
    with pytest.raises(
        ValueError, match=r"axis_name must be an axis of the mesh .* got 'ring': call this inside jax.shard_map"
    ):
        metp_mlp(x, w_in, w_out, axis_name="ring")
    call = lambda x, w_in, w_out: sharded(lambda *a: metp_mlp(*a, axis_name="ring"), 4, (ROWS, ROWS, FIRST), ROWS)(
        x, w_in, w_out
    )
    with pytest.raises(ValueError, match=r"w_out must be of 4 rows, as many as this device holds columns of w_in"):
        call(x, w_in, w_out[:8])
    with pytest.raises(ValueError, match=r"w_in must be of shape \(4, 4\)"):
        call(x, w_in[:3], w_out)
    with pytest.raises(TypeError, match="w_in must be of x's dtype float32, got an array of bfloat16"):
        call(x, w_in.astype(jnp.bfloat16), w_out)
