"""Which algorithm is the fastest on a GPU: a model of each one's time, linear in what it multiplies and moves.

With N tokens, D dimensions and V columns of b bytes, and time in milliseconds:

    forward_grad        matmuls; two passes over b N V bytes of logits; for each chunk, a read and a write of dW's
                        float32 sum (8 D V bytes). Where a row of logits is not a multiple of 16 bytes, as with
                        V = 50,257, the gradient matmuls, which read the logits, are slower, dW's most. In "recompute"
                        only the last chunk has such rows.
    recompute           one matmul more, and work for every chunk. With Triton kernels three passes over the logits.
                        With Mosaic kernels the softmax is evaluated in the matmuls, twice for every logit.

`COSTS` is the least-squares fit (`python -m benchmarks.cross_entropy_choice --fit`) to an H200's times of 17 shapes: 1,024 to
32,768 tokens, D from 512 to 8,192, V from 8,192 to 256,128, bfloat16 and float32, with and without a frozen head. Predictions
are within 25% of the measured times, and the fastest by the model is within 3% of the fastest by the clock on each of the
shapes. To refit, measure (`python -m benchmarks.cross_entropy_choice`), fit, and write the costs here. "full" is not among
the candidates: it holds all logits.
"""

from __future__ import annotations

from memjax._linear_cross_entropy.options import Operands, Options, columns, token_chunk, vocabulary_chunk

COSTS = {
    "forward_grad": {
        "TFLOP": 1.363,
        "GB of logits": 0.624,
        "GB of sums": 0.0354,
        "odd TFLOP": 1.445,
        "odd TFLOP of dW": 2.889,
        "chunks": 0.0266,
    },
    "recompute/triton": {"TFLOP": 1.599, "GB of logits": 0.0403, "chunks": 0.0582},
    "recompute/mosaic": {"TFLOP": 1.394, "G softmaxes": 0.848, "chunks": 0.0443},
}
"""Milliseconds of each unit. A TFLOP is one of bfloat16, half of one of float32."""


def recompute_is_faster(operands: Operands, options: Options, mosaic: bool, wanted: frozenset[str]) -> bool:
    """Whether to compute gradients of those of "x" and "w" that are wanted after the loss, rather than with it."""
    if options.kernels == ("jnp",):
        return False  # not a GPU, or none with kernels
    recompute = "recompute/mosaic" if mosaic else "recompute/triton"
    return milliseconds(recompute, operands, options, wanted) < milliseconds("forward_grad", operands, options, wanted)


def mosaic_is_faster(operands: Operands, options: Options) -> bool:
    """Whether to use Mosaic kernels where Triton's could be."""
    both = frozenset({"x", "w"})
    mosaic, triton = (milliseconds(f"recompute/{k}", operands, options, both) for k in ("mosaic", "triton"))
    return mosaic < triton


def milliseconds(name: str, operands: Operands, options: Options, wanted: frozenset[str]) -> float:
    """Predicted time of the forward and backward pass."""
    costs = COSTS[name]
    return sum(costs[term] * amount for term, amount in terms(name, operands, options, wanted).items())


def terms(name: str, operands: Operands, options: Options, wanted: frozenset[str]) -> dict[str, float]:
    """The amounts that an implementation takes of each of its costs, in the units of `COSTS`."""
    (tokens, dim), width, itemsize = operands.x.shape, columns(operands, options), operands.x.dtype.itemsize
    matmul = 2 * tokens * dim * width * itemsize / 2 * 1e-12
    logits = itemsize * tokens * width * 1e-9
    gradients = len(wanted & {"x", "w"})
    if name == "forward_grad":
        chunks = -(-tokens // token_chunk(operands, options)) if tokens else 0
        odd, of_w = width * itemsize % 16 != 0, "w" in wanted
        return {
            "TFLOP": (1 + gradients) * matmul,
            "GB of logits": 2 * logits,
            "GB of sums": of_w * 8 * dim * width * chunks * 1e-9,
            "odd TFLOP": odd * gradients * matmul,
            "odd TFLOP of dW": odd * of_w * matmul,
            "chunks": chunks,
        }
    chunks = -(-width // vocabulary_chunk(operands, options, None))
    softmax = {"GB of logits": 3 * logits} if name == "recompute/triton" else {"G softmaxes": 2e-9 * tokens * width}
    return {"TFLOP": (2 + gradients) * matmul, **softmax, "chunks": chunks}
