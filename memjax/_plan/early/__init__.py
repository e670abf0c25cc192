"""Loops that end early, such as solves of differential equations: found, planned, run."""
