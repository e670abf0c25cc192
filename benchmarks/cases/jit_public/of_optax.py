"""Training steps of Optax's notebooks."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.cases.jit_public.loading import Step, begins_with, first, in_place, notebook

_KEY = jax.random.PRNGKey(0)


def gradient_accumulation(public: pathlib.Path) -> Step:
    """NNX objects that are updated in place, `optax.MultiSteps`."""
    cells = "from typing import", "class MLP", "def build_train_step"
    found = notebook(public / "optax/examples/gradient_accumulation.ipynb", cells)
    model = found.MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(1e-2), every_k_schedule=2), wrt=nnx.Param)
    batch = {"image": _images(2048), "label": _labels(2048)}
    return Step(found.build_train_step().__wrapped__, (model, optimizer, batch), {}, in_place)


def adversarial_training(public: pathlib.Path) -> Step:
    """An attack of ten gradients by the images, then one by the parameters; jitted functions within."""
    cells = "import tensorflow_datasets", "EPOCHS =", "class CNN", "def pgd_attack", "def train_step"
    found = notebook(
        public / "optax/examples/adversarial_training.ipynb", cells, num_classes=10, optimizer=optax.adam(1e-3)
    )
    params = found.net.init(_KEY, jnp.zeros((1, 28, 28, 1)))["params"]
    args = params, found.optimizer.init(params), ((255 * _images(128)).astype(jnp.uint8), _labels(128))
    return Step(found.train_step.__wrapped__, args, {}, begins_with)


def lookahead(public: pathlib.Path) -> Step:
    """An NNX module as an argument beside its parameters, jitted functions within."""
    cells = "import partial", "FAST_LEARNING_RATE =", "class CNN", "def loss_accuracy", "fast_solver ="
    shape = {"IMG_SIZE": (28, 28, 1), "NUM_CLASSES": 10, "test_loader_batched": [(_images(8), _labels(8))]}
    text = "lookahead_mnist.ipynb"
    found = notebook(
        public / "optax/examples" / text, (*cells, "def train_step"), train_loader_batched=[], N_EPOCHS=0, **shape
    )
    args = found.params, found.net, found.solver_state, (_images(64), _labels(64))
    again = lambda out, args: (out[0], args[1], out[1], args[3])
    return Step(found.train_step.__wrapped__, args, {}, again)


def lbfgs(public: pathlib.Path) -> Step:
    """L-BFGS with a line search, whose loops have gradients in their bodies, in a `jax.lax.while_loop`."""
    found = notebook(public / "optax/examples/lbfgs.ipynb", ("from typing import", "def run_opt"))
    x = jax.random.normal(_KEY, (1024, 32))

    def fun(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    params = [0.2 * jax.random.normal(key, (32, 32)) for key in jax.random.split(_KEY, 5)]
    step = lambda params: found.run_opt(params, fun, optax.lbfgs(memory_size=2), 3, 1e-3)[0]
    return Step(step, (params,), {}, first)


def meta_learning(public: pathlib.Path) -> Step:
    """The gradient of a loss after updates by gradients; the model is a small network here."""
    cells = "from typing import", "init_learning_rate =", "def step(", "def outer_step"
    found = notebook(public / "optax/examples/meta_learning.ipynb", cells, f=lambda theta, x: _network(theta, x))
    theta = [0.2 * jax.random.normal(key, (32, 32)) for key in jax.random.split(_KEY, 3)]
    found.opt.init(theta)
    eta = -jnp.log(1.0 / found.init_learning_rate - 1)
    samples = [(jax.random.normal(key, (512, 32)), jnp.float32(1.0)) for key in jax.random.split(_KEY, 4)]
    args = eta, theta, found.meta_opt.init(eta), found.opt.init(theta), samples
    return Step(found.outer_step.__wrapped__, args, {}, begins_with)


def _network(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def nanolm(public: pathlib.Path) -> Step:
    """A Transformer whose step draws its batch, from data that it closes over."""
    cells = (
        "import functools",
        "dynamic_slice_vmap",
        "class NanoLM",
        "def loss_fun",
        "var_params =",
        "opt =",
        "def step(",
    )
    sizes = {"SEED": 42, "LEARNING_RATE": 5e-3, "BATCH_SIZE": 16, "N_ITERATIONS": 0, "DROPOUT_RATE": 0.2}
    sizes |= {"BLOCK_SIZE": 64, "NUM_LAYERS": 3, "EMBED_SIZE": 64, "NUM_HEADS": 4, "HEAD_SIZE": 16}
    data = jax.random.randint(_KEY, (4096,), 0, 65)
    given = {"vocab": list(range(65)), "train_data": data, "eval_data": data}
    found = notebook(public / "optax/examples/nanolm.ipynb", cells, **sizes, **given)
    again = lambda out, args: (out[1], out[0], out[2])
    return Step(found.step.__wrapped__, (found.key, found.var_params, found.opt_state), {}, again)


def private_sgd(public: pathlib.Path) -> Step:
    """Gradients of each example, by `jax.vmap`."""
    cells = "import dp_accounting", "DPSGD =", "init_random_params, predict", "def test_step", "tx =", "def train_step"
    found = notebook(public / "optax/examples/contrib/differentially_private_sgd.ipynb", cells)
    args = found.params, found.opt_state, (_images(64), _labels(64))
    return Step(found.train_step.__wrapped__, args, {}, begins_with)


def cifar_resnet(public: pathlib.Path) -> Step:
    """NNX, a ResNet-18 of the notebook with narrow images."""
    cells = "import albumentations", "MAX_EPOCHS =", "class ResNetBlock", "def compute_loss"
    info = {"NUM_CLASSES": 10, "IMG_SIZE": (32, 32, 3), "lr_schedule": 0.1}
    made: dict[str, Any] = {}
    path = public / "optax/examples/cifar10_resnet.ipynb"
    model = notebook(path, cells[:3], **info)
    made["model"] = model.ResNet1(num_classes=10, rngs=nnx.Rngs(0))
    found = notebook(path, cells, **info, **made)
    batch = {"image": jax.random.normal(_KEY, (8, 32, 32, 3)), "label": _labels(8)}
    return Step(found.train_step.__wrapped__, (found.model, found.optimizer, batch), {}, in_place)


def _images(count: int) -> jax.Array:
    return jax.random.uniform(_KEY, (count, 28, 28, 1))


def _labels(count: int) -> jax.Array:
    return jax.random.randint(_KEY, (count,), 0, 10)


CASES: dict[str, Callable[[pathlib.Path], Step]] = {
    "optax gradient_accumulation": gradient_accumulation,
    "optax adversarial_training": adversarial_training,
    "optax lookahead_mnist": lookahead,
    "optax lbfgs": lbfgs,
    "optax meta_learning": meta_learning,
    "optax nanolm": nanolm,
    "optax private_sgd": private_sgd,
    "optax cifar10_resnet": cifar_resnet,
}
