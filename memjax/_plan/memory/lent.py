"""Memory of results, which compilers lend to what is kept as long as the result is not there yet.

A gradient of a parameter is written in the turn of the piece that reads the parameter. Until then its memory holds one array at
a time, of no more bytes. So what a piece keeps may lie in gradients of the pieces before it, whose turns come later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def lent_to_pieces(
    made: Sequence[Sequence[int]], handed_on: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each piece the bytes of the arrays for which there is such memory, each array in a result of its own.

    Args:
      made: bytes of the results that are written in each piece's turn.
      handed_on: bytes of what each piece hands on to later ones: these choose first.
      wanted: bytes of what else it may keep.
    """
    found: list[list[int]] = [[] for _ in made]
    taken: set[tuple[int, int]] = set()  # places, as the piece that writes the result and its number there
    for arrays in (handed_on, wanted):
        free: list[tuple[int, tuple[int, int]]] = []
        for piece, sizes in enumerate(arrays):
            for size in sorted(sizes, reverse=True):
                at = bisect_left(free, (size, (-1, -1)))
                if size and at < len(free):
                    taken.add(free.pop(at)[1])
                    found[piece].append(size)
            for number, size in enumerate(made[piece]):
                if (piece, number) not in taken:
                    insort(free, (size, (piece, number)))
    return found
