"""A batch in a traced step, and microbatches of it."""
