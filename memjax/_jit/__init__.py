"""`memjax.jit`: whole training steps within the memory of a device."""
