"""Which dimension of each value in a program holds positions, and where positions are mixed.

A function of sequences may run tile by tile exactly if no position of a result depends on another position of an argument:
norms over features, projections and elementwise functions are such, a softmax or a convolution over the sequence is not.
The walk goes through a program with one rule for each kind of primitive, as `jax.vmap` does, but it changes nothing: it
follows the dimension, and refuses what mixes.

Shapes can coincide, and a program can contain the length as a number. So two programs are walked, traced with different
lengths: both have to be free of mixing, and they have to be equal but for shapes.
"""
