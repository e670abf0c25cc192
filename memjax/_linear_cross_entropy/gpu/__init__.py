"""The loss's kernels for GPUs: Pallas's Mosaic for Hopper, and Triton."""
