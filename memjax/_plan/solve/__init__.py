"""Finds the fastest plan for each memory budget: where to divide a program, and what to keep of each part."""
