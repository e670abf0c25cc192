"""`ErrorBounded`: its quantiser, its format, and a reference in plain JAX."""
