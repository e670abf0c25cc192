"""The transforms that the contract is asked of: each with the function as one writes it without memjax.

`ours` and `plain` are functions of `(inside, w, x)`. `x` has examples, positions and features, `w` is a stack of matrices, and
the result has examples and positions first. `inside` is a function of arrays of x's shape that runs within what is transformed.
To put a transform under contract, add an entry to `TRANSFORMS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import memjax
from memjax import compress, remat, shard
from tests.remat.dense.dense_cases import random_block

EXAMPLES, POSITIONS, WIDTH, MATRICES, LAYERS = 8, 128, 32, 4, 2  # an example has 4096 numbers: fewer are never encoded
HEADS, CLASSES = 4, 72
SHAPE = (8, 16)  # of positions, as those of images


@dataclass(frozen=True)
class Transform:
    """What is asked, and what is answered otherwise than with the values and gradients of `plain`."""

    ours: Callable[[Any, Any, jax.Array], jax.Array]
    plain: Callable[[Any, Any, jax.Array], jax.Array]
    error: float = 0.0  # relative, of gradients: beside rounding
    encodes: bool = False  # whether gradients must differ from the plain ones
    refuses: dict[str, str] = field(
        default_factory=dict
    )  # question: the error that answers it, as a regular expression
    without: dict[str, str] = field(default_factory=dict)  # question: why it cannot be asked
    wrap: Callable[[Any], Any] | None = None  # what makes a function of any arguments of such a function


@functools.cache
def weights(dtype: Any = None) -> jax.Array:
    return 0.2 * jax.random.normal(jax.random.key(0), (MATRICES, WIDTH, WIDTH), dtype)


@functools.cache
def examples(dtype: Any = None, count: int = EXAMPLES) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (count, POSITIONS, WIDTH), dtype)


# Layers


def layer(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return x + inside(jnp.tanh(x @ w))


def layers(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = layer(inside, w[i], x)
    return x


def each_layer(wrap: Any) -> Any:
    def run(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        one = wrap(functools.partial(layer, inside))
        for i in range(LAYERS):
            x = one(w[i], x)
        return x

    return run


def whole(plain: Any, wrap: Any) -> Any:
    return lambda inside, w, x: wrap(functools.partial(plain, inside))(w, x)


def by_scan(**options: Any) -> Any:
    return lambda inside, w, x: remat.scan(lambda x, w: (layer(inside, w, x), None), x, w[:LAYERS], **options)[0]


def by_chain(*, of_plain: float | None = None, **options: Any) -> Any:
    if of_plain is not None:
        types = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
        x = jax.ShapeDtypeStruct((EXAMPLES, POSITIONS, WIDTH), jnp.float32)
        costs = remat.chain_costs([functools.partial(layer, lambda x: x)] * LAYERS, types, x)
        most = remat.chain_schedule(costs, 2**40).nbytes
        options["schedule"] = remat.chain_schedule(costs, int(of_plain * most))
    run = lambda inside, w, x: remat.chain([functools.partial(layer, inside)] * LAYERS, list(w[:LAYERS]), x, **options)
    return run


def feed_forward(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    """Wide enough, and with positions enough on each of eight devices, for tiles to take bytes away."""
    wide = w.reshape(WIDTH, -1)
    return jnp.tanh(inside(jnp.stack([x, 0.5 * x], -2)) @ wide) @ wide.T


def one_layer(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return layer(inside, w[0], x)


def measured_layers() -> compress.Layers:
    plain = functools.partial(one_layer, lambda x: x)
    function = lambda codec, w, x: jnp.sum(memjax.compressed(plain, codec)(w, x))
    return compress.layers(function, weights(), examples(), bound=2**-10)


# Attention, the loss, a dense block, a ring


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)


def kernels(w: jax.Array) -> list[jax.Array]:
    apart = lambda a: a.reshape(WIDTH, HEADS, WIDTH // HEADS)
    return [*map(apart, w[:3]), w[3].reshape(HEADS, WIDTH // HEADS, WIDTH)]


def attention(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    query, key, value, out = kernels(w)
    q, k, v = (jnp.einsum("btd,dnh->btnh", inside(x), kernel) for kernel in (query, key, value))
    return x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), out)


def attention_in_groups(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return remat.attention_in_groups(x, *kernels(w), groups=2, tile=32, norm=inside, attend=attend)


def labels(x: jax.Array) -> jax.Array:
    """Some of them ignored, and sharded as x is."""
    return jnp.where(x[..., 0] > 1, -100, jnp.argmax(x, -1).astype(jnp.int32) * 2)


def head(w: jax.Array) -> jax.Array:
    return w.reshape(-1, WIDTH)[:CLASSES]


def losses(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    logits = inside(x) @ head(w).T
    logits = logits.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    correct = jax.nn.one_hot(labels(x), CLASSES, dtype=logits.dtype)  # of zeros where the label is ignored
    return jnp.sum(correct * (jax.nn.logsumexp(logits, -1, keepdims=True) - logits), -1)


def total_of_losses(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(losses(inside, w, x)).reshape(1, 1)


def loss(implementation: str | None, reduction: str) -> Any:
    def run(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        options = {"implementation": implementation, "reduction": reduction, "chunk": 64}
        if implementation == "full":
            del options["chunk"]
        found = memjax.linear_cross_entropy(inside(x), head(w), labels(x), **options)
        return found if reduction == "none" else found.reshape(1, 1)

    return run


DENSE = remat.DenseSpec(WIDTH, 4, 2, 2)


def dense(keep: str) -> Any:
    def run(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        del inside
        params, running, *_ = random_block(DENSE, (1, 1, 1), seed=0, dtype=x.dtype)
        params = jax.tree.map(lambda a: a + 0 * w[0, 0, 0], params)  # they lie where the weights do
        kernel = params.kernel1 + jnp.resize(w[0], params.kernel1.shape)
        images = x.reshape(x.shape[0], *SHAPE, WIDTH)
        found, _ = remat.dense_block(DENSE, params._replace(kernel1=kernel), running, images, keep=keep)
        return found.reshape(x.shape[0], POSITIONS, DENSE.out_features)

    return run


def on_a_ring(of_devices: Any) -> Any:
    """Each device has its positions, its columns of the first matrix and its rows of the second."""

    def run(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        mesh = jax.make_mesh((4,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        return jax.shard_map(
            functools.partial(of_devices, inside),
            mesh=mesh,
            in_specs=(P(None, "ring"), P(None, "ring"), P("ring")),
            out_specs=P(None, "ring"),
        )(x, w[0], w[1])

    return run


def metp_mlp(inside: Any, x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    return x + shard.metp_mlp(x, w_in, w_out, activation=lambda h: inside(jnp.tanh(h)), axis_name="ring")


def mlp(inside: Any, w: jax.Array, x: jax.Array) -> jax.Array:
    return x + inside(jnp.tanh(x @ w[0])) @ w[1]


# What transforms answer otherwise

REVERSE = r"cannot be differentiated in forward mode.*reverse mode"
FORWARD_MODE = {"forward mode": REVERSE}
SYMBOLIC = {"export, symbolic examples": r"must be arrays of known sizes.*export the program once for each size"}
TWICE = {"second derivatives": "supports first derivatives in reverse mode only"}
TRANSFORMS: dict[str, Transform] = {}


OF_FUNCTIONS = ("arguments that are keys, integers, None", "mutable state of a module", "cloudpickle")
NO_FUNCTION = "it returns no function"
MESHES = (
    "shard_map, gradient outside",
    "shard_map, gradient inside",
    "shard_map, check_vma=False",
    "shard_map, some axes manual",
    "automatic mesh: examples, bytes and work of a device",
    "automatic mesh: positions",
    "automatic mesh: features and parameters",
    "explicit mesh: examples",
    "explicit mesh: positions",
    "export",
    "export, symbolic examples",
    "jit, transfer_guard, donated arguments, has_aux",
)


WITH_INSIDE = ("vmap with a named axis", "closed-over keys and integers, debug_nans")
NO_CALL = dict.fromkeys(WITH_INSIDE, "it calls no function")

# Questions in whose answers a transform's arguments play no part: one of its variants is asked.
ANY_CODES = (
    *WITH_INSIDE,
    "shard_map, check_vma=False",
    "shard_map, some axes manual",
    "automatic mesh: positions",
    "within a loop, jax.checkpoint and a branch",
    "bfloat16",
    "export",
    "threads",
)
ANY_OF_JAX = (
    "shard_map, check_vma=False",
    "shard_map, some axes manual",
    "within a loop, jax.checkpoint and a branch",
    "export",
    "threads",
)
ANY_SCHEDULE = (*ANY_CODES, "automatic mesh: features and parameters", "float64")


def register(name: str, ours: Any, plain: Any = layers, *, like: str = "", alike: Any = (), **options: Any) -> None:
    """`alike`: questions that are asked of `like` and not of this one."""
    without = dict.fromkeys(alike, f"as `{like}`") | dict(options.pop("without", {}))
    if "wrap" not in options:
        without |= dict.fromkeys(OF_FUNCTIONS, NO_FUNCTION)
    TRANSFORMS[name] = Transform(ours, plain, without=without, **options)


register("remat.checkpoint", each_layer(remat.checkpoint), wrap=remat.checkpoint)
register("remat.scan(slots=)", by_scan(slots=2), refuses=FORWARD_MODE | SYMBOLIC)
register(
    "remat.scan(budget=)",
    by_scan(budget="min"),
    refuses=FORWARD_MODE | SYMBOLIC,
    like="remat.scan(slots=)",
    # Not those in which the bytes are others, or of a device.
    alike=(*WITH_INSIDE, "shard_map, check_vma=False", "automatic mesh: features and parameters", "explicit mesh: positions",
           "within a loop, jax.checkpoint and a branch", "bfloat16", "export"),
)  # fmt: skip
register(
    "remat.scan(strategy=)",
    by_scan(slots=4, strategy="internal"),
    refuses=FORWARD_MODE | SYMBOLIC,
    like="remat.scan(slots=)",
    alike=ANY_SCHEDULE,
)
register(
    "remat.scan(codec=)",
    by_scan(slots=2, codec=compress.BlockQuantized(8)),
    error=0.02,
    encodes=True,
    refuses=FORWARD_MODE | SYMBOLIC | {"float64": "must be bfloat16, float16 or float32, got float64: convert it"},
    like="remat.scan(slots=)",
    alike=(
        *WITH_INSIDE,
        "shard_map, some axes manual",
        "within a loop, jax.checkpoint and a branch",
        "export",
        "threads",
    ),
)
register(
    "remat.chain(schedule=)",
    by_chain(of_plain=0.95),
    refuses=FORWARD_MODE | SYMBOLIC,
    like="remat.chain(budget=)",
    alike=ANY_SCHEDULE,
)
register("remat.chain(budget=)", by_chain(budget=2**22), refuses=FORWARD_MODE | SYMBOLIC)
for allow, plain, error, alike in (
    ((), layers, 0.0, ()),
    (("tile",), feed_forward, 0.0, tuple(q for q in ANY_CODES if q != "automatic mesh: positions")),
    (("compress",), layers, 0.02, ANY_CODES),
):
    wrap = functools.partial(memjax.planned, budget="min", allow=("recompute", *allow))
    name = f"planned(allow={allow[0]!r})" if allow else "planned"
    register(name, whole(plain, wrap), plain, error=error, refuses=FORWARD_MODE | SYMBOLIC, wrap=wrap, like="planned",
             alike=(*alike, *OF_FUNCTIONS) if alike else ())  # fmt: skip
for bits, error, alike in ((8, 0.02, ()), (4, 0.1, (*ANY_CODES, *OF_FUNCTIONS))):
    wrap = functools.partial(memjax.compressed, bits=bits)
    register(f"compressed(bits={bits})", whole(layers, wrap), error=error, encodes=True, wrap=wrap,
             refuses=FORWARD_MODE | SYMBOLIC | TWICE, like="compressed(bits=8)", alike=alike)  # fmt: skip
MEASURED = measured_layers()
register(
    "compressed(Layers)",
    lambda inside, w, x: memjax.compressed(functools.partial(one_layer, inside), MEASURED)(w, x),
    one_layer,
    error=0.02,
    encodes=True,
    refuses=FORWARD_MODE
    | SYMBOLIC
    | TWICE
    | dict.fromkeys(
        ("explicit mesh: examples", "explicit mesh: positions"), r"must not be Layers .* within jax\.shard_map"
    )
    | dict.fromkeys(("no examples", "float64"), "settings for the . arrays that are encoded, got settings for"),
    like="compressed(bits=8)",
    alike=ANY_CODES,
)
register("remat.tiled", each_layer(lambda f: remat.tiled(f, (None, 1), 1, tile=32)), refuses=FORWARD_MODE | SYMBOLIC,
         without={"mutable state of a module": "it transforms functions"},
         wrap=lambda f: remat.tiled(f, (0, *[None] * (f.__code__.co_argcount - 1)), tile=32))  # fmt: skip
register(
    "remat.attention_in_groups",
    attention_in_groups,
    attention,
    refuses=FORWARD_MODE | SYMBOLIC,
    without={"explicit mesh: positions": "attention itself needs an out_sharding there"},
)
register(
    "linear_cross_entropy",
    loss(None, "sum"),
    total_of_losses,
    refuses=FORWARD_MODE | {"export, symbolic examples": 'implementation="recompute" takes symbolic numbers'},
    without=NO_CALL,
)
register(
    "linear_cross_entropy(recompute)",
    loss("recompute", "none"),
    losses,
    refuses=FORWARD_MODE,
    without=NO_CALL,
    like="linear_cross_entropy",
    alike=("within a loop, jax.checkpoint and a branch", "threads", "shard_map, check_vma=False"),
)
register(
    "linear_cross_entropy(full)",
    loss("full", "none"),
    losses,
    without=NO_CALL | dict.fromkeys(ANY_OF_JAX, "it is plain JAX"),
)
plain_dense = dense("all")
for keep, alike in (("features", ()), ("convolutions", ANY_CODES)):
    register(
        f"remat.dense_block({keep})",
        dense(keep),
        plain_dense,
        refuses=FORWARD_MODE | SYMBOLIC,
        without={
            "no examples": "the statistics of nothing are no numbers, with or without it",
            "explicit mesh: positions": "rows and columns of an image are not sharded",
            **NO_CALL,
        },
        like="remat.dense_block(features)",
        alike=alike,
    )
register(
    "shard.metp_mlp",
    on_a_ring(metp_mlp),
    mlp,
    refuses=FORWARD_MODE | {"no examples": "must be of shape .* with at least one row and column"},
    without=dict.fromkeys(MESHES, "it runs on a mesh of its own, in tests/shard")
    | {"vmap with a named axis": "an activation is elementwise"},
)
