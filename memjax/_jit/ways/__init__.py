"""The ways to run a step, among which one is chosen."""
