"""Where activation memory goes: what is kept between the passes, and what is alive at the compiled peak."""

from memjax._explain.compared import PeakComparison
from memjax._explain.explain import explain
from memjax._explain.explanation import Explanation

__all__ = ["Explanation", "PeakComparison", "explain"]
