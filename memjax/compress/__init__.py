"""Lossy compression of what training keeps between forward and backward.

compressed         a function or Flax module whose saved arrays pass through a codec; an optimizer whose state lies in codes
Codec              the methods that a codec has
BlockQuantized     8 or 4 bits per value, a range for each channel of a block of positions
ChannelQuantized   8 or 4 bits per value, a range for each channel
PositionQuantized  8, 6, 5, 4 or 3 bits per value, a range for each position's groups of features: for Transformers
GroupQuantized     8, 4 or 2 bits per value, unbiased, a range for each group of neighbours
ErrorBounded       as many bits as an error bound needs; zeros cost next to nothing
Cast               a narrower floating dtype
Mask               booleans as bits
CapacityWarning    codes needed more bits than they had; gradients are NaN
fit_bits           the fewest bits for each encoded array with which gradients are off by at most so much
FittedBits         what `fit_bits` returns
ArrayBits          bits for each array that a call of `compressed` encodes
BitsController     `fit_bits` again every so many steps of a training
layers             an `ErrorBounded` for each saved array, with a bound that training adapts
Layers             what `layers` returns: a codec that is trained beside the parameters
adaptive           an optimizer that also sets the bounds of `Layers`
predicted_sigma    the predicted error of gradients
scale_gradient     scales gradients and the statistics among them
transactional      a training step that an overflow cannot spoil
split_master       an optimizer of bfloat16 weights that trains float32 masters: the other half of their bits is in its state
join_master        the float32 masters of such weights
decoded            the state of a compressed optimizer as arrays
encoded_like       arrays as such a state
stochastic_round   an optimizer of bfloat16 weights without masters, whose updates are rounded at random
set_master         weights and state for given float32 masters
"""

from memjax.compress._codecs.block_quantized import BlockQuantized
from memjax.compress._codecs.channel_quantized import ChannelQuantized, GroupQuantized
from memjax.compress._codecs.codec import Cast, Codec, Mask
from memjax.compress._codecs.position_quantized import PositionQuantized
from memjax.compress._error_bounded.error_bounded import CapacityWarning, ErrorBounded
from memjax.compress._state.coded import decoded, encoded_like
from memjax.compress._state.split_master import join_master, set_master, split_master
from memjax.compress._state.stochastic_round import stochastic_round
from memjax.compress._training.adaptive import adaptive, predicted_sigma, scale_gradient
from memjax.compress._training.array_bits import ArrayBits
from memjax.compress._training.fit_bits import BitsController, FittedBits, fit_bits
from memjax.compress._training.layers import Layers, layers
from memjax.compress._training.transactional import transactional
from memjax.compress._transform.compressed import compressed

__all__ = [
    "ArrayBits",
    "BitsController",
    "BlockQuantized",
    "CapacityWarning",
    "Cast",
    "ChannelQuantized",
    "Codec",
    "ErrorBounded",
    "FittedBits",
    "GroupQuantized",
    "Layers",
    "Mask",
    "PositionQuantized",
    "adaptive",
    "compressed",
    "decoded",
    "encoded_like",
    "fit_bits",
    "join_master",
    "layers",
    "predicted_sigma",
    "scale_gradient",
    "set_master",
    "split_master",
    "stochastic_round",
    "transactional",
]
