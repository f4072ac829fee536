"""JPEG XL, in its own file or as a bare codestream, by imagecodecs (libjxl), which turns images upright.

imagecodecs has no function that reads only the header, and a header of 20 bytes can announce 2**60 pixels. The numbers
in a header have no fixed place: each is as long as it needs to be (ISO/IEC 18181-1, annexes B and D).
"""

from dataclasses import dataclass

from mpp.config import ImagesConfig
from mpp.data.decoding.boxes import find_boxes
from mpp.data.decoding.checks import check_size
from mpp.data.decoding.coded import to_stored
from mpp.data.decoding.orientation import UPRIGHT
from mpp.data.decoding.wanted import StoredPixels, Wanted
from mpp.errors import UnreadableImage

CODESTREAM_START = b"\xff\x0a"
HEADER_BYTES = 64
RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width and height
SIDE = ((1, 9), (1, 13), (1, 18), (1, 30))  # choices of a number: the least value, and bits of the number added to it
PREVIEW_SIDE = ((1, 6), (65, 8), (321, 10), (1345, 12))
PREVIEW_SIDE_IN_EIGHTS = ((16, 0), (32, 0), (1, 5), (33, 9))
INTEGER_BITS = ((8, 0), (10, 0), (12, 0), (1, 6))
FLOAT_BITS = ((32, 0), (16, 0), (24, 0), (1, 6))
EXTRA_CHANNELS = ((0, 0), (1, 0), (2, 4), (1, 12))
TICKS = ((100, 0), (1000, 0), (1, 10), (1, 30))
TICK_DIVISORS = ((1, 0), (1001, 0), (1, 8), (1, 10))
LOOPS = ((0, 0), (0, 3), (0, 16), (0, 32))


@dataclass(frozen=True)
class Header:
    """Size, bits, channels and orientation by the header of a JPEG XL file."""

    width: int
    height: int
    bits: int = 8
    extra_channels: int = 0
    orientation: int = UPRIGHT


def read_jpegxl(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The first frame of a JPEG XL file, upright; its last band may be opacity."""
    header = read_header(data)
    check_size((header.height, header.width, 3 + header.extra_channels), config)
    from imagecodecs import jpegxl_decode  # takes a fifth of a second

    values = jpegxl_decode(data, index=0, numthreads=1)
    if values.ndim == 2:
        return to_stored(values, header.bits, wanted, config)
    bands = values.shape[2]
    bands_are_last = bands in (2, 3, 4) and sorted(values.shape[:2]) == sorted((header.width, header.height))
    if not bands_are_last:  # grey with further bands that are not opacity
        return to_stored(values.transpose(1, 2, 0), header.bits, wanted, config)
    return to_stored(values, header.bits, wanted, config, opacity=bands in (2, 4))


def read_header(data: bytes) -> Header:
    """The header of a JPEG XL file."""
    start = codestream_start(data)
    if not start.startswith(CODESTREAM_START):
        raise UnreadableImage("a JPEG XL file whose header cannot be read")
    bits = BitReader(start[len(CODESTREAM_START) :])
    width, height = read_sides(bits)
    is_default = bits.flag()
    if is_default:
        return Header(width, height)
    orientation = UPRIGHT
    if bits.flag():  # extra fields
        orientation += bits.take(3)  # libjxl applies it
        if bits.flag():
            read_sides(bits)  # the intended size
        if bits.flag():
            skip_preview(bits)
        if bits.flag():
            skip_animation(bits)
    depth = read_depth(bits)
    bits.flag()  # whether 16 bits suffice to decode
    extra_channels = bits.number(EXTRA_CHANNELS)
    return Header(width, height, depth, extra_channels, orientation)


def codestream_start(data: bytes) -> bytes:
    """The first bytes of the codestream, which may be cut into boxes."""
    if data.startswith(CODESTREAM_START):
        return data[:HEADER_BYTES]
    start = b""
    for box in find_boxes(data):
        if box.kind == b"jxlc":
            return data[box.start : box.end][:HEADER_BYTES]
        if box.kind == b"jxlp":  # begins with the number of the part
            start += data[box.start + 4 : min(box.end, box.start + 4 + HEADER_BYTES)]
            if len(start) >= HEADER_BYTES:
                break
    return start


class BitReader:
    """Numbers that follow each other bit by bit, the lowest first; zeros beyond the end."""

    def __init__(self, data: bytes):
        self.rest = int.from_bytes(data, "little")

    def take(self, count: int) -> int:
        """The number of the next `count` bits."""
        number = self.rest & ((1 << count) - 1)
        self.rest >>= count
        return number

    def flag(self) -> bool:
        """The next bit."""
        return self.take(1) == 1

    def number(self, choices: tuple[tuple[int, int], ...]) -> int:
        """A number by one of four choices, which the next two bits name: (least value, bits of the added number)."""
        least, count = choices[self.take(2)]
        return least + self.take(count)


def read_sides(bits: BitReader) -> tuple[int, int]:
    """Width and height, in pixels."""
    in_eights = bits.flag()
    height = 8 * (1 + bits.take(5)) if in_eights else bits.number(SIDE)
    ratio = bits.take(3)
    if ratio:
        return ratio_of(height, ratio), height
    width = 8 * (1 + bits.take(5)) if in_eights else bits.number(SIDE)
    return width, height


def ratio_of(height: int, ratio: int) -> int:
    """The width of an image with one of RATIOS, counted from 1."""
    across, down = RATIOS[ratio - 1]
    return height * across // down


def skip_preview(bits: BitReader) -> None:
    """Skip the sides of a preview."""
    sides = PREVIEW_SIDE_IN_EIGHTS if bits.flag() else PREVIEW_SIDE
    bits.number(sides)
    if not bits.take(3):
        bits.number(sides)


def skip_animation(bits: BitReader) -> None:
    """Skip the speed of an animation, its number of loops, and whether it has time codes."""
    for choices in (TICKS, TICK_DIVISORS, LOOPS):
        bits.number(choices)
    bits.flag()


def read_depth(bits: BitReader) -> int:
    """Bits of a value."""
    if not bits.flag():
        return bits.number(INTEGER_BITS)
    depth = bits.number(FLOAT_BITS)
    bits.take(4)  # of its exponent
    return depth
