"""Codecs of a fixed rate, and what all codecs share."""
