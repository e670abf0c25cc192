"""Optimal schedules for chains of equal steps, as data."""
