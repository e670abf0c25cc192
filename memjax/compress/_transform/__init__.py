"""`memjax.compressed`: what is saved for the backward pass, what of it is encoded, and how it is read.

The way of the data through one gradient, by the files of this folder:

1. compressed.py checks the arguments, and splits those of a plain function into those that last (parameters) and those that
   may be encoded. modules.py makes a pure function of a module.
2. differentiable.py traces that function to a program and wraps it in `jax.custom_vjp`. Undifferentiated calls run it as it is.
3. derivative.py, when JAX differentiates the call, traces two more programs. The forward pass is what `jax.vjp` runs; its
   outputs are those of the function and the residuals, which are what `jax.vjp` would save. The pullback goes from
   residuals and cotangents to gradients. Before, max_pool.py replaces max-pooling and moves ReLUs behind it. Calls in these
   programs are put in place without tracing again (`memjax._core.program.jaxpr.calls_in_place`).
4. keep/ decides what is saved so that every residual follows from it: arrays as they are, arrays to encode, masks as bits.
5. encoder.py encodes in the course of the forward pass, each array when it has been computed. array_codecs.py says
   with which codec. The user is told of codes whose capacity did not suffice.
6. Between the passes there are the outputs, the kept arrays, the codes and the packed masks. Nothing else is saved.
7. pullback.py runs the pullback. Where it first needs a residual together with a cotangent, it decodes the array, or recomputes
   the residual from what is kept. A barrier makes decoding wait for that cotangent.
8. With `memjax.compress.layers`, statistics.py finds what is multiplied into gradients and gathers what the controller needs,
   which leaves as the gradient of the codec.

A gradient traces the user's function once, `jax.vjp` of its program once, and the pullback once. Evaluating forward pass
and pullback writes their equations once more, into the program of the caller.
"""
