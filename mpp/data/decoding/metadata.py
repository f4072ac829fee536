"""Files cut down to the parts that show their pixels: no EXIF, place, comment, preview, or anything behind the end.

Only parts of the kinds listed here are kept: an unknown kind goes, too.
"""

import io
import re

import numpy as np

from mpp.config import ImagesConfig
from mpp.data.decoding.kinds import JPEG_START, NPY_START, PNG_START, ZIP_START
from mpp.data.decoding.numpy_files import read_numpy_file
from mpp.data.decoding.pictures import PPM_HEADER

JPEG_MARKER = re.compile(rb"\xff+([^\0\xff])")
SCAN_END = re.compile(rb"\xff+[^\0\xff\xd0-\xd7]")
"""The first marker behind the coded values of a JPEG, among which markers of restarts stand."""
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
CODING_MARKERS = {*range(0xC0, 0xD0), *range(0xDA, 0xDE)} - {0xC8}
"""Of frames, tables and scans of JPEG."""
NOTE_MARKERS = {*range(0xE0, 0xF0), 0xFE}
"""Of segments of applications, and of comments."""
PNG_CHUNKS = {
    **{b"IHDR": 13, b"PLTE": 768, b"IDAT": 2**31, b"IEND": 0, b"tRNS": 256},
    **{b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"cICP": 4, b"pHYs": 9, b"sBIT": 4, b"bKGD": 6},
}
"""Chunks that show pixels, and the most bytes that each holds: there is no room for text in them."""
OPTIONAL_CHUNK = 0x20  # a bit of the first letter of a chunk's kind, which makes it a small letter
WEBP_CHUNKS = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH")
WEBP_OPACITY = 0x10  # the flag of VP8X that stays: others announce metadata
GIF_BLOCK = re.compile(rb"!\xf9\x04....\0|,........(.)", re.DOTALL)
"""A control of opacity and time, or the header of an image, with its flags."""
GIF_END = b"\x3b"
BMP_HEADER_BYTES = 54


def without_metadata(data: bytes, config: ImagesConfig) -> bytes | None:
    """An image file with nothing but its pixels: the same bytes where it holds nothing else. None: encode it again.

    Args:
        data: a file that can be decoded. Its orientation is lost, like the rest of EXIF.
    """
    if data.startswith((NPY_START, ZIP_START)):
        return only_array(data, config)
    if header := PPM_HEADER.match(data):
        return data[: header.end() + 3 * int(header[1]) * int(header[2])]
    if data.startswith(JPEG_START):
        return jpeg_segments(data)
    if data.startswith(PNG_START):
        return png_chunks(data)
    if data.startswith(b"RIFF"):
        return webp_chunks(data)
    is_plain = is_plain_gif(data) if data.startswith(b"GIF8") else is_plain_bmp(data)
    return data if is_plain else None


def only_array(data: bytes, config: ImagesConfig) -> bytes:
    """The array of a file of numpy's, as `.npy`."""
    file = io.BytesIO()
    np.save(file, read_numpy_file(data, config))
    return file.getvalue()


def jpeg_segments(data: bytes) -> bytes | None:
    """A JPEG up to its first end; of applications' segments only the numbers of JFIF's and Adobe's."""
    kept = [data[:2]]
    position = 2
    while found := JPEG_MARKER.match(data, position):
        marker = found[1][0]
        if marker == END_OF_IMAGE:
            return b"".join(kept) + bytes([0xFF, END_OF_IMAGE])
        start = found.end()
        position = start + int.from_bytes(data[start : start + 2], "big")
        content = data[start + 2 : position]
        if marker in NOTE_MARKERS:
            content = numbers_of_note(content)
        elif marker not in CODING_MARKERS:
            return None
        if content or marker in CODING_MARKERS:
            kept += [bytes([0xFF, marker]), (len(content) + 2).to_bytes(2, "big"), content]
        if marker == START_OF_SCAN:
            scan_end = SCAN_END.search(data, position)
            if scan_end is None:
                return None
            kept.append(data[position : scan_end.start()])
            position = scan_end.start()
    return None


def numbers_of_note(content: bytes) -> bytes:
    """The fixed numbers of JFIF (without a preview) or Adobe, which say how colours are stored; else nothing."""
    if content.startswith(b"JFIF\0") and len(content) >= 14:
        return content[:12] + bytes(2)  # width and height of the preview
    if content.startswith(b"Adobe") and len(content) >= 12:
        return content[:12]
    return b""


def png_chunks(data: bytes) -> bytes | None:
    """A PNG up to its end, of the chunks that show pixels."""
    kept = [PNG_START]
    position = len(PNG_START)
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        chunk = data[position : position + 12 + size]
        position += 12 + size
        if size <= PNG_CHUNKS.get(kind, -1):
            kept.append(chunk)
        elif not kind or not kind[0] & OPTIONAL_CHUNK:
            return None
        if kind == b"IEND":
            return b"".join(kept)
    return None


def webp_chunks(data: bytes) -> bytes | None:
    """A WebP of the chunks that show pixels; None: it is animated."""
    kept = []
    position = 12
    end = 8 + int.from_bytes(data[4:8], "little")
    while position < min(end, len(data)):
        kind = data[position : position + 4]
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        content = data[position + 8 : position + 8 + size]
        position += 8 + size + size % 2
        if kind == b"ANIM" or not content:
            return None
        if kind == b"VP8X":
            content = bytes([content[0] & WEBP_OPACITY, *bytes(3)]) + content[4:10]
        if kind in WEBP_CHUNKS:
            kept.append(kind + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2))
    chunks = b"WEBP" + b"".join(kept)
    return b"RIFF" + len(chunks).to_bytes(4, "little") + chunks


def is_plain_gif(data: bytes) -> bool:
    """Whether a GIF holds one image, and nothing else."""
    position = 13 + colour_table_bytes(data[10])
    images = 0
    while block := GIF_BLOCK.match(data, position):
        position = block.end()
        if block[1]:
            images += 1
            position += colour_table_bytes(block[1][0]) + 1  # and the size of a code
            while size := data[position : position + 1].strip(b"\0"):
                position += 1 + size[0]
            position += 1
    return images == 1 and data[position:] == GIF_END


def colour_table_bytes(flags: int) -> int:
    """The bytes of a colour table of GIF, by the flags of its header."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def is_plain_bmp(data: bytes) -> bool:
    """Whether a file is a BMP of a header, a palette and uncompressed rows, and nothing else."""
    if not data.startswith(b"BM") or data[6:10] != bytes(4) or len(data) < BMP_HEADER_BYTES:
        return False
    pixels_start, header_bytes, width, height = (int.from_bytes(data[at : at + 4], "little") for at in (10, 14, 18, 22))
    bits = int.from_bytes(data[28:30], "little")
    compression, colours = (int.from_bytes(data[at : at + 4], "little") for at in (30, 46))
    if bits <= 8 and not colours:
        colours = 2**bits
    row_bytes = (width * bits + 31) // 32 * 4
    palette_end = BMP_HEADER_BYTES + 4 * colours
    is_simple = header_bytes == 40 and compression == 0 and colours <= 256 and pixels_start == palette_end
    return is_simple and len(data) == pixels_start + height * row_bytes
