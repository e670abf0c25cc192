"""Memory-efficient tensor parallelism for long sequences: functions to be called inside `jax.shard_map`."""

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
