"""State of an optimizer that lies in the memory of the host between steps, because a step does not fit otherwise."""
