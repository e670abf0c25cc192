"""From a memory budget to a plan."""
