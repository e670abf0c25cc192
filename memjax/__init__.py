"""memjax: training that fits in memory."""

from memjax import compress as compress
from memjax import remat as remat
from memjax import shard as shard
from memjax._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from memjax._measure import Measurement as Measurement
from memjax._measure import measure as measure
from memjax._measure import remat_compiler_options as remat_compiler_options
from memjax.compress import compressed as compressed
