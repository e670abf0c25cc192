"""What to do with each value that the backward pass wants: keep it, encode it, or compute it again from others."""
