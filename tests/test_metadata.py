"""`mpp prepare` writes pixels alone: no EXIF with a place, no comment, no preview, no tag of a scan."""

import io
import zipfile
import zlib

import numpy as np
import pytest
from conftest import encoded, picture
from dicom_files import SECRETS, dicom
from image_files import npy, npz, tiff
from PIL import Image, PngImagePlugin

from mpp.config import ImagesConfig, PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.data.prepared_image import prepare_image

SECRET = "Mustermann, Hauptstr. 5"
RGB = picture(0)
CAMERA_OWNER, GPS_FOLDER, LATITUDE, DESCRIPTION, ORIENTATION = 0xA430, 0x8825, 2, 270, 274


def exif(orientation: int = 1) -> Image.Exif:
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


def private_chunk() -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    chunks.add(b"naMe", SECRET.encode())
    return chunks


JPEG, PNG, WEBP = (encoded(RGB, "JPEG"), encoded(RGB, "PNG"), encoded(RGB, "WEBP", lossless=True))
GIF, BMP, PPM = (encoded(RGB, format) for format in ("GIF", "BMP", "PPM"))
JFIF_END = 20  # of PIL's JPEG
PNG_HEADER_END = 33


def segment(marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment."""
    return JPEG[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + JPEG[2:]


def jfif_preview() -> bytes:
    """A JPEG whose first segment holds a preview of 3 x 3 pixels."""
    preview = SECRET.encode().ljust(27)
    numbers = JPEG[6 : JFIF_END - 2] + bytes([3, 3])
    return JPEG[:4] + (2 + len(numbers) + len(preview)).to_bytes(2, "big") + numbers + preview + JPEG[JFIF_END:]


def chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk."""
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    whole = len(content).to_bytes(4, "big") + kind + content + checksum
    return PNG[:PNG_HEADER_END] + whole + PNG[PNG_HEADER_END:]


def webp_chunk(kind: bytes) -> bytes:
    """A WebP with one more chunk."""
    content = SECRET.encode().ljust(24)
    parts = WEBP[8:] + kind + len(content).to_bytes(4, "little") + content
    return b"RIFF" + len(parts).to_bytes(4, "little") + parts


def gif_of_two() -> bytes:
    """An animated GIF with a comment before its second image."""
    second = Image.fromarray(255 - RGB)
    whole = encoded(Image.fromarray(RGB), "GIF", save_all=True, append_images=[second])
    comment = b"!\xfe" + bytes([len(SECRET)]) + SECRET.encode() + b"\0"
    place = whole.rindex(b"!\xf9\x04")
    return whole[:place] + comment + whole[place:]


def animated_png() -> bytes:
    """An animated PNG with an owner's name."""
    second = Image.fromarray(255 - RGB)
    return encoded(Image.fromarray(RGB), "PNG", save_all=True, append_images=[second], pnginfo=png_text())


def npz_with_comment() -> bytes:
    """A file of numpy's with a comment of its archive."""
    file = io.BytesIO(npz(RGB))
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = SECRET.encode()
    return file.getvalue()


TELLING = {
    "JPEG, EXIF": encoded(RGB, "JPEG", exif=exif()),
    "JPEG, turned": encoded(RGB, "JPEG", exif=exif(6)),
    "JPEG, comment": encoded(RGB, "JPEG", comment=SECRET),
    "JPEG, XMP": segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET.encode()),
    "JPEG, Photoshop": segment(0xED, b"Photoshop 3.0\0" + SECRET.encode()),
    "JPEG, preview": segment(0xE0, b"JFXX\0" + SECRET.encode()),
    "JPEG, a maker's segment": segment(0xE2, b"FPXR\0" + SECRET.encode()),
    "JPEG, a video behind": JPEG + SECRET.encode(),
    "JPEG, a second JPEG behind": JPEG + encoded(RGB, "JPEG", exif=exif()),
    "JPEG, a preview in JFIF": jfif_preview(),
    "JPEG, text behind Adobe's numbers": segment(0xEE, b"Adobe\0\x64\0\0\0\0\1" + SECRET.encode()),
    "JPEG, colour profile": encoded(RGB, "JPEG", icc_profile=SECRET.encode()),
    "JPEG, an unknown segment": segment(0xE9, SECRET.encode()),
    "PNG, EXIF": encoded(RGB, "PNG", exif=exif(3)),
    "PNG, text": encoded(RGB, "PNG", pnginfo=png_text()),
    "PNG, private": encoded(RGB, "PNG", pnginfo=private_chunk()),
    "PNG, behind": PNG + SECRET.encode(),
    "PNG, a second PNG behind": PNG + encoded(RGB, "PNG", pnginfo=png_text()),
    "PNG, an unknown public chunk": chunk(b"sAFe", SECRET.encode()),
    "PNG, palette's name": chunk(b"sPLT", SECRET.encode() + b"\0\x08" + bytes(6)),
    "PNG, calibration": chunk(b"pCAL", SECRET.encode() + b"\0" + bytes(8) + b"\0\2m\x001\x001"),
    "PNG, colour profile": chunk(b"iCCP", SECRET.encode() + b"\0\0" + zlib.compress(b"a profile")),
    "PNG, too long a chunk of pixels' size": chunk(b"pHYs", bytes(9) + SECRET.encode()),
    "PNG, animated": animated_png(),
    "WebP, EXIF": encoded(RGB, "WEBP", exif=exif(), lossless=True),
    "WebP, XMP": encoded(RGB, "WEBP", xmp=SECRET.encode(), lossless=True),
    "GIF, comment": encoded(RGB, "GIF", comment=SECRET.encode()),
    "WebP, turned": encoded(RGB, "WEBP", exif=exif(6), lossless=True),
    "WebP, an unknown chunk": webp_chunk(b"NAME"),
    "WebP, behind": WEBP + SECRET.encode(),
    "WebP, behind within its size": webp_chunk(b"JUNK"),
    "GIF, behind": GIF + SECRET.encode(),
    "GIF, a comment in its second image": gif_of_two(),
    "BMP, behind": BMP + SECRET.encode(),
    "PPM, behind": PPM + SECRET.encode(),
    "npy, behind": npy(RGB) + SECRET.encode(),
    "npy, header": npy(RGB).replace(b", }".ljust(40), b", } # " + SECRET.encode().ljust(34)),
    "npz": npz_with_comment(),
    "TIFF": tiff(RGB, description=SECRET),
    "TIFF, deep": tiff(RGB.astype(np.uint16) * 257, description=SECRET, photometric="rgb"),
    "PPM, comment": b"P6\n# " + SECRET.encode() + b"\n2 2\n255\n" + bytes(12),
}


