"""Memory-efficient tensor parallelism for long sequences: functions to be called inside `jax.shard_map`.

metp                 f(A B) C with blocks of B and C travelling round a ring
metp_mlp             a feed-forward layer, gated or not, over a ring
metp_attention       attention over a ring: grouped heads, causal, windows, segments
vocab_cross_entropy  the loss of a language model whose vocabulary is sharded
MetpMlp              `metp_mlp` as an NNX module
MetpAttention        `metp_attention` as an NNX module
zigzag               the order of tokens in which causal attention is balanced
unzigzag             the inverse of `zigzag`
positions            the positions of the tokens that a device holds
hide_hops            settings with which blocks travel while GPUs compute
ring                 scans over blocks that travel round a ring
baselines            other parallelisms in the same style, to compare with
overlap              when hops are hidden behind compute
"""

from memjax.shard import baselines as baselines
from memjax.shard import overlap as overlap
from memjax.shard import ring as ring
from memjax.shard._attention import metp_attention as metp_attention
from memjax.shard._cross_entropy import vocab_cross_entropy as vocab_cross_entropy
from memjax.shard._layout import positions as positions
from memjax.shard._layout import unzigzag as unzigzag
from memjax.shard._layout import zigzag as zigzag
from memjax.shard._metp import metp as metp
from memjax.shard._metp import metp_mlp as metp_mlp
from memjax.shard._nnx import MetpAttention as MetpAttention
from memjax.shard._nnx import MetpMlp as MetpMlp
from memjax.shard.ring import hide_hops as hide_hops

__all__ = [
    "MetpAttention",
    "MetpMlp",
    "baselines",
    "hide_hops",
    "metp",
    "metp_attention",
    "metp_mlp",
    "overlap",
    "positions",
    "ring",
    "unzigzag",
    "vocab_cross_entropy",
    "zigzag",
]
