"""Optimizer state in fewer bytes: exact halves of weights, weights rounded at random, states in codes."""
