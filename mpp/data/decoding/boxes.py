"""Boxes: the parts of files of the ISO family, such as JPEG 2000 and JPEG XL, each with its size and kind."""

from collections.abc import Iterator
from typing import NamedTuple

FIELDS = {b"meta": 4, b"stsd": 8, b"av01": 78}
"""Bytes of a box before the boxes that are in it."""


class Box(NamedTuple):
    """A part of a file."""

    kind: bytes
    """Four letters."""
    start: int
    """Byte of the file at which its content begins."""
    end: int


def find_boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Box]:
    """The boxes between two places of a file, by default all at its top; they end where a size is impossible."""
    end = len(data) if end is None else min(end, len(data))
    while start + 8 <= end:
        size = int.from_bytes(data[start : start + 4], "big")
        header = 8
        if size == 1:  # the size is too large for four bytes, and stands behind the kind
            size = int.from_bytes(data[start + 8 : start + 16], "big")
            header = 16
        elif size == 0:
            size = end - start
        if size < header:
            return
        yield Box(data[start + 4 : start + 8], start + header, min(start + size, end))
        start += size


def find_inner(data: bytes, *kinds: bytes) -> list[Box]:
    """The boxes in a box of the last of these kinds, which is in one of the kind before it, and so on up to the top."""
    boxes = list(find_boxes(data))
    for kind in kinds:
        outer = [box for box in boxes if box.kind == kind]
        boxes = [inner for box in outer for inner in find_boxes(data, box.start + FIELDS.get(kind, 0), box.end)]
    return boxes
