"""Figures as PNG files."""

from pathlib import Path

import matplotlib

from experiments.harness import files

matplotlib.use("agg")
from matplotlib import pyplot as plt


def save(figure, path: Path, **layout) -> None:
    """Writes the figure in one piece and closes it; `layout` is that of `figure.tight_layout`."""
    figure.tight_layout(**layout)
    with files.in_one_piece(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)
