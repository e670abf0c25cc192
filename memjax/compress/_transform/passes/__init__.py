"""What runs in the forward pass and in the backward pass of a compressed function."""
