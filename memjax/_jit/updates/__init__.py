"""Updates of stacked weights in the loops of backward passes, so that the gradients of one layer exist at a time."""
