"""`mpp prepare` writes pixels alone: no EXIF with a place, no comment, no preview, no tag of a scan."""

import io
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from conftest import encoded, picture, refused
from dicom_files import SECRETS, dicom
from image_files import JFIF_END, decode_with, npy, packed_tiff, segment, tiff
from PIL import Image, PngImagePlugin

from mpp.config import ImagesConfig, PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.prepare import prepare_image

SECRET = SECRETS[0]
NOTE = SECRET.encode()
RGB = picture(0)
GPS_FOLDER, LATITUDE, DESCRIPTION, ORIENTATION = 0x8825, 2, 270, 274
JPEG = encoded(RGB, "JPEG")


def exif(orientation: int) -> Image.Exif:
    """EXIF with an owner and a place."""
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    tags[DESCRIPTION] = SECRET
    tags.get_ifd(GPS_FOLDER)[LATITUDE] = (47.0, 11.0, 8.15)
    return tags


def png_text() -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("dpi", SECRET)
    return text


def with_segment(marker: int, content: bytes) -> bytes:
    return JPEG[:2] + segment(marker, content) + JPEG[2:]


JFIF_PREVIEW = segment(0xE0, JPEG[6 : JFIF_END - 2] + bytes([3, 3]) + NOTE.ljust(27))  # of 3 x 3 pixels
TELLING = {
    "JPEG, EXIF": encoded(RGB, "JPEG", exif=exif(1)),
    "JPEG, turned": encoded(RGB, "JPEG", exif=exif(6)),
    "JPEG, comment": encoded(RGB, "JPEG", comment=SECRET),
    "JPEG, XMP": with_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + NOTE),
    "JPEG, Photoshop": with_segment(0xED, b"Photoshop 3.0\0" + NOTE),
    "JPEG, preview": with_segment(0xE0, b"JFXX\0" + NOTE),
    "JPEG, preview in JFIF": JPEG[:2] + JFIF_PREVIEW + JPEG[JFIF_END:],
    "JPEG, text behind Adobe's numbers": with_segment(0xEE, b"Adobe\0\x64\0\0\0\0\1" + NOTE),
    "JPEG, a video behind": JPEG + NOTE,
    "JPEG, CMYK": encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG", exif=exif(1)),
    "PNG, EXIF": encoded(RGB, "PNG", exif=exif(3)),
    "PNG, text": encoded(RGB, "PNG", pnginfo=png_text()),
    "WebP, turned": encoded(RGB, "WEBP", exif=exif(6), lossless=True),
    "HEIC, turned": (Path(__file__).parent / "coded" / "turned_6.heic").read_bytes(),
    "PPM, comment": b"P6\n# " + NOTE + b"\n2 2\n255\n" + bytes(12),
    "npy, header": npy(RGB).replace(b", }".ljust(40), b", } # " + NOTE.ljust(34)),
    "TIFF": tiff(RGB, description=SECRET),
    "DICOM": dicom(RGB),
}


@pytest.mark.parametrize("kind", TELLING)
def test_metadata_is_dropped_and_pixels_are_not(kind):
    data = TELLING[kind]
    telling = [*map(str.encode, SECRETS), b"Exif"]
    assert any(word in data for word in telling)
    for format in ("jpeg", "ppm", "npy"):
        config = PrepareConfig(format=format, data=ImagesConfig())
        prepared = prepare_image(data, config)
        assert not any(word in prepared for word in telling)
        np.testing.assert_array_equal(read_values(prepared, config.data), read_values(data, config.data))


@pytest.mark.parametrize("options", [{}, {"progressive": True, "dpi": (72, 72)}])
def test_small_jpegs_without_metadata_stay_to_the_byte(options):
    data = encoded(RGB, "JPEG", **options)
    assert prepare_image(data, PrepareConfig(data=ImagesConfig())) == data


def test_bands_that_are_chosen_of_a_plain_jpeg_are_those_of_the_shard():
    data = ImagesConfig(bands=(3, 2, 1))
    prepared = prepare_image(JPEG, PrepareConfig(data=data))
    np.testing.assert_array_equal(read_values(prepared, ImagesConfig()), read_values(JPEG, data))


def test_units_of_scans_are_kept():
    hounsfield = np.arange(-1024, 976).reshape(40, 50)
    tags = dict(RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11)
    data = dicom((hounsfield + 1024).astype(np.uint16), **tags)
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(channels=1), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(prepared))[..., 0], hounsfield)


DEEP = np.random.default_rng(0).integers(0, 1024, (40, 48, 3), dtype=np.uint16)
FILES_OF_10_BITS = {
    "JPEG 2000": imagecodecs.jpeg2k_encode(DEEP, level=0, bitspersample=10),
    "TIFF": packed_tiff(DEEP, 10),
}


@pytest.mark.parametrize("kind", FILES_OF_10_BITS)
def test_more_than_8_bits_are_not_made_8_bits(kind):
    """An array does not say how many bits its numbers use."""
    data = FILES_OF_10_BITS[kind]
    for format in ("jpeg", "ppm"):
        for side in (8, 256):
            with refused(f"format is {format}, which holds 8 bits; it must be npy"):
                prepare_image(data, PrepareConfig(data=ImagesConfig(), format=format, short_side=side))
    kept = prepare_image(data, PrepareConfig(data=ImagesConfig(), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(kept)), DEEP)
    np.testing.assert_array_equal(decode_with(kept, range=(0, 1023)), decode_with(data))
