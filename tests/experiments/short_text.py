"""A text for runs that need no more: one file, instead of all of Python's standard library, to read and to test on."""

import argparse
from pathlib import Path

import numpy as np

from experiments.data.text import Text

_BYTES = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
SHORT = Text(train=_BYTES[:-8192], test=_BYTES[-8192:])


def read_short_text(monkeypatch, *modules) -> None:
    """Has experiments train on it."""
    for module in modules:
        monkeypatch.setattr(module, "standard_library", lambda folder=None: SHORT)
