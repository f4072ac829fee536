"""HEIC, AVIF, JPEG XL and JPEG 2000: the pixels that other programs read, upright, and decoders that are absent.

The files in `coded/` are of Debian's heif-enc, avifenc, cjxl and opj_compress, and the PNG files beside them of
heif-convert, avifdec, djxl and opj_decompress. The HEIC files that are turned are of pillow-heif: as a phone's, they
have a property that turns them, EXIF that says the same, and a place. The name has the bits of the values.
"""

import io
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import torch
from colours import load
from conftest import each_of, encoded, picture
from image_files import JFIF_END, decode_with, exif, segment, unreadable, with_chunk, write_tar
from PIL import Image, ImageOps
from torch import Tensor

from mpp.config import DataConfig
from mpp.data.decoding.channels import LUMA_WEIGHTS
from mpp.errors import UnreadableImage
from mpp.features.frozen import to_pixels

CODED = Path(__file__).parent / "coded"
RGB = picture(0)  # 40 x 48
TOOLS_DIFFER = {".heic": 1, ".jxl": 1, ".jp2": 0, ".j2k": 0, ".avif": 0}
"""Largest difference of 8-bit values between releases of a library."""
REFERENCES = sorted(path.stem for path in CODED.glob("*.png"))


def read(name: str) -> bytes:
    return (CODED / name).read_bytes()


def jxl(pixels: np.ndarray) -> bytes:
    return imagecodecs.jpegxl_encode(pixels, lossless=True)


@pytest.mark.parametrize("name", REFERENCES)
def test_values_are_those_of_the_formats_own_program(name):
    reference = imagecodecs.png_decode(read(f"{name}.png"))
    if reference.ndim == 2:
        reference = reference[..., None]
    if name.startswith("grey"):
        reference = reference[..., :1]
    bands = tuple(range(1, reference.shape[2] + 1))
    decoded = decode_with(read(name), channels=len(bands), bands=bands).permute(1, 2, 0).numpy()
    assert decoded.dtype == (np.float32 if "_16." in name or name == "grey_10.heic" else np.uint8)
    if reference.dtype == np.uint8:
        assert np.abs(decoded.astype(int) - reference).max() <= TOOLS_DIFFER[Path(name).suffix]
    else:  # 10 and 12 bits of HEIC and AVIF are given as 8
        assert np.abs(decoded - reference / 257).max() <= (3.2 if name.endswith(("heic", "avif")) else 255 / 65535)


@pytest.mark.parametrize("orientation", [5, 6])
@pytest.mark.parametrize("end", ["heic", "avif", "jxl"])
def test_files_are_turned_once(end, orientation):
    """Their EXIF has the orientation, too."""
    data = read(f"turned_{orientation}.{end}")
    assert b"Exif" in data
    upright = decode_with(read("turned_6.jpg")).int()  # 45 x 37
    if orientation == 5:
        upright = upright.flip(2)
    decoded = decode_with(data).int()
    assert decoded.shape == upright.shape
    assert (decoded - upright).abs().float().mean() < 3
    assert (decoded.flip(1) - upright).abs().float().mean() > 50


def test_an_orientation_in_xmp_does_not_turn_avif():
    options = {"quality": 100, "subsampling": "4:4:4"}
    file = encoded(RGB, "AVIF", xmp=b'<x tiff:Orientation="3"/>', **options)
    assert torch.equal(decode_with(file), decode_with(encoded(RGB, "AVIF", **options)))


def test_too_large_jpeg_xl_is_not_decoded(monkeypatch):
    """Its header has sides in many forms."""
    monkeypatch.setattr("imagecodecs.jpegxl_decode", None)
    for height, width in ((40, 48), (40, 64), (300, 40), (30, 45)):
        with unreadable(f"{height} x {width} pixels are more than data.max_pixels"):
            decode_with(jxl(np.zeros((height, width, 3), np.uint8)), max_pixels=1000)
    with unreadable("pixels are more than"):
        decode_with(read("turned_6.jxl"), max_pixels=1000)


