"""Every decoder turns an image as PIL.ImageOps.exif_transpose does, once, wherever its orientation is written."""

import io

import numpy as np
import pytest
import torch
from conftest import encoded
from hypothesis import given
from hypothesis import strategies as st
from image_files import JFIF_END, decode_with, exif, segment, with_chunk
from PIL import Image, ImageOps
from torch import Tensor

from mpp.data.decoding.channels import LUMA_WEIGHTS
from mpp.features.frozen import to_pixels

CORNERS = np.array([[20, 90], [160, 240]], np.uint8).repeat(16, 0).repeat(32, 1)
PICTURE = np.stack([CORNERS, CORNERS // 2, 255 - CORNERS], -1)  # 32 x 64: all eight orientations differ
JPEG = encoded(PICTURE, "JPEG", quality=95, subsampling=0)


def xmp(tag: str = "") -> bytes:
    """An XMP segment, perhaps with an orientation of its own."""
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + f"<x:xmpmeta xmlns:x='adobe:ns:meta/'{tag}/>".encode())


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
    "XMP": xmp(),
    "ICC": segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(128)),
    "comment": segment(0xFE, b"a comment"),
}
TURNED_BY_XMP = xmp(' tiff:Orientation="3"')


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


@pytest.mark.parametrize("by_torchvision", [True, False])
def test_every_decoder_of_jpeg_turns_alike(by_torchvision, monkeypatch):
    """Also where XMP says it, if EXIF does not."""
    if not by_torchvision:
        monkeypatch.setattr("mpp.data.decoding.pictures.decode_jpeg", None)
    files = [jpeg_of(OTHERS["XMP"], exif_segment(orientation)) for orientation in range(1, 9)]
    files += [jpeg_of(TURNED_BY_XMP, *segments) for segments in ([], [exif_segment(1)], [exif_segment(6)])]
    for data in files:
        expected = transposed(data)
        assert_close(decode_with(data), expected)
        assert_close(decode_with(data, bands=(1, 2, 3)), expected)
        assert_close(decode_with(data, channels=1), np.tensordot(LUMA_WEIGHTS, expected, 1)[None])
        with Image.open(io.BytesIO(data)) as image:
            assert np.array_equal(to_pixels(image, 3), expected)


BROKEN = {"no TIFF": b"nonsense", "cut": exif(6)[:12], "empty": b"", "elsewhere": b"II*\0\xff\xff\xff\x7f"}


@pytest.mark.filterwarnings("ignore:.*EXIF")
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_note_breaks_no_picture(broken):
    data = jpeg_of(segment(0xE1, b"Exif\0\0" + broken))
    assert torch.equal(decode_with(data), decode_with(JPEG))
    data = with_chunk(encoded(PICTURE), b"eXIf", broken)
    assert np.array_equal(decode_with(data).permute(1, 2, 0), PICTURE)
