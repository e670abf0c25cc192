"""The compiled program: its text, which buffers are alive when, and whose they are."""
