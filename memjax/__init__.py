"""memjax: training that fits in memory."""

from memjax import remat as remat
