"""Bytes of a device: where inputs lie, what is free, what a compiled step takes."""
