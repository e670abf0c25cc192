"""What to do with each value that the backward pass wants: keep it, encode it, or recompute it from others."""
