"""Lossy compression of what training keeps between forward and backward."""

from memjax.compress._codec import Cast as Cast
from memjax.compress._codec import Codec as Codec
from memjax.compress._codec import Mask as Mask
from memjax.compress._compressed import compressed as compressed
from memjax.compress._error_bounded import ErrorBounded as ErrorBounded
from memjax.compress._error_bounded import ErrorBoundedCode as ErrorBoundedCode
from memjax.compress._group_quantized import GroupQuantized as GroupQuantized
