"""Every decoder turns an image as PIL.ImageOps.exif_transpose does, once, wherever its orientation is written."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import encoded
from hypothesis import given
from hypothesis import strategies as st
from image_files import decode_with
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from mpp.data.decoding.channels import LUMA_WEIGHTS
from mpp.features.frozen import to_pixels

CORNERS = np.array([[20, 90], [160, 240]], np.uint8).repeat(16, 0).repeat(32, 1)
PICTURE = np.stack([CORNERS, CORNERS // 2, 255 - CORNERS], -1)  # 32 x 64: all eight orientations differ
JPEG = encoded(PICTURE, "JPEG", quality=95, subsampling=0)
JFIF_END = 2 + 2 + struct.unpack(">H", JPEG[4:6])[0]
PNG_HEADER = 8 + 4 + 4 + 13 + 4
PNG_END = 12  # bytes of the last chunk
every_orientation = pytest.mark.parametrize("orientation", range(1, 9))


def segment(marker: int, payload: bytes) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def png_with_exif(png: bytes, payload: bytes, place: int = PNG_HEADER) -> bytes:
    """A PNG file with a chunk of EXIF."""
    checked = b"eXIf" + payload
    chunk = struct.pack(">I", len(payload)) + checked + struct.pack(">I", zlib.crc32(checked))
    return png[:place] + chunk + png[place:]


def exif(orientation: int, order: str = "<") -> bytes:
    """EXIF's TIFF structure with one tag."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(order + "IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)


def xmp(orientation: int | None = None) -> bytes:
    """An XMP segment's payload, perhaps with an orientation of its own."""
    tag = "" if orientation is None else f' tiff:Orientation="{orientation}"'
    return b"http://ns.adobe.com/xap/1.0/\0" + f"<x:xmpmeta xmlns:x='adobe:ns:meta/'{tag}/>".encode()


def exif_segment(orientation: int, order: str = "<") -> bytes:
    """A segment of a JPEG file with its orientation."""
    return segment(0xE1, b"Exif\0\0" + exif(orientation, order))


def jpeg_of(*segments: bytes) -> bytes:
    return JPEG[:2] + b"".join(segments) + JPEG[JFIF_END:]


def transposed(data: bytes) -> np.ndarray:
    """What PIL's own exif_transpose makes of a file, (3, H, W)."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1).astype(int)


def assert_close(decoded: Tensor, expected: np.ndarray) -> None:
    """Values of the same shape differ by what JPEG loses."""
    assert decoded.shape == expected.shape
    assert abs(decoded.numpy() - expected).max() <= 3


OTHERS = {
    "JFIF": JPEG[2:JFIF_END],
    "XMP": segment(0xE1, xmp()),
    "ICC": segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(128)),
    "comment": segment(0xFE, b"a comment"),
}


@given(
    orientation=st.integers(0, 9),
    order=st.sampled_from("<>"),
    others=st.lists(st.sampled_from(list(OTHERS)), unique=True),
    place=st.integers(0, len(OTHERS)),
)
def test_any_order_of_segments_is_one_picture(orientation, order, others, place):
    segments = [OTHERS[name] for name in others]
    data = jpeg_of(*segments[:place], exif_segment(orientation, order), *segments[place:])
    assert_close(decode_with(data), transposed(data))


@every_orientation
@pytest.mark.parametrize(
    ("settings", "by_torchvision"),
    [
        pytest.param({}, True, id="RGB"),
        pytest.param({"channels": 1}, True, id="grey"),
        pytest.param({"bands": (1, 2, 3)}, True, id="bands"),
        pytest.param({}, False, id="by PIL"),
        pytest.param({"channels": 1}, False, id="grey by PIL"),
    ],
)
def test_every_decoder_of_jpeg_turns_alike(settings, by_torchvision, orientation, monkeypatch):
    if not by_torchvision:
        monkeypatch.setattr("mpp.data.decoding.pictures.decode_jpeg", None)
    data = jpeg_of(OTHERS["XMP"], exif_segment(orientation))
    expected = transposed(data)
    if settings.get("channels") == 1:
        expected = np.tensordot(LUMA_WEIGHTS, expected, 1)[None]
    assert_close(decode_with(data, **settings), expected)


@pytest.mark.parametrize("of_exif", [None, 1, 6])
def test_orientation_of_xmp_counts_where_exif_has_none(of_exif):
    segments = [segment(0xE1, xmp(3))]
    if of_exif is not None:
        segments.append(exif_segment(of_exif))
    data = jpeg_of(*segments)
    assert_close(decode_with(data), transposed(data))


@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_without_orientation_keep_their_bits(channels):
    mode = ImageReadMode.RGB if channels == 3 else ImageReadMode.GRAY
    for data in (JPEG, jpeg_of(*OTHERS.values()), jpeg_of(exif_segment(1))):
        plain = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=mode)
        assert torch.equal(decode_with(data, channels=channels), plain)


@every_orientation
def test_an_image_of_pil_is_turned(orientation):
    data = jpeg_of(OTHERS["XMP"], exif_segment(orientation))
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(to_pixels(image, 3), transposed(data))


BROKEN = {"no TIFF": b"nonsense", "cut": exif(6)[:12], "empty": b"", "elsewhere": b"II*\0\xff\xff\xff\x7f"}


@pytest.mark.filterwarnings("ignore:.*EXIF")
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_note_breaks_no_picture(broken):
    data = jpeg_of(segment(0xE1, b"Exif\0\0" + broken))
    assert torch.equal(decode_with(data), decode_with(JPEG))
    data = png_with_exif(encoded(PICTURE), broken)
    assert np.array_equal(decode_with(data).permute(1, 2, 0), PICTURE)
