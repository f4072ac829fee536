"""JPEG 2000, in its own file or as a bare codestream, by imagecodecs (OpenJPEG)."""

import re
from typing import NamedTuple

from mpp.config import ImagesConfig
from mpp.data.decoding.boxes import Box, find_boxes, find_inner
from mpp.data.decoding.checks import check_size, refuse_lossy_mask
from mpp.data.decoding.coded import to_stored
from mpp.data.decoding.wanted import StoredPixels, Wanted
from mpp.errors import UnreadableImage

CODESTREAM_START = b"\xff\x4f\xff\x51"
SIZES = re.compile(CODESTREAM_START + rb".{4}(.{4})(.{4})(.{4})(.{4}).{16}(..)(.)", re.DOTALL)
"""The header of a codestream: right and lower edge, left and upper edge, number of bands, bits of the first."""
CODING = re.compile(rb"\xff\x52.{11}(.)", re.DOTALL)
"""The coding style of a codestream: its wavelet."""
LOSSLESS_WAVELET = b"\x01"
OPACITIES = (1, 2)  # kinds of channels; 2 is premultiplied
CODESTREAM_HEADER_BYTES = 41  # at least


class CodestreamHeader(NamedTuple):
    """The sides of the pixels in a codestream, the number of its bands, and the bits of the first."""

    height: int
    width: int
    bands: int
    bits: int


def read_jpeg2000(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The bands of a JPEG 2000 file; of a picture, opacity is a band that the file declares as such."""
    start = find_codestream(data)
    header = read_codestream_header(data, start)
    if header is None:
        raise UnreadableImage("a JPEG 2000 file whose header cannot be read")
    boxes = {box.kind: box for box in find_inner(data, b"jp2h")} if start else {}
    palette = boxes.get(b"pclr")
    columns = data[palette.start + 2] if palette else 0  # bands of the image that is made of indices
    check_size((header.height, header.width, max(header.bands, columns)), config)
    coding = CODING.search(data, start + CODESTREAM_HEADER_BYTES)
    if wanted is Wanted.MASK and (coding is None or coding[1] != LOSSLESS_WAVELET):
        refuse_lossy_mask("JPEG 2000 with losses")
    from imagecodecs import jpeg2k_decode  # takes a fifth of a second

    values = jpeg2k_decode(data)
    check_size(values.shape, config)
    decoded_bands = 1 if values.ndim == 2 else values.shape[2]
    has_palette = decoded_bands != header.bands
    bits = 8 * values.dtype.itemsize if has_palette else header.bits
    if values.dtype.kind == "i" and bits < 8 * values.dtype.itemsize and not config.limits():
        raise UnreadableImage(f"signed values of {bits} bits have no agreed range; data.range says which")
    opacity = find_opacity(data, boxes.get(b"cdef"))
    return to_stored(values, bits, wanted, config, opacity is not None, opacity == OPACITIES[1])


def find_codestream(data: bytes) -> int:
    """Byte at which the codestream begins."""
    if data.startswith(CODESTREAM_START):
        return 0
    return next((box.start for box in find_boxes(data) if box.kind == b"jp2c"), len(data))


def read_codestream_header(data: bytes, start: int = 0) -> CodestreamHeader | None:
    """The header of a codestream that begins at `start`, in bytes; None: it cannot be read."""
    found = SIZES.match(data, start)
    if found is None:
        return None
    right, lower, left, upper, bands = (int.from_bytes(number, "big") for number in found.groups()[:5])
    return CodestreamHeader(max(lower - upper, 0), max(right - left, 0), bands, (found[6][0] & 0x7F) + 1)


def find_opacity(data: bytes, definitions: Box | None) -> int | None:
    """The kind of the opacity that a file declares: one of OPACITIES; None: it has none.

    Its channel has any number. OpenJPEG brings the colours to the front, so it is the last band.

    Args:
        definitions: the box with a count of channels, and of each its number, its kind and the colour it is for.
    """
    if definitions is None:
        return None
    kinds = [int.from_bytes(data[at : at + 2], "big") for at in range(definitions.start + 4, definitions.end, 6)]
    return next((kind for kind in kinds if kind in OPACITIES), None)
