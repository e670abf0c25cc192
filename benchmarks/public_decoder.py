"""A decoder that others published, made one for long sequences: `python -m benchmarks.public_decoder --models-path FOLDER`.

FOLDER has Flax's `examples/gemma`, unchanged. The decoder is shrunk by its own configuration. Compares loss and gradients with
those of the decoder as it is, and both programs' temporary memory; two minutes on two CPU cores.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import memjax
from benchmarks import record
from memjax.remat import attention_in_groups, scan, stack_layers, tiled

apply_rope: Callable[..., jax.Array]  # of the published files


@dataclasses.dataclass(frozen=True)
class Config:
    models_path: pathlib.Path
    """Has `examples/gemma` of Flax."""
    lengths: tuple[int, ...] = (512, 1024)
    layers: int = 8


def layer(block, x):
    a, rotary = block.attn, lambda h, at: apply_rope(h, at[None], block.attn.head_dim)
    q, kv, out = a.q_einsum.kernel.swapaxes(0, 1), a.kv_einsum.kernel.swapaxes(1, 2), a.attn_vec_einsum.kernel[...]
    x = attention_in_groups(x, q, kv[0], kv[1], out, norm=block.pre_attention_norm, rotary=rotary)
    return tiled(lambda x: x + block.mlp(block.pre_ffw_norm(x)), 1, 1)(x)


def loss(model, layers, tokens):
    x = model.embedder(tokens[:, :-1])
    x, _ = scan(lambda x, block: (layer(block, x), None), x, layers, slots=3)
    return memjax.linear_cross_entropy(model.final_norm(x), model.embedder.embedding[...], tokens[:, 1:])


def plain_loss(model, tokens):
    """As the decoder is meant to be called."""
    length = tokens.shape[1] - 1
    positions, seen = jnp.arange(length)[None], jnp.tril(jnp.ones((1, length, length), bool))
    logits, _ = model(tokens[:, :-1], positions, None, seen)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def main(config: Config) -> None:
    rows = [compared(config, length) for length in config.lengths]
    for row in rows:
        print(row)
    record.save("public_decoder", rows)


def compared(config: Config, length: int) -> dict[str, Any]:
    """Losses, temporary memory, and how far the gradients of the decoder as published and as above are apart at the most."""
    model = _decoder(config)
    tokens = jax.random.randint(jax.random.key(0), (1, length + 1), 0, model.num_embed)
    value, gradients, published_bytes = _gradients(plain_loss, model, tokens)
    layers = stack_layers(model.layers)
    model.layers = nnx.List([])
    ours, both, temp_bytes = _gradients(lambda both, tokens: loss(both[0], both[1], tokens), (model, layers), tokens)
    rest, of_layers = both[0], both[1]
    error = lambda a, b: float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
    of_plain = gradients.pop("layers")
    expected = stack_layers([of_plain[i] for i in range(config.layers)])
    rest.pop("layers", None)
    errors = jax.tree.leaves(jax.tree.map(error, (rest, of_layers), (gradients, expected)))
    return {
        "length": length,
        "layers": config.layers,
        "published_loss": float(value),
        "loss": float(ours),
        "gradient_difference": max(errors),
        "published_temp_bytes": published_bytes,
        "temp_bytes": temp_bytes,
    }


def _gradients(f: Callable[..., jax.Array], model: Any, tokens: jax.Array) -> tuple[jax.Array, Any, int]:
    """Value, gradients as dicts, and bytes of temporary memory."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, rest = parts
    step = jax.jit(jax.value_and_grad(lambda params: f(nnx.merge(graph, params, rest, copy=True), tokens)))
    compiled = step.lower(params).compile({**memjax.remat_compiler_options()})
    value, gradients = compiled(params)
    memory: Any = compiled.memory_analysis()
    return value, nnx.to_pure_dict(gradients), memory.temp_size_in_bytes


def _decoder(config: Config) -> Any:
    """Gemma, with Llama's grouped heads."""
    global apply_rope
    folder = config.models_path / "examples/gemma"
    if not (folder / "transformer.py").is_file():
        raise SystemExit(f"--models-path {config.models_path} has no examples/gemma: copy Flax's folder into it.")
    sys.path.insert(0, str(folder))  # its files import each other by their names alone
    import positional_embeddings
    import transformer
    import transformer_cfg

    apply_rope = positional_embeddings.apply_rope
    sizes = transformer_cfg.TransformerConfig(
        num_layers=config.layers,
        num_embed=1024,
        embed_dim=128,
        hidden_dim=512,
        num_heads=8,
        head_dim=16,
        num_kv_heads=4,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=[transformer_cfg.AttentionType.GLOBAL] * config.layers,
    )
    return transformer.Transformer(sizes, rngs=nnx.Rngs(0))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
