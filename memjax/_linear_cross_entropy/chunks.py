"""A chunk of products to statistics or gradients: by Triton kernels where they apply, else by `rows`."""

from __future__ import annotations

from memjax._linear_cross_entropy import rows
from memjax._linear_cross_entropy.options import Array, Options
from memjax._linear_cross_entropy.rows import Stats


def _by_kernel(targets: Array | None, class_weights: Array | None, options: Options) -> bool:
    return "triton" in options.kernels and targets is None and class_weights is None


def stats(
    products: Array,
    bias: Array | None,
    labels: Array,
    targets: Array | None,
    class_weights: Array | None,
    options: Options,
) -> Stats:
    if _by_kernel(targets, class_weights, options):
        from memjax._linear_cross_entropy import kernels

        return kernels.stats(products, bias, labels, options)
    return rows.stats(products, bias, labels, targets, class_weights, options)


def gradient(
    products: Array,
    bias: Array | None,
    labels: Array,
    targets: Array | None,
    class_weights: Array | None,
    lse: Array,
    mass: Array | None,
    scale: Array,
    options: Options,
) -> Array:
    """The gradient, written over the products where a kernel does it."""
    if _by_kernel(targets, class_weights, options):
        from memjax._linear_cross_entropy import kernels

        return kernels.gradient(products, bias, labels, lse, scale, options)
    return rows.gradient(products, bias, labels, targets, class_weights, lse, mass, scale, options)


def stats_and_gradient(
    products: Array,
    bias: Array | None,
    labels: Array,
    targets: Array | None,
    class_weights: Array | None,
    scale: Array,
    options: Options,
) -> tuple[Stats, Array]:
    """Both, for products that hold every column of this device; the statistics are all devices'."""
    if _by_kernel(targets, class_weights, options) and options.axis_name is None:
        from memjax._linear_cross_entropy import kernels

        return kernels.stats_and_gradient(products, bias, labels, scale, options)
    total = rows.all_reduce(stats(products, bias, labels, targets, class_weights, options), options)
    lse = rows.log_sum_exp(total)
    return total, gradient(products, bias, labels, targets, class_weights, lse, total.mass, scale, options)
