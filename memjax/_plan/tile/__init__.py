"""Parts of a program that run tile by tile in both passes, so that what they make on the way, logits above all, never exists."""