@pytest.mark.parametrize("kind", TELLING)
def test_metadata_is_dropped_and_pixels_are_not(kind):
    data = TELLING[kind]
    assert SECRET.encode() in data or b"Mustermann" in data
    config = PrepareConfig(data=ImagesConfig())
    prepared = prepare_image(data, config)
    assert b"Mustermann" not in prepared
    np.testing.assert_array_equal(read_values(prepared, config.data), read_values(data, config.data))


PLAIN = {
    "JPEG": encoded(RGB, "JPEG"),
    "JPEG, progressive": encoded(RGB, "JPEG", progressive=True, dpi=(72, 72)),
    "JPEG, CMYK": encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"),
    "PNG": encoded(RGB, "PNG", dpi=(72, 72)),
    "PNG, transparent": encoded(Image.fromarray(RGB).quantize(8), "PNG", transparency=0),
    "PNG, grey": encoded(RGB[..., 0], "PNG"),
    "WebP": encoded(RGB, "WEBP"),
    "WebP, opacity": encoded(np.concatenate([RGB, RGB[..., :1]], -1), "WEBP"),
    "WebP, lossless": WEBP,
    "GIF": encoded(RGB, "GIF"),
    "GIF, transparent": encoded(Image.fromarray(RGB).quantize(8), "GIF", transparency=0),
    "BMP": encoded(RGB, "BMP"),
    "BMP, grey": encoded(RGB[..., 0], "BMP"),
    "PPM": encoded(RGB, "PPM"),
    "npy": npy(RGB),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_small_files_without_metadata_stay_to_the_byte(kind):
    assert prepare_image(PLAIN[kind], PrepareConfig(data=ImagesConfig())) == PLAIN[kind]


def test_a_time_goes():
    dated = chunk(b"tIME", bytes([7, 234, 1, 2, 3, 4, 5]))
    assert prepare_image(dated, PrepareConfig(data=ImagesConfig())) == PNG


def test_what_is_left_is_the_file_without_them():
    """It is not coded anew, which a photograph as PNG would take ten times the space for."""
    photograph = encoded(RGB, "JPEG", exif=exif(), icc_profile=b"a profile", comment=SECRET)
    drawing = encoded(RGB, "PNG", exif=exif(), pnginfo=png_text())
    assert prepare_image(photograph, PrepareConfig(data=ImagesConfig())) == JPEG
    assert prepare_image(drawing, PrepareConfig(data=ImagesConfig())) == PNG
    web = prepare_image(TELLING["WebP, EXIF"], PrepareConfig(data=ImagesConfig()))
    assert (web[8:12], web.count(b"VP8L"), len(web) - 8) == (b"WEBP", 1, int.from_bytes(web[4:8], "little"))


@pytest.mark.parametrize("format", ["jpeg", "ppm", "npy"])
def test_scans_are_pixels_alone(format):
    data = dicom(RGB)
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(), format=format))
    assert not any(secret.encode() in prepared for secret in SECRETS)
    assert SECRETS[0].encode() in data
    difference = read_values(prepared, ImagesConfig()).astype(int) - RGB.transpose(2, 0, 1)
    assert np.abs(difference).mean() < (4 if format == "jpeg" else 1e-9)


def test_units_of_scans_are_kept():
    hounsfield = np.arange(-1024, 976).reshape(40, 50)
    data = dicom(
        (hounsfield + 1024).astype(np.uint16), RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11
    )
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(channels=1), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(prepared))[..., 0], hounsfield)
