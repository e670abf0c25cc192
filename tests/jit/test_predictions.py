import jax
import jax.numpy as jnp

from memjax._jit.derivatives.body import Body
from memjax._jit.ways.predictions import Predictions, Way

WIDE = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def test_a_plan_is_off_by_what_the_nearest_of_its_program_was_and_other_programs_by_a_factor():
    found, whole, half, as_written = Predictions(), Way((1,), True), Way((2,), True), Way(None)
    assert found.corrected(whole, 100) == 100
    found.note(as_written, 100, 300)
    assert found.corrected(whole, 100) == 100  # it is compiled with other options
    found.note(whole, 100, 110)
    found.note(whole, 60, 90)
    assert found.corrected(whole, 95) == 105
    assert found.corrected(whole, 61) == 91
    assert found.corrected(half, 50) == 75  # by the factor of the plan of 60 bytes
    found.note(whole._replace(in_steps=True), 60, 62)
    assert found.corrected(whole._replace(in_steps=True), 100) == 102


def test_what_one_update_leaves_to_the_next_is_there_while_that_one_runs():
    def train_step(w, x):
        for part in (x[0], x[1]):
            w = w - jax.grad(lambda w, part=part: jnp.sum(jnp.sin(part @ w.T) ** 2))(w)
        return jnp.sum(w)

    body = Body(jax.make_jaxpr(train_step)(WIDE, jax.ShapeDtypeStruct((2, 32, 256), jnp.float32)))
    body.note_around()
    assert [one.around for one in body.every()] == [0, 64 * 256 * 4]
