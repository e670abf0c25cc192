"""Training steps of Haiku's, Equinox's and Jraph's examples, of PureJaxRL and JAX MD."""

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.cases.jit_public.loading import Step, begins_with, first, module, notebook, of_arrays, reached

_KEY = jax.random.PRNGKey(0)


def haiku_imagenet(public: pathlib.Path) -> Step:
    """A ResNet-50 with state, over the devices of a `jax.shard_map`: one here."""
    with mock.patch.object(jax, "pmap", lambda f, **options: f):
        train = module(public / "dm-haiku/examples/imagenet/train.py", above=2)
    train.FLAGS(["", "--train_smoothing=0.1"])
    batch = {"images": jax.random.normal(_KEY, (4, 64, 64, 3)), "labels": _labels(4, 1000)}
    state = jax.jit(train.initial_state)(_KEY, batch)
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(train.train_step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    return Step(mapped, (state, batch), {"donate_argnums": 0}, first)


def haiku_rnn(public: pathlib.Path) -> Step:
    """LSTMs over a sequence, unrolled by a scan."""
    import haiku as hk

    train = module(public / "dm-haiku/examples/rnn/train.py", above=2)
    train.flags.FLAGS(["", "--hidden_size=64"])
    tokens = _labels((64, 16), 128)
    batch = {"input": tokens, "target": tokens[::-1]}
    params = hk.without_apply_rng(hk.transform(train.sequence_loss)).init(_KEY, batch)
    state = train.TrainingState(params, train.make_optimizer().init(params))
    return Step(train.update.__wrapped__, (state, batch), {}, first)


def haiku_transformer(public: pathlib.Path) -> Step:
    """A Transformer with dropout and clipped gradients."""
    train = module(public / "dm-haiku/examples/transformer/train.py", above=2)
    train.NUM_LAYERS, train.MODEL_SIZE = 3, 64
    tokens = np.asarray(_labels((16, 64), 127) + 1)
    batch = train.dataset.Batch(tokens, tokens[::-1].copy())
    return Step(train.update.__wrapped__, (train.init(_KEY, batch), batch), {}, first)


def haiku_vae(public: pathlib.Path) -> Step:
    """Its update is local to a function, and calls a jitted loss."""
    train = module(public / "dm-haiku/examples/vae.py")
    images = np.random.default_rng(0).integers(2, size=(1024, 28, 28, 1)).astype(np.float32)
    train.load_dataset = lambda *_: iter([train.Batch(images)] * 2)
    train.flags.FLAGS([""])
    train.flags.FLAGS.__dict__["alsologtostderr"] = False
    return reached("update", lambda: train.main(None), first)


def haiku_gan(public: pathlib.Path) -> Step:
    """Two networks that are updated one after the other; a method."""
    cells = "import functools", "class Generator"
    found = notebook(public / "dm-haiku/examples/mnist_gan.ipynb", cells)
    gan = found.GAN(num_latents=20)
    batch = jax.random.normal(_KEY, (32, 28, 28, 1))
    step = found.GAN.update.__wrapped__
    again = lambda out, args: (args[0], out[0], out[1], args[3])
    return Step(step, (gan, _KEY, gan.initial_state(_KEY, batch), batch), {"static_argnums": 0}, again)


def haiku_vqvae(public: pathlib.Path) -> Step:
    """Nearest codes, moving averages, and results as large as activations."""
    cells = "import haiku", "class ResidualStack", "num_hiddens = 128"
    found = notebook(
        public / "dm-haiku/examples/vqvae_example.ipynb",
        cells,
        train_data_variance=0.06,
        train_data_dict={},
        valid_data_dict={},
        cast_and_normalise_images=None,
    )
    batch = {"image": jax.random.normal(_KEY, (16, 32, 32, 3))}
    params, state = found.forward.init(_KEY, batch, is_training=True)
    args = params, state, found.optimizer.init(params), batch
    return Step(found.train_step.__wrapped__, args, {}, begins_with)


def equinox_mnist(public: pathlib.Path) -> Step:
    """A module as a pytree, under `jax.vmap`."""
    data = {"dummy_x": np.asarray(jax.random.normal(_KEY, (256, 1, 28, 28)))}
    data["dummy_y"] = np.asarray(_labels(256, 10))
    found = notebook(
        public / "equinox/docs/examples/mnist.ipynb",
        ("import torchvision", "class CNN", "def loss(", "def train("),
        key=_KEY,
        **data,
    )
    batch = [tuple(types.SimpleNamespace(numpy=lambda a=a: a) for a in data.values())]
    run = lambda: found.train(found.model, batch, batch, optax.adamw(1e-3), 1, 1)
    return of_arrays(reached("make_step", run))


def equinox_rnn(public: pathlib.Path) -> Step:
    """A recurrent network as a scan, under `jax.vmap`."""
    found = notebook(
        public / "equinox/docs/examples/train_rnn.ipynb", ("import math", "def dataloader", "class RNN", "def main(")
    )
    step = of_arrays(reached("make_step", lambda: found.main(batch_size=512, hidden_size=64)))
    return step._replace(again=lambda out, args: (out[1], *args[1:3], out[2]))


def equinox_vit(public: pathlib.Path) -> Step:
    """A vision Transformer with dropout, by example."""
    sizes = {"lr": 1e-4, "dropout_rate": 0.1, "beta1": 0.9, "beta2": 0.999, "batch_size": 16, "patch_size": 4}
    sizes |= {"num_patches": 64, "num_steps": 1, "embedding_dim": 64, "hidden_dim": 128, "num_heads": 4}
    sizes |= {"num_layers": 3, "height": 32, "width": 32, "channels": 3, "num_classes": 10}
    numpy = lambda a: types.SimpleNamespace(numpy=lambda: np.asarray(a))
    loader = [(numpy(jax.random.normal(_KEY, (16, 3, 32, 32))), numpy(_labels(16, 10)))]
    cells = (
        "import functools",
        "class PatchEmbedding",
        "class AttentionBlock",
        "class VisionTransformer",
        "def step_model",
        "model = VisionTransformer(",
    )
    run = lambda: notebook(
        public / "equinox/docs/examples/vision_transformer.ipynb", cells, trainloader=loader, **sizes
    )
    step = of_arrays(reached("step_model", run))
    return step._replace(again=lambda out, args: (out[0], args[1], out[1], *args[3:]))


def equinox_gan(public: pathlib.Path) -> Step:
    """Batch norms over the axis of a `jax.vmap`, with state."""
    size, latent, batch = (64, 64, 1), 100, 8
    sizes: dict[str, Any] = {"lr": 2e-4, "beta1": 0.5, "beta2": 0.999, "batch_size": batch, "num_steps": 1}
    sizes |= {"image_size": size, "height": 64, "width": 16, "channels": 1, "latent_size": latent}
    images = types.SimpleNamespace(numpy=lambda: np.asarray(jax.random.normal(_KEY, (batch, 1, 64, 64))))
    cells = (
        "import equinox",
        "class Generator",
        "class Discriminator",
        "def step_discriminator",
        "generator = Generator(",
    )
    sizes |= {"image_size": (64, 8, 1), "dataloader": [(images, None)]}
    run = lambda: notebook(public / "equinox/docs/examples/deep_convolutional_gan.ipynb", cells, **sizes)
    step = of_arrays(reached("step_discriminator", run))
    again = lambda out, args: (out[1], args[1], args[2], args[3], out[2], out[3], out[4], out[5])
    return step._replace(again=again)


def equinox_diffusion(public: pathlib.Path) -> Step:
    """Score matching with an MLP mixer; functions among the arguments."""
    sys.modules.setdefault("diffrax", types.ModuleType("diffrax"))
    cells = "import diffrax", "class MixerBlock", "def single_loss_fn", "def make_step"
    images = jax.random.normal(_KEY, (64, 1, 28, 28))

    def run() -> None:
        found = notebook(public / "equinox/docs/examples/score_based_diffusion.ipynb", cells)
        found.mnist, found.dataloader = lambda: images, lambda data, size, key: iter([data])
        found.main(patch_size=4, hidden_size=32, mix_patch_size=128, mix_hidden_size=128, num_blocks=3)

    step = of_arrays(reached("make_step", run))
    again = lambda out, args: (out[1], *args[1:5], out[2], out[3], *args[7:])
    return step._replace(again=again)


def jraph_voting(public: pathlib.Path) -> Step:
    """A graph network; its update is local to a function."""
    train = module(public / "jraph/jraph/examples/e_voting.py")
    make = train.get_voting_problem
    train.get_voting_problem = lambda *_: make(5000, 5001)
    return reached("update", lambda: train.train(1))


def purejaxrl_ppo(public: pathlib.Path) -> Step:
    """A whole training: an environment, epochs and minibatches in nested scans."""
    distrax = types.ModuleType("distrax")
    distrax.Categorical = _Categorical  # type: ignore[attr-defined]
    sys.modules["distrax"] = distrax  # which does not import with this JAX
    train = module(public / "purejaxrl/purejaxrl/ppo.py")
    sizes = {"NUM_ENVS": 64, "NUM_STEPS": 64, "TOTAL_TIMESTEPS": 8192, "UPDATE_EPOCHS": 2, "NUM_MINIBATCHES": 2}
    config: dict[str, Any] = {"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01}
    config |= {
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": True,
        "DEBUG": False,
        "ACTIVATION": "tanh",
    }
    whole = train.make_train(config | sizes)

    def step(key: jax.Array) -> list[jax.Array]:
        with mock.patch.object(jax, "tree_map", jax.tree.map, create=True):  # as the environments call it
            return jax.tree.leaves(whole(key))  # its state has functions in it, which are no results

    return Step(step, (_KEY,), {}, lambda out, args: args)


class _Categorical:
    """The parts of distrax that these programs use."""

    def __init__(self, logits: jax.Array):
        self._log = jax.nn.log_softmax(logits)

    def sample(self, seed: jax.Array) -> jax.Array:
        return jax.random.categorical(seed, self._log)

    def log_prob(self, value: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self._log, value[..., None], -1)[..., 0]

    def entropy(self) -> jax.Array:
        return -jnp.sum(jnp.exp(self._log) * self._log, -1)


def _labels(shape: Any, count: int) -> jax.Array:
    return jax.random.randint(_KEY, shape if isinstance(shape, tuple) else (shape,), 0, count)


def jax_md_nequip(public: pathlib.Path) -> Step:
    """NequIP trained on energies and forces: the gradient of a loss that has a gradient by positions in it."""
    sys.path.insert(0, str(public / "jax-md"))
    from jax_md import space
    from jax_md.nn import nequip
    from jraph import GraphsTuple

    atoms, neighbors, molecules = 16, 8, 4
    config = nequip.default_config()
    config.graph_net_steps, config.n_elements, config.hidden_irreps = 2, 4, "16x0e + 8x1e"
    config.shift, config.scale = 0.0, 1.0
    model = nequip.model_from_config(config)
    kinds = jax.nn.one_hot(_labels((molecules, atoms), 4), 4)
    positions = 2.0 * jax.random.normal(_KEY, (molecules, atoms, 3))
    receivers = jnp.repeat(jnp.arange(atoms), neighbors)
    senders = (receivers + 1 + jnp.tile(jnp.arange(neighbors), atoms)) % atoms
    displacement, _ = space.free()

    def graph(positions: Any, kinds: Any) -> GraphsTuple:
        edges = jax.vmap(displacement)(positions[receivers], positions[senders])
        count = jnp.array([atoms]), jnp.array([len(receivers)])
        return GraphsTuple(kinds, edges, receivers, senders, jnp.zeros((1, 1)), *count)

    def energy(params: Any, positions: Any, kinds: Any) -> Any:
        return jnp.sum(model.apply(params, graph(positions, kinds)))

    optimizer = optax.adam(1e-3)

    def loss(params: Any, batch: Any) -> Any:
        positions, kinds, energies, forces = batch
        found, slope = jax.vmap(jax.value_and_grad(energy, 1), (None, 0, 0))(params, positions, kinds)
        return jnp.mean((found - energies) ** 2) + jnp.mean((forces + slope) ** 2)

    def update(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = model.init(_KEY, graph(positions[0], kinds[0]))
    batch = positions, kinds, jnp.zeros(molecules), 0.1 * jax.random.normal(_KEY, positions.shape)
    state = params, optimizer.init(params)
    return Step(update, (state, batch), {"donate_argnums": 0}, first)


CASES: dict[str, Callable[[pathlib.Path], Step]] = {
    "haiku imagenet": haiku_imagenet,
    "haiku rnn": haiku_rnn,
    "haiku transformer": haiku_transformer,
    "haiku vae": haiku_vae,
    "haiku gan": haiku_gan,
    "haiku vqvae": haiku_vqvae,
    "equinox mnist": equinox_mnist,
    "equinox rnn": equinox_rnn,
    "equinox vision_transformer": equinox_vit,
    "equinox gan": equinox_gan,
    "equinox diffusion": equinox_diffusion,
    "jraph e_voting": jraph_voting,
    "purejaxrl ppo": purejaxrl_ppo,
    "jax_md nequip": jax_md_nequip,
}
