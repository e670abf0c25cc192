"""A language model of one LSTM layer over bytes, its loss taken step by step inside the scan."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, UInt8

import memjax


class ByteLSTM(nnx.Module):
    """Embedding, LSTM (Hochreiter and Schmidhuber 1997) and a linear head, float32.

    One step of the scan embeds a byte, updates the state, and adds the cross-entropy of the next byte to a running sum: with
    `jax.lax.scan` all of it is kept for every step, with `memjax.remat.scan` as much as `budget` allows.

    Args:
      features: of embedding and state.
      budget: bytes, or text such as "4MiB"; None is `jax.lax.scan`.
      rngs: needs `params`.
    """

    def __init__(self, features: int, *, budget: str | None, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, features, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(features, features, rngs=rngs)
        self.head = nnx.Linear(features, 256, rngs=rngs)
        self.features, self.budget = features, budget

    def __call__(self, text: UInt8[Array, "b t"]) -> tuple[Array, Array]:
        """Per sequence, the sum of the cross-entropy of bytes 1 to t - 1 in nats, and how many of them are guessed right."""
        graph, params = nnx.split(self)
        batch = text.shape[0]
        state = (jnp.zeros((batch, self.features)), jnp.zeros((batch, self.features)))
        sums = (jnp.zeros(batch), jnp.zeros(batch))
        bytes_in_time = text.T.astype(jnp.int32)
        step = functools.partial(_step, graph, params)
        (_, sums), _ = self._scan()(step, (state, sums), (bytes_in_time[:-1], bytes_in_time[1:]))
        return sums

    def _scan(self) -> Callable:
        return jax.lax.scan if self.budget is None else functools.partial(memjax.remat.scan, budget=self.budget)


def _step(graph, params, carry, bytes_now):
    model = nnx.merge(graph, params)
    state, (loss, right) = carry
    given, following = bytes_now
    state, hidden = model.cell(state, model.embed(given))
    logits = model.head(hidden)
    loss += optax.softmax_cross_entropy_with_integer_labels(logits, following)
    right += (jnp.argmax(logits, -1) == following).astype(right.dtype)
    return (state, (loss, right)), None
