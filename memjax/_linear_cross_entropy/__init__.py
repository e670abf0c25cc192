"""The loss of a language model without its logits. `memjax.linear_cross_entropy` is the public function."""

from memjax._linear_cross_entropy.api import Aux as Aux
from memjax._linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
