"""The kernels of `ErrorBounded`, in Pallas."""
