"""Lossy compression of what training keeps between forward and backward."""

from memjax.compress._adaptive import AdaptiveState as AdaptiveState
from memjax.compress._adaptive import adaptive as adaptive
from memjax.compress._adaptive import predicted_sigma as predicted_sigma
from memjax.compress._adaptive import scale_gradient as scale_gradient
from memjax.compress._channel_quantized import ChannelQuantized as ChannelQuantized
from memjax.compress._channel_quantized import ChannelQuantizedCode as ChannelQuantizedCode
from memjax.compress._channel_quantized import MeasuredChannels as MeasuredChannels
from memjax.compress._codec import Cast as Cast
from memjax.compress._codec import Codec as Codec
from memjax.compress._codec import Mask as Mask
from memjax.compress._compressed import compressed as compressed
from memjax.compress._error_bounded import ErrorBounded as ErrorBounded
from memjax.compress._error_bounded import ErrorBoundedCode as ErrorBoundedCode
from memjax.compress._group_quantized import GroupQuantized as GroupQuantized
from memjax.compress._inject_error import UniformError as UniformError
from memjax.compress._inject_error import inject_error as inject_error
from memjax.compress._layers import LADDER as LADDER
from memjax.compress._layers import Layers as Layers
from memjax.compress._layers import Statistics as Statistics
from memjax.compress._layers import layers as layers
from memjax.compress._transactional import Transactional as Transactional
from memjax.compress._transactional import transactional as transactional
