"""Images that are stored turned or mirrored, with a tag that says so: EXIF's orientation, 1 to 8."""

from numpy.typing import NDArray
from PIL import Image

from mpp.data.decoding.opening import open_with_pil

ORIENTATION_TAG = 274  # of TIFF and of EXIF
UPRIGHT = 1
TURNED = range(2, 9)  # orientations of images that are not stored upright
PNG_ORIENTATION_CHUNKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


def turn_upright(pixels: NDArray, orientation: int) -> NDArray:
    """Pixels (n, H, W), stored in this orientation, upright; unchanged if it is none of 1 to 8. A view."""
    if orientation not in TURNED:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(1, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels


def pil_orientation(image: Image.Image) -> int:
    """The orientation that PIL finds in EXIF, anywhere in the file, or else in XMP, as PIL.ImageOps.exif_transpose."""
    try:
        return image.getexif().get(ORIENTATION_TAG, UPRIGHT)
    except Exception:  # a broken tag does not make the image unreadable
        return UPRIGHT


def png_orientation(data: bytes) -> int:
    """The orientation in which a PNG is stored."""
    if not any(chunk in data for chunk in PNG_ORIENTATION_CHUNKS):
        return UPRIGHT  # PIL would decode the whole PNG to find none
    with open_with_pil(data) as image:
        return pil_orientation(image)
