"""Images that are stored turned or mirrored, with a tag that says so: EXIF's orientation, 1 to 8."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpp.data.decoding.kinds import PNG_START, is_tiff
from mpp.data.decoding.opening import ignoring_warnings_as_errors, open_with_pil, open_with_tifffile

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


@ignoring_warnings_as_errors()
def stored_orientation(image: bytes | NDArray) -> int:
    """The orientation in which an image is stored, and from which `read_values` and `read_mask` turn it upright."""
    if isinstance(image, np.ndarray):
        return UPRIGHT
    if image.startswith(PNG_START) and not any(chunk in image for chunk in PNG_ORIENTATION_CHUNKS):
        return UPRIGHT  # PIL would decode the whole PNG to find none
    try:
        if is_tiff(image):
            with open_with_tifffile(image) as file:
                return file.pages[0].tags.valueof(ORIENTATION_TAG, UPRIGHT)
        with open_with_pil(image) as opened:
            return pil_orientation(opened)
    except Exception:  # decoding the image gives the reason
        return UPRIGHT
