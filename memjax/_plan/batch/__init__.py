"""Parts of programs that run for some examples of a batch, or for some edges of a graph, at a time."""
