"""Training steps of Flax's examples, Linen and NNX."""

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.cases.jit_public.loading import Step, first, in_place, module, reached

_KEY = jax.random.key(0)


def mnist(public: pathlib.Path) -> Step:
    """NNX, batch norms, dropout, metrics."""
    train = module(public / "flax/examples/mnist/train.py")
    model = train.CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    batch = {"image": jax.random.normal(_KEY, (32, 28, 28, 1)), "label": _labels(32, 10)}
    args = model, optimizer, metrics, batch, nnx.Rngs(dropout=1)
    return Step(train.train_step.__wrapped__, args, {}, in_place)


def vae(public: pathlib.Path) -> Step:
    """Linen, a static argument."""
    train = module(public / "flax/examples/vae/train.py")
    model = train.models.model(20)
    batch = jax.random.bernoulli(_KEY, 0.5, (1024, 784)).astype(jnp.float32)
    params = model.init(_KEY, batch, _KEY)["params"]
    state = train.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    return Step(train.train_step, (state, batch, _KEY, 20), {"static_argnums": 3, "donate_argnums": 0}, first)


def imagenet(public: pathlib.Path) -> Step:
    """Linen, a small ResNet, means over the devices of a `jax.shard_map`: one here."""
    train = module(public / "flax/examples/imagenet/train.py")
    sizes = {"stage_sizes": [2, 2], "block_cls": train.models.ResNetBlock, "num_filters": 16, "dtype": jnp.float32}
    model = train.models.ResNet(num_classes=train.NUM_CLASSES, **sizes)
    params, stats = train.initialized(_KEY, 64, model)
    made = {"apply_fn": model.apply, "params": params, "batch_stats": stats, "dynamic_scale": None}
    state = train.TrainState.create(tx=optax.sgd(0.1, 0.9, nesterov=True), **made)
    rate = lambda count: 0.1
    step = lambda state, batch: train.train_step(state, batch, rate)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=False)
    batch = {"image": jax.random.normal(_KEY, (16, 64, 64, 3)), "label": _labels(16, 1000)}
    return Step(mapped, (state, batch), {"donate_argnums": 0}, first)


def lm1b(public: pathlib.Path) -> Step:
    """Linen, a Transformer with dropout, its state donated."""
    train = module(public / "flax/examples/lm1b/train.py")
    return _transformer(train, train.models.TransformerLM, 1)


def wmt(public: pathlib.Path) -> Step:
    """Linen, encoder and decoder, sums over the axis of a `jax.vmap`."""
    train = module(public / "flax/examples/wmt/train.py")
    step = _transformer(train, train.models.Transformer, 2, dynamic_scale=None)
    f = lambda state, batch, key: jax.tree.map(
        lambda leaf: leaf[0],
        jax.vmap(lambda batch: step.f(state, batch, *step.args[2:4], 0.1, key), axis_name="batch")(
            jax.tree.map(lambda leaf: leaf[None], batch)
        ),
    )
    return Step(f, (*step.args[:2], _KEY), {"donate_argnums": 0}, first)


def _transformer(train: Any, model: Any, texts: int, **more: Any) -> Step:
    sizes = {"emb_dim": 64, "num_heads": 4, "num_layers": 3, "qkv_dim": 64, "mlp_dim": 256, "max_len": 64}
    config = train.models.TransformerConfig(vocab_size=512, output_vocab_size=512, **sizes)
    tokens = _labels((16, 64), 511) + 1
    params = model(config.replace(deterministic=True)).init(_KEY, *[tokens] * texts)["params"]
    kind = train.TrainState if more else train_state.TrainState
    rate = train.create_learning_rate_schedule(1e-3, 10)
    state = kind.create(apply_fn=None, params=params, tx=optax.adamw(rate), **more)
    batch = {"inputs": tokens} | ({"targets": tokens[::-1]} if texts == 2 else {})
    options = {"static_argnums": (2, 3, 4), "donate_argnums": 0}
    return Step(train.train_step, (state, batch, config, rate, 0.0, _KEY), options, first)


def seq2seq(public: pathlib.Path) -> Step:
    """Linen, recurrent networks as scans, samples within."""
    train = module(public / "flax/examples/seq2seq/train.py")
    table = train.CTable("0123456789+= ", 12)
    train.FLAGS(["", "--hidden_size=64"])
    state = train.get_train_state(_KEY, table)
    hot = lambda count, length: jax.nn.one_hot(_labels((count, length), table.vocab_size), table.vocab_size)
    batch = {"query": hot(64, table.max_input_len), "answer": hot(64, table.max_output_len)}
    return Step(train.train_step.__wrapped__, (state, batch, _KEY, table.eos_id), {"donate_argnums": 0}, first)


