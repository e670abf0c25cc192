"""Attention of some queries to some keys on one device: the kernels, and the choice between them.

Every kernel is a module with `forward` and `backward` as `block` has them.
"""
