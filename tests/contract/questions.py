"""What is asked of every transform. Each question raises where the answer is wrong."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.contract.answers import (
    close,
    compiled_gradient,
    expected,
    gradient,
    nothing,
    of_all,
    plain_answer,
    plainly,
    value,
    with_aux,
)
from tests.contract.transforms import EXAMPLES, POSITIONS, WIDTH, Transform, examples, total_of_losses, weights

QUESTIONS: dict[str, Callable[[Transform], None]] = {}


def ask(name: str) -> Callable[[Any], Any]:
    def register(question: Any) -> Any:
        QUESTIONS[name] = question
        return question

    return register


def in_groups(x: Any) -> Any:
    return x.reshape(4, EXAMPLES // 4, POSITIONS, WIDTH)


def mesh(kind: Any = AxisType.Auto, shape: tuple[int, ...] = (8,), names: tuple[str, ...] = ("d",)) -> Any:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def placed(of: Any, w: Any, x: Any, of_w: P, of_x: P) -> Any:
    return jax.device_put(w, NamedSharding(of, of_w)), jax.device_put(x, NamedSharding(of, of_x))


@ask("jit, transfer_guard, donated arguments, has_aux")
def _(t: Transform) -> None:
    args = weights() + 0, examples() + 0
    with jax.transfer_guard("disallow"):
        step = jax.jit(with_aux(t.ours), donate_argnums=(0, 1))
        (total, aux), grads = step(*args)
    assert all(a.is_deleted() for a in args)
    close(t, (total, grads), expected(t))
    close(t, aux, plain_answer("aux", t, lambda f: compiled_gradient(f)(weights(), examples())[0][1]))
    exact = expected(t)[1][0]
    if t.encodes:
        assert np.linalg.norm(grads[0] - exact) > 1e-5 * np.linalg.norm(exact)


@ask("vmap")
def _(t: Transform) -> None:
    w, x = weights(), in_groups(examples())
    ws = jnp.stack([w, 0.9 * w, 0.8 * w, 0.7 * w])
    each = lambda f: jax.tree.map(lambda *a: np.stack(a), *(plainly(f, *args) for args in zip(ws, x, strict=True)))
    close(t, jax.jit(jax.vmap(gradient(t.ours)))(ws, x), plain_answer("vmap", t, each))


def each_example(f: Any) -> Any:
    """A sum over examples, each by itself but for half of their mean, which is taken away within."""
    inside = lambda h: h - 0.5 * jax.lax.pmean(h, "batch")

    def total(w: Any, x: Any) -> Any:
        one = lambda x: value(f, inside, w, x[None])
        return jnp.sum(jax.vmap(one, axis_name="batch")(x))

    return jax.jit(jax.value_and_grad(total, (0, 1)))(weights(), examples())


@ask("vmap with a named axis")
def _(t: Transform) -> None:
    close(t, each_example(t.ours), plain_answer("each example", t, each_example))


def on_devices(f: Any, inside: Any, of: Any, *, within: bool, **options: Any) -> Any:
    """Gradients of the sum over devices, taken outside of a `shard_map` or within."""
    one = lambda w, x: value(f, inside, w, x)[None]
    specs: Any = {"in_specs": (P(), P("d")), "mesh": of, **options}
    if not within:
        total = lambda w, x: jnp.sum(jax.shard_map(one, out_specs=P("d"), **specs)(w, x))
        return jax.jit(jax.grad(total, (0, 1)))

    def gradients(w: Any, x: Any) -> Any:
        found, of_x = jax.grad(lambda w, x: one(w, x)[0], (0, 1))(w, x)
        return found[None] if options.get("check_vma") is False else found, of_x

    out = P("d") if options.get("check_vma") is False else P()
    return jax.jit(jax.shard_map(gradients, out_specs=(out, P("d")), **specs))


def _shard_map(t: Transform, check_vma: bool, within: bool) -> None:
    inside = lambda h: h - 0.5 * jax.lax.pmean(h, "d")
    run = lambda f: on_devices(f, inside, mesh(), within=within, check_vma=check_vma)(weights(), examples())
    if check_vma:
        _, exact = plain_answer("each example", t, each_example)  # which is what each device has
    else:
        exact = plain_answer("without check_vma", t, run)
    close(t, run(t.ours), exact)


@ask("shard_map, gradient outside")
def _(t: Transform) -> None:
    _shard_map(t, True, False)


@ask("shard_map, gradient inside")
def _(t: Transform) -> None:
    _shard_map(t, True, True)


@ask("shard_map, check_vma=False")
def _(t: Transform) -> None:
    _shard_map(t, False, True)


@ask("shard_map, some axes manual")
def _(t: Transform) -> None:
    of = mesh(shape=(4, 2), names=("d", "t"))
    found = on_devices(t.ours, nothing, of, within=False, axis_names={"d"})(weights(), examples())

    def each(f: Any) -> Any:
        of_w, of_x = zip(*(plainly(f, weights(), x)[1] for x in in_groups(examples())), strict=True)
        return sum(of_w), np.concatenate(of_x)

    close(t, found, plain_answer("some axes manual", t, each))


def _on_mesh(t: Transform, kind: Any, of_w: P, of_x: P) -> None:
    of = mesh(kind)
    with jax.set_mesh(of):
        found = jax.jit(gradient(t.ours))(*placed(of, weights(), examples(), of_w, of_x))
    close(t, jax.device_get(found), expected(t))


@ask("automatic mesh: positions")
def _(t: Transform) -> None:
    _on_mesh(t, AxisType.Auto, P(), P(None, "d"))


@ask("automatic mesh: features and parameters")
def _(t: Transform) -> None:
    _on_mesh(t, AxisType.Auto, P(None, None, "d"), P(None, None, "d"))


@ask("explicit mesh: examples")
def _(t: Transform) -> None:
    _on_mesh(t, AxisType.Explicit, P(), P("d"))


@ask("explicit mesh: positions")
def _(t: Transform) -> None:
    _on_mesh(t, AxisType.Explicit, P(), P(None, "d"))


@ask("automatic mesh: examples, bytes and work of a device")
def _(t: Transform) -> None:
    """On eight devices as on one that has an eighth of the examples, within 10% of arrays of examples."""
    w, x = weights(), jnp.tile(examples(), (8, 1, 1))
    compiled = lambda *args: jax.jit(gradient(t.ours)).lower(*args).compile()
    args = placed(mesh(), w, x, P(), P("d"))
    many, one = compiled(*args), compiled(w, examples())
    nbytes = lambda found: found.memory_analysis().temp_size_in_bytes
    flops = lambda found: found.cost_analysis()["flops"]
    parameters = 2 * w.nbytes  # the sum of gradients over devices
    assert nbytes(many) <= 1.1 * nbytes(one) + parameters
    assert flops(many) <= 1.1 * flops(one) + 4 * w.size

    def plain(f: Any) -> Any:
        if f is total_of_losses:  # a single result, of which the value is the square
            return plainly(f, w, x)
        total, (of_w, of_x) = expected(t)
        return 8 * total, (8 * of_w, np.tile(of_x, (8, 1, 1)))

    close(t, jax.device_get(many(*args)), plain_answer("eight times the examples", t, plain))


@ask("second derivatives")
def _(t: Transform) -> None:
    def run(f: Any) -> Any:
        penalty = lambda w, x: jnp.sum(jax.grad(functools.partial(value, f, nothing), 1)(w, x) ** 2)
        return jax.jit(jax.grad(penalty))(weights(), examples())

    close(t, run(t.ours), plain_answer("second derivatives", t, run), rounding=1e-4)


@ask("forward mode")
def _(t: Transform) -> None:
    w, x = weights(), examples()
    run = lambda f: jax.jit(lambda w, x: jax.jvp(functools.partial(value, f, nothing), (w, x), (w, x)))(w, x)
    close(t, run(t.ours), plain_answer("forward mode", t, run))


@ask("within a loop, jax.checkpoint and a branch")
def _(t: Transform) -> None:
    scales = 0.5, 1.0

    def turn(total: Any, scale: Any, w: Any, x: Any) -> Any:
        one = jax.checkpoint(lambda w, x: value(t.ours, nothing, w, scale * x))
        return total + jax.lax.cond(total > 1e9, lambda: total, lambda: jnp.log1p(one(w, x))), None

    def total(w: Any, x: Any) -> Any:
        turns = lambda total, scale: turn(total, scale, w, x)
        return jax.lax.scan(turns, jnp.float32(0), jnp.array(scales))[0]

    def by_hand(f: Any) -> Any:
        one, (of_w, of_x) = 0, (0, 0)
        for scale in scales:
            total, grads = plainly(f, weights(), scale * examples())
            one, of_w, of_x = (
                one + np.log1p(total),
                of_w + grads[0] / (1 + total),
                of_x + scale * grads[1] / (1 + total),
            )
        return one, (of_w, of_x)

    found = jax.jit(jax.value_and_grad(total, (0, 1)))(weights(), examples())
    close(t, found, plain_answer("within a loop", t, by_hand), rounding=1e-4)


@ask("closed-over keys and integers, debug_nans")
def _(t: Transform) -> None:
    """Traced, as in a training step: dropout, and a step's number."""

    def run(f: Any) -> Any:
        def step(w: Any, x: Any, key: Any, number: Any) -> Any:
            drop = lambda h: jnp.where(jax.random.bernoulli(key, 0.8, ()), h, 0) * (1 + number).astype(h.dtype)
            return gradient(f, drop)(w, x)

        return jax.jit(step)(weights(), examples(), jax.random.key(3), jnp.int32(1))

    with jax.debug_nans(True):
        found = run(t.ours)
    close(t, found, plain_answer("closed-over keys and integers", t, run))


