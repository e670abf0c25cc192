"""The tables of README and of `docs/`, one file for each page."""
