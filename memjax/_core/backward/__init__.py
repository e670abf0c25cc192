"""The derivative of a flat function in two passes, with the fewest bytes kept between them."""

from memjax._core.backward.two_passes import Backward as Backward