@ask("mutable state of a module")
def _(t: Transform) -> None:
    """A counter and a running mean are updated once in a step, as without the transform."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(weights()[0])
            self.calls = nnx.BatchStat(jnp.float32(0))
            self.mean = nnx.BatchStat(jnp.zeros(WIDTH))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ self.w[...])
            self.calls[...] += 1
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(jnp.mean(h, (0, 1)))
            return x + h

    call = lambda model, x: model(x)

    def run(f: Any) -> Any:
        model = Model()
        step = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.sum(f(model, x) ** 2)))
        found = step(model, examples()), nnx.state(model)
        assert model.calls[...] == 1
        return found

    close(t, run(t.wrap(call)), of_all("module", lambda: run(call)))


@ask("arguments that are keys, integers, None")
def _(t: Transform) -> None:
    def f(x: Any, w: Any, rest: Any) -> Any:
        key, number, none = rest
        assert none is None
        return jnp.tanh(x @ w) * (1 + number).astype(x.dtype) * jax.random.bernoulli(key, 0.8, ()).astype(x.dtype)

    def run(f: Any) -> Any:
        total = lambda w, x, rest: jnp.sum(f(x, w, rest) ** 2)
        return jax.jit(jax.grad(total, (0, 1)))(w, x, (jax.random.key(3), jnp.int32(1), None))

    w, x = weights()[0], examples()[0]
    close(t, run(t.wrap(f)), of_all("arguments", lambda: run(f)))


@ask("no examples")
def _(t: Transform) -> None:
    total, (of_w, of_x) = jax.jit(gradient(t.ours))(weights(), examples(count=0))
    assert total == 0
    assert not np.any(of_w)
    assert of_x.shape == (0, POSITIONS, WIDTH)


@ask("float64")
def _(t: Transform) -> None:
    with jax.enable_x64(True):
        args = weights(jnp.float64), examples(jnp.float64)
        run = lambda f: jax.jit(gradient(f))(*args)
        found, exact = run(t.ours), plain_answer("float64", t, run)
        assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(found))
        close(t, found, exact, rounding=1e-12)


def _narrow(t: Transform, dtype: Any) -> None:
    args = weights(dtype), examples(dtype)
    wide = [a.astype(jnp.float32) for a in args]
    run = lambda f: jax.jit(gradient(f))(*args)
    found, plain = run(t.ours), plain_answer(f"{dtype}", t, run)
    exact = plain_answer(f"exact {dtype}", t, lambda f: plainly(f, *wide))
    assert all(a.dtype == dtype for a in found[1])
    wrong = lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
    for a, b, c in zip(*map(jax.tree.leaves, (found, plain, exact)), strict=True):
        assert wrong(a, c) <= 1.5 * wrong(b, c) + t.error + 1e-4


@ask("float16")
def _(t: Transform) -> None:
    _narrow(t, jnp.float16)


@ask("bfloat16")
def _(t: Transform) -> None:
    _narrow(t, jnp.bfloat16)


def _export(t: Transform, x: Any) -> None:
    exported = jax.export.export(jax.jit(gradient(t.ours)))(weights(), x)
    close(t, exported.call(weights(), examples()), expected(t))


@ask("export")
def _(t: Transform) -> None:
    _export(t, examples())


@ask("export, symbolic examples")
def _(t: Transform) -> None:
    _export(t, jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), POSITIONS, WIDTH), jnp.float32))


@ask("cloudpickle")
def _(t: Transform) -> None:
    pickled = cloudpickle.loads(cloudpickle.dumps(t.wrap(lambda x: jnp.tanh(jnp.sin(x)))))
    run = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(examples())
    close(t, run(pickled), of_all("pickled", lambda: run(lambda x: jnp.tanh(jnp.sin(x)))))


@ask("threads")
def _(t: Transform) -> None:
    """Two shapes are traced at once."""
    results: dict[int, Any] = {}

    def work(count: int) -> None:
        results[count] = jax.make_jaxpr(gradient(t.ours))(weights(), examples(count=count)).out_avals

    threads = [threading.Thread(target=work, args=(count,)) for count in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {count: found[2].shape[0] for count, found in results.items()} == {2: 2, 3: 3}
