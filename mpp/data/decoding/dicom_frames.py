"""Compressed frames of DICOM files, by imagecodecs, as a plugin of pydicom.

pydicom decodes 8-bit JPEG with Pillow. For the other kinds of JPEG it knows decoders that are not free or not exact.
"""

import re
from typing import TYPE_CHECKING

import imagecodecs
from pydicom.pixels import get_decoder
from pydicom.uid import (
    UID,
    JPEG2000TransferSyntaxes,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSTransferSyntaxes,
    RLELossless,
)

from mpp.data.decoding.jpeg2000 import read_codestream_header
from mpp.errors import UnreadableImage

if TYPE_CHECKING:
    from pydicom.pixels.decoders.base import DecodeRunner

PLUGIN = "imagecodecs"
RLE = RLELossless
DECODERS = {
    **dict.fromkeys((JPEGExtended12Bit, JPEGLossless, JPEGLosslessSV1), imagecodecs.jpeg8_decode),
    **dict.fromkeys(JPEGLSTransferSyntaxes, imagecodecs.jpegls_decode),
    **dict.fromkeys(JPEG2000TransferSyntaxes, imagecodecs.jpeg2k_decode),
}
DECODER_DEPENDENCIES = dict.fromkeys((*DECODERS, RLELossless), ("imagecodecs",))  # pydicom reads it
JPEG_SIZE = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf\xf7]...(..)(..)(.)", re.DOTALL)
"""Of a frame header: height, width, samples."""
JPEG_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xdb-\xfe](..)", re.DOTALL)
"""Marker and length."""


def is_available(uid: str) -> bool:
    """Whether the plugin decodes a transfer syntax; pydicom asks."""
    return uid in DECODER_DEPENDENCIES


def decode_frame(frame: bytes, runner: "DecodeRunner") -> bytes:
    """The values of a compressed frame, as pydicom wants them."""
    syntax = runner.transfer_syntax
    if syntax == RLELossless:
        size = runner.frame_length(unit="bytes")
        runner.set_option("planar_configuration", 1)
        return bytes(imagecodecs.dicomrle_decode(frame, f"<u{runner.bits_allocated // 8}", out=size))
    if DECODERS[syntax] is imagecodecs.jpeg8_decode:
        stored = "RGB" if runner.samples_per_pixel == 3 else "GRAYSCALE"  # pydicom converts colours itself
        pixels = imagecodecs.jpeg8_decode(frame, colorspace=stored, outcolorspace=stored)
    else:
        pixels = DECODERS[syntax](frame)
    runner.set_option("bits_allocated", 8 * pixels.itemsize)
    runner.set_option("planar_configuration", 0)
    if runner.photometric_interpretation in ("YBR_ICT", "YBR_RCT"):  # JPEG 2000's own, which its decoder undoes
        runner.set_option("photometric_interpretation", "RGB")
    return pixels.tobytes()


def plugin_for(syntax: UID, bits: int) -> str:
    """The plugin that decodes a transfer syntax; "": its frames are not compressed.

    Args:
        bits: stored for each sample.
    """
    is_8_bit_jpeg = syntax == JPEGBaseline8Bit or (syntax == JPEGExtended12Bit and bits == 8)
    if is_8_bit_jpeg:
        return "pillow"
    if syntax not in DECODER_DEPENDENCIES:
        return ""
    decoder = get_decoder(syntax)
    if PLUGIN not in decoder.available_plugins:
        decoder.add_plugin(PLUGIN, (__name__, decode_frame.__name__))
    return PLUGIN


def check_frame(frame: bytes, expected: tuple[int, int, int]) -> None:
    """Refuse a JPEG frame that is of another size than its file says: it could be of any.

    Args:
        expected: height, width and samples.
    """
    size = frame_size(frame)
    if size != expected:
        found = "a frame without a size" if size is None else f"a frame of {' x '.join(map(str, size))}"
        raise UnreadableImage(f"{found} in a DICOM file, which announces {' x '.join(map(str, expected))}")


def frame_size(frame: bytes) -> tuple[int, int, int] | None:
    """Height, width and samples by the header of a JPEG, JPEG-LS or JPEG 2000 frame; None: it has none."""
    if header := read_codestream_header(frame):
        return header.height, header.width, header.bands
    position = 2
    while segment := JPEG_SEGMENT.match(frame, position):
        if header := JPEG_SIZE.match(frame, position):
            height, width, samples = (int.from_bytes(number, "big") for number in header.groups())
            return height, width, samples
        position += 2 + int.from_bytes(segment[1], "big")
    return None
