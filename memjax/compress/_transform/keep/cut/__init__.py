"""What to keep of the values that the backward pass wants, exactly or rounded: a minimum cut of the program, in bytes."""
