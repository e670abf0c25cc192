"""The kernels for Hopper GPUs, in Pallas: matmuls with the softmax inside."""