def ogbg(public: pathlib.Path, config_name: str = "default") -> Step:
    """Linen, a graph network: gathers and sums by segments."""
    import jraph

    train = module(public / "flax/examples/ogbg_molpcba/train.py")
    config: Any = module(public / f"flax/examples/ogbg_molpcba/configs/{config_name}.py").get_config()
    config.latent_size = 32
    net = train.create_model(config, deterministic=False)
    graphs, nodes, edges = 32, 32 * 16, 32 * 40
    rng = np.random.default_rng(0)
    ends = [jnp.asarray(rng.integers(16, size=edges) + np.repeat(np.arange(graphs) * 16, 40)) for _ in range(2)]
    batch = jraph.GraphsTuple(
        n_node=jnp.full(graphs, 16),
        n_edge=jnp.full(graphs, 40),
        nodes=jax.random.normal(_KEY, (nodes, 9)),
        edges=jax.random.normal(_KEY, (edges, 3)),
        globals=jax.random.bernoulli(_KEY, 0.5, (graphs, config.num_classes)).astype(jnp.float32),
        senders=ends[0],
        receivers=ends[1],
    )
    params = net.init({"params": _KEY, "dropout": _KEY}, train.replace_globals(batch))
    state = train.train_state.TrainState.create(apply_fn=net.apply, params=params, tx=train.create_optimizer(config))
    return Step(train.train_step.__wrapped__, (state, batch, {"dropout": _KEY}), {"donate_argnums": 0}, first)


def ppo(public: pathlib.Path) -> Step:
    """Linen, several gradients and updates one after another."""
    train = module(public / "flax/examples/ppo/ppo_lib.py")
    model = train.models.ActorCritic(4)
    count, batch = 3 * 512, 512
    states = jax.random.uniform(_KEY, (count, 28, 28, 4)) * 255
    params = model.init(_KEY, states[:1])["params"]
    state = train.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(2.5e-4))
    rest = [jax.random.normal(key, (count,)) for key in jax.random.split(_KEY, 3)]
    trajectories = states, _labels(count, 4), *rest
    sizes = {"clip_param": 0.1, "vf_coeff": 0.5, "entropy_coeff": 0.01}
    step = lambda state, trajectories: train.train_step.__wrapped__(state, trajectories, batch, **sizes)
    return Step(step, (state, trajectories), {"donate_argnums": 0}, first)


def gemma(public: pathlib.Path) -> Step:
    """NNX, a decoder with sliding windows; arguments are donated by name."""
    train = module(public / "flax/examples/gemma/train.py")
    kinds = sys.modules["transformer_cfg"].AttentionType
    config = train.transformer_lib.TransformerConfig(
        num_layers=3,
        num_embed=512,
        embed_dim=64,
        hidden_dim=256,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=16,
    )
    return _gemma(train, config)


def _gemma(train: Any, config: Any) -> Step:
    model = train.transformer_lib.Transformer(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    tokens = _labels((8, 64), 511) + 1
    places = jnp.broadcast_to(jnp.arange(64), tokens.shape)
    batch = {"inputs": tokens, "targets": tokens, "inputs_position": places}
    args = model, optimizer, nnx.Rngs(dropout=0), batch, metrics
    return Step(train.nnx_train_step, args, {"donate_argnames": ("model", "optimizer")}, in_place)


def nnx_vae(public: pathlib.Path) -> Step:
    """NNX, a toy whose module keeps the key and a loss within."""
    size: dict[str, Any] = {}

    def run() -> None:
        images = [np.random.default_rng(0).integers(2, size=(28, 28)) for _ in range(256)]
        data = types.ModuleType("datasets")
        data.load_dataset = lambda name: {part: {"image": images} for part in ("train", "test")}  # type: ignore[attr-defined]
        sys.modules["datasets"] = data
        module(public / "flax/examples/nnx_toy_examples/05_vae.py")

    step = reached("train_step", run, in_place)
    x = jnp.tile(step.args[2], (16, 1, 1))
    return step._replace(args=(*step.args[:2], x), options=size)


def _labels(shape: Any, count: int) -> jax.Array:
    return jax.random.randint(_KEY, shape if isinstance(shape, tuple) else (shape,), 0, count)


CASES: dict[str, Callable[[pathlib.Path], Step]] = {
    "flax mnist": mnist,
    "flax vae": vae,
    "flax imagenet": imagenet,
    "flax lm1b": lm1b,
    "flax wmt": wmt,
    "flax seq2seq": seq2seq,
    "flax ogbg_molpcba": ogbg,
    "flax ogbg graph_net": lambda public: ogbg(public, "default_graph_net"),
    "flax ppo": ppo,
    "flax gemma": gemma,
    "flax nnx vae": nnx_vae,
}
