"""Training steps of a small decoder on a mesh of eight devices, as people write them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, HEADS, KEY_HEADS, LENGTH, VOCABULARY = 4, 64, 192, 4, 2, 32, 128
EXAMPLES = 64
MICROBATCHES = 2
MODES = "unrolled", "scan"
MESHES = "fsdp", "fsdp x tensor", "explicit", "shard_map"
UPDATES = "adamw", "accumulation", "multisteps"
ADAMW = optax.adamw(1e-3, eps=1e-6)

_SIZES = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, KEY_HEADS * WIDTH // HEADS),
    "value": (WIDTH, KEY_HEADS * WIDTH // HEADS),
    "out": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "norm1": (WIDTH,),
    "norm2": (WIDTH,),
}
_BY_ROWS = "out", "down"  # of those kernels the rows are split by tensor parallelism, of the others the columns

Layer = Callable[[Any, jax.Array], jax.Array]
Params = dict[str, Any]


class Step(NamedTuple):
    """`f(*args)`, the options that it is jitted with, and the mesh that it runs in: None where none has to be set."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    mesh: Any = None


def step(mode: str, where: str, update: str, wrap: Callable[[Layer], Layer] = lambda layer: layer) -> Step:
    """A step.

    Args:
      mode: one of MODES: whether the layers are a loop.
      where: one of MESHES.
      update: one of UPDATES.
      wrap: put round a layer.
    """
    mesh = _mesh(where)
    optimizer = optax.MultiSteps(ADAMW, 2) if update == "multisteps" else ADAMW
    gradient = _gradient(wrap, where, mesh, accumulated=update == "accumulation")

    def f(params: Params, state: Any, tokens: jax.Array) -> Any:
        value, gradients = gradient(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = _placed(_parameters(mode), where, mesh)
    state = optimizer.init(params)
    state = jax.tree.map(lambda a: a if a.ndim else jax.device_put(a, NamedSharding(mesh, P())), state)
    shape = (MICROBATCHES, EXAMPLES // MICROBATCHES) if update == "accumulation" else (EXAMPLES,)
    tokens = jax.random.randint(jax.random.key(1), (*shape, LENGTH + 1), 0, VOCABULARY)
    args = params, state, jax.device_put(tokens, NamedSharding(mesh, P(*[None] * (len(shape) - 1), "data")))
    shardings = jax.tree.map(lambda a: a.sharding, args)
    options = {"donate_argnums": (0, 1), "in_shardings": shardings, "out_shardings": (*shardings[:2], None)}
    return Step(f, args, options, mesh if where == "explicit" else None)


def _mesh(where: str) -> Any:
    if where == "fsdp x tensor":
        return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit if where == "explicit" else AxisType.Auto,))


def _parameters(mode: str) -> Params:
    draw = lambda key, size: jax.random.normal(key, size) / size[0] ** 0.5

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(_SIZES))
        pairs = zip(keys, _SIZES.items(), strict=True)
        return {name: draw(key, size) if len(size) > 1 else jnp.ones(size) for key, (name, size) in pairs}

    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    layers = jax.vmap(layer)(keys[:LAYERS]) if mode == "scan" else [layer(key) for key in keys[:LAYERS]]
    embedding, head = draw(keys[-2], (VOCABULARY, WIDTH)), draw(keys[-1], (WIDTH, VOCABULARY))
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(WIDTH), "head": head}


def _placed(params: Params, where: str, mesh: Any) -> Params:
    def spec(path: Any, a: jax.Array) -> P:
        name = path[-1].key
        if where == "shard_map":
            return P()
        stacked = [None] * (a.ndim - len(_SIZES.get(name, a.shape)))
        if where != "fsdp x tensor" or name.startswith("norm") or name == "embedding":
            return P(*stacked, "data")
        return P(*stacked, *(("model", "data") if name in _BY_ROWS else ("data", "model")))

    return jax.tree_util.tree_map_with_path(
        lambda path, a: jax.device_put(a, NamedSharding(mesh, spec(path, a))), params
    )


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def _layer(whole: Callable[[Any], Any], split: Callable[[jax.Array], jax.Array], p: Params, x: jax.Array) -> jax.Array:
    p = whole(p)
    h = _norm(x, p["norm1"])
    heads = lambda a, count: a.reshape(*x.shape[:2], count, -1)
    query, key, value = heads(h @ p["query"], HEADS), heads(h @ p["key"], KEY_HEADS), heads(h @ p["value"], KEY_HEADS)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = split(x + attended.reshape(x.shape) @ p["out"])
    h = _norm(x, p["norm2"])
    return split(x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"])


def _gradient(wrap: Callable[[Layer], Layer], where: str, mesh: Any, *, accumulated: bool) -> Callable[..., Any]:
    """From (parameters, tokens) to (loss, gradients)."""
    whole = split = lambda a: a
    if where == "explicit":  # as with fully sharded parameters on automatic axes a layer's are gathered where it runs
        whole = functools.partial(jax.tree.map, lambda a: jax.sharding.reshard(a, P()))
    if where == "fsdp x tensor":
        split = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
    layer = wrap(functools.partial(_layer, whole, split))

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        outer = whole({name: params[name] for name in ("embedding", "norm", "head")})
        rows = {"out_sharding": P("data")} if where == "explicit" else {}
        x = split(outer["embedding"].at[tokens[:, :-1]].get(**rows))
        if isinstance(params["layers"], list):
            for p in params["layers"]:
                x = layer(p, x)
        else:
            x = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])[0]
        logits = _norm(x, outer["norm"]) @ outer["head"]
        value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return jax.lax.pmean(value, "data") if where == "shard_map" else value

    one = jax.value_and_grad(loss)

    def gradient(params: Params, tokens: jax.Array) -> Any:
        if not accumulated:
            return one(params, tokens)
        add = lambda total, tokens: (jax.tree.map(jnp.add, total, one(params, tokens)), None)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        total = jax.lax.scan(add, zeros, tokens)[0]
        return jax.tree.map(lambda a: a / MICROBATCHES, total)

    if where != "shard_map":
        return gradient
    specs = P(), P(None, "data") if accumulated else P("data")
    return jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())
