"""Bounds that follow training, and steps that survive an overflow."""
