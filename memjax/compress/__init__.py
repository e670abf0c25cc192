"""Lossy compression of what training keeps between forward and backward.

compressed            a function or Flax module whose saved arrays pass through a codec
DEFAULT               the codec if none is given: 8 bits per value, for any finite values
Codec                 the methods that a codec has
BlockQuantized        4 or 8 bits per value, a range for each channel of a block of positions
BlockQuantizedCode    what `BlockQuantized` keeps
ChannelQuantized      4 or 8 bits per value, a range for each channel
ChannelQuantizedCode  what `ChannelQuantized` keeps
MeasuredChannels      a `ChannelQuantized` whose ranges are known
GroupQuantized        2, 4 or 8 bits per value, unbiased, a range for each group of neighbours
PositionQuantized     8, 6, 5, 4 or 3 bits per value, a range for each position's groups of features: for Transformers
PositionQuantizedCode  what `PositionQuantized` keeps
ErrorBounded          as many bits as an error bound needs; zeros cost next to nothing
ErrorBoundedCode      what `ErrorBounded` keeps
Cast                  a narrower floating dtype
Mask                  booleans as bits
CapacityWarning       codes needed more bits than they had; gradients are NaN
layers                an `ErrorBounded` for each saved array, with a bound that training adapts
Layers                what `layers` returns: a codec that is trained beside the parameters
Statistics            what the backward pass finds out about each saved array
LADDER                the capacities that `transactional` chooses from
adaptive              an optimizer that also sets the bounds of `Layers`
AdaptiveState         the state of `adaptive`
predicted_sigma       the predicted error of gradients
fit_bits              the fewest bits for each encoded array with which gradients are off by at most so much
FittedBits            what `fit_bits` returns
BitsController        `fit_bits` again every so many steps of a training
ArrayBits             bits for each array that a call of `compressed` encodes
scale_gradient        scales gradients and the statistics among them
transactional         a training step that an overflow cannot spoil
Transactional         what `transactional` returns
inject_error          a function or module with random errors in place of a codec, for experiments
UniformError          the codec of `inject_error`
StepErrors            a codec of random errors as large as those of so many bits, which predicts their effect
"""

from memjax.compress._codecs.block_quantized import DEFAULT, BlockQuantized, BlockQuantizedCode
from memjax.compress._codecs.channel_quantized import ChannelQuantized, ChannelQuantizedCode, MeasuredChannels
from memjax.compress._codecs.codec import Cast, Codec, Mask
from memjax.compress._codecs.group_quantized import GroupQuantized
from memjax.compress._codecs.position_quantized import PositionQuantized, PositionQuantizedCode
from memjax.compress._codecs.step_errors import StepErrors, UniformError
from memjax.compress._error_bounded.error_bounded import ErrorBounded, ErrorBoundedCode
from memjax.compress._training.adaptive import AdaptiveState, adaptive, predicted_sigma, scale_gradient
from memjax.compress._training.array_bits import ArrayBits
from memjax.compress._training.fit_bits import BitsController, FittedBits, fit_bits
from memjax.compress._training.layers import LADDER, Layers, Statistics, layers
from memjax.compress._training.transactional import Transactional, transactional
from memjax.compress._transform.compressed import compressed, inject_error
from memjax.compress._transform.overflow import CapacityWarning

__all__ = [
    "DEFAULT",
    "LADDER",
    "AdaptiveState",
    "ArrayBits",
    "BitsController",
    "BlockQuantized",
    "BlockQuantizedCode",
    "CapacityWarning",
    "Cast",
    "ChannelQuantized",
    "ChannelQuantizedCode",
    "Codec",
    "ErrorBounded",
    "ErrorBoundedCode",
    "FittedBits",
    "GroupQuantized",
    "Layers",
    "Mask",
    "MeasuredChannels",
    "PositionQuantized",
    "PositionQuantizedCode",
    "Statistics",
    "StepErrors",
    "Transactional",
    "UniformError",
    "adaptive",
    "compressed",
    "fit_bits",
    "inject_error",
    "layers",
    "predicted_sigma",
    "scale_gradient",
    "transactional",
]
