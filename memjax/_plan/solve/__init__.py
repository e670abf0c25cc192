"""The least time for every amount of memory: where to divide a program, and what to keep of each part."""
