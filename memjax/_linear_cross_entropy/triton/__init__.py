"""The Triton kernels over rows of products, launched through `jax_triton`."""
