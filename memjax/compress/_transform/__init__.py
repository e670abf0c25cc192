"""`compressed`: what is saved for the backward pass, what of it is encoded, and how it is read."""
