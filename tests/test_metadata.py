"""`mpp prepare` writes pixels alone: no EXIF with a place, no comment, no preview, no tag of a scan."""

import io
from pathlib import Path

import numpy as np
import pytest
from conftest import encoded, picture, refused
from dicom_files import SECRETS, dicom
from image_files import JFIF_END, decode_with, npy, packed_tiff, segment
from numpy.testing import assert_array_equal
from PIL import Image

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


def with_segment(marker: int, content: bytes) -> bytes:
    return JPEG[:2] + segment(marker, content) + JPEG[2:]


JFIF_PREVIEW = segment(0xE0, JPEG[6 : JFIF_END - 2] + bytes([3, 3]) + NOTE.ljust(27))  # of 3 x 3 pixels
TELLING = {
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
    "HEIC, turned": (Path(__file__).parent / "coded" / "turned_6.heic").read_bytes(),
    "npy, header": npy(RGB).replace(b", }".ljust(40), b", } # " + NOTE.ljust(34)),
    "DICOM": dicom(RGB),
}


@pytest.mark.parametrize("data", TELLING.values(), ids=TELLING)
def test_metadata_is_dropped_and_pixels_are_not(data):
    telling = [*map(str.encode, SECRETS), b"Exif"]
    assert any(word in data for word in telling)
    for format in ("jpeg", "ppm", "npy"):
        prepared = prepare_image(data, PrepareConfig(format=format))
        assert not any(word in prepared for word in telling)
        assert_array_equal(read_values(prepared, ImagesConfig()), read_values(data, ImagesConfig()))


@pytest.mark.parametrize("options", [{}, {"progressive": True, "dpi": (72, 72)}])
def test_small_jpegs_without_metadata_stay_to_the_byte(options):
    data = encoded(RGB, "JPEG", **options)
    assert prepare_image(data, PrepareConfig()) == data


def test_bands_that_are_chosen_of_a_plain_jpeg_are_those_of_the_shard():
    data = ImagesConfig(bands=(3, 2, 1))
    prepared = prepare_image(JPEG, PrepareConfig(data=data))
    assert_array_equal(read_values(prepared, ImagesConfig()), read_values(JPEG, data))


def test_more_than_8_bits_are_not_made_8_bits():
    """An array does not say how many bits its numbers use."""
    deep = np.random.default_rng(0).integers(0, 1024, (40, 48, 3), dtype=np.uint16)
    data = packed_tiff(deep, 10)
    for format in ("jpeg", "ppm"):
        for side in (8, 256):
            with refused(f"format is {format}, which holds 8 bits; it must be npy"):
                prepare_image(data, PrepareConfig(format=format, short_side=side))
    kept = prepare_image(data, PrepareConfig(format="npy"))
    assert_array_equal(np.load(io.BytesIO(kept)), deep)
    assert_array_equal(decode_with(kept, range=(0, 1023)), decode_with(data))