def test_opacity_of_10_bits_in_jpeg_xl_is_refused():
    deep = np.random.default_rng(0).integers(0, 1024, (40, 48, 3), dtype=np.uint16)
    opaque = jxl(np.concatenate([deep, np.full_like(deep[..., :1], 1023)], -1))
    with unreadable("opacity"):
        decode_with(opaque, range=(0, 1023))
    decoded = decode_with(opaque, range=(0, 1023), bands=(1, 2, 3))
    np.testing.assert_allclose(decoded.permute(1, 2, 0), deep * (255 / 1023), rtol=1e-5)


def test_the_primary_image_of_a_heic_is_read():
    data = bytearray(read("rgba_8.heic").replace(b"auxl", b"cdsc"))
    primary = data.index(b"pitm") + 8
    first = decode_with(bytes(data))
    for item in range(1, 9):
        data[primary : primary + 2] = item.to_bytes(2, "big")
        try:
            other = decode_with(bytes(data))
        except UnreadableImage:
            continue
        if not torch.equal(other, first):
            return
    pytest.fail("the first image is read, whichever is the primary one")


# --- folders, tables and shards; and decoders that are not there ---


def save_phone(folder: Path) -> None:
    """As a phone exports pictures: HEIC, and beside it films."""
    for number in range(4):
        (folder / f"IMG_{number}.HEIC").write_bytes(read("turned_6.heic"))
        (folder / f"IMG_{number}.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")


def save_tar(folder: Path) -> None:
    """Some programs convert a phone's pictures, and keep their names."""
    files = [encoded(picture(1)), read("rgb_8.heic"), read("rgb_8.avif"), jxl(RGB)]
    write_tar(folder / "train.tar", [(f"{number}.heic", data) for number, data in enumerate(files)])


@pytest.mark.parametrize("save, of_heic", [(save_phone, 4), (save_tar, 1)])
def test_content_decides_and_an_absent_decoder_is_named(tmp_path, without_module, capsys, save, of_heic):
    save(tmp_path)
    parts = load(tmp_path, eval_fraction=0.25)
    assert [len(part) for part in parts] == [3, 1]
    if save is save_phone:
        assert parts[0].decode(0, DataConfig()).shape == (3, 45, 37)
        assert "left out: .mov files (4: IMG_0.MOV, IMG_1.MOV, IMG_2.MOV and 1 more)" in capsys.readouterr().err
    without_module("pi_heif")
    unreadable = 0
    for part in parts:
        for index in range(len(part)):
            try:
                part.decode(index, DataConfig())
            except UnreadableImage as error:
                assert "HEIC files need pi-heif: pip install pi-heif" in str(error)
                unreadable += 1
    assert unreadable == of_heic


# --- every decoder turns an image as PIL.ImageOps.exif_transpose does, once, wherever its orientation is written ---


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


TURNED_BY_XMP = xmp(' tiff:Orientation="3"')


@pytest.mark.parametrize("by_torchvision", [True, False])
def test_every_decoder_of_jpeg_turns_alike(by_torchvision, monkeypatch):
    """Also where EXIF is not the first segment, and where XMP says it, if EXIF does not."""
    if not by_torchvision:
        monkeypatch.setattr("mpp.data.decoding.pictures.decode_jpeg", None)
    files = [jpeg_of(xmp(), exif_segment(orientation, "<>"[orientation % 2]), xmp()) for orientation in range(10)]
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
@each_of("broken", BROKEN)
def test_a_broken_note_breaks_no_picture(broken):
    data = jpeg_of(segment(0xE1, b"Exif\0\0" + broken))
    assert torch.equal(decode_with(data), decode_with(JPEG))
    data = with_chunk(encoded(PICTURE), b"eXIf", broken)
    assert np.array_equal(decode_with(data).permute(1, 2, 0), PICTURE)
