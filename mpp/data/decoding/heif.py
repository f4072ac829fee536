"""HEIC by pi-heif (libheif), and AVIF by PIL, or by imagecodecs where it has more than 8 bits (both libavif)."""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpp.config import ImagesConfig
from mpp.data.decoding.boxes import find_inner
from mpp.data.decoding.channels import bands_to_front
from mpp.data.decoding.checks import BANDS_PER_PIXEL, check_size
from mpp.data.decoding.coded import to_stored
from mpp.data.decoding.opening import open_avif
from mpp.data.decoding.orientation import pil_orientation, turn_upright
from mpp.data.decoding.pictures import from_pil
from mpp.data.decoding.wanted import StoredPixels, Wanted
from mpp.errors import UnreadableImage

IMAGE_BOXES = (b"meta", b"iprp", b"ipco")
"""Boxes around the properties of the images."""
ANIMATION_BOXES = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"av01")
"""Those of an animation."""
MORE_THAN_8, TWELVE = 0x40, 0x20  # flags in the third byte of `av1C`, about the bits of an AV1 image
ORIENTATIONS = {None: (1, 8, 3, 6), 0: (4, 5, 2, 7), 1: (2, 7, 4, 5)}
"""By the axis of a mirror (top and bottom, or left and right, change places), and by quarter turns to the left."""


def read_heic(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The primary image of a HEIC file.

    libheif turns it, by the file's own properties. The orientation in its EXIF says the same again, and is not applied.
    """
    file = load_pi_heif().open_heif(data, convert_hdr_to_8bit=False, hdr_to_16bit=False, remove_stride=False)
    image = file[file.primary_index]
    check_size(image.size, config)
    letters, _, depth = image.mode.partition(";")  # "RGB", "RGBA;10", "I;16L"
    bits = int(depth.strip("L") or 8)
    values = heif_values(image, bands=len(letters), dtype=np.dtype(np.uint8 if bits == 8 else np.uint16))
    return to_stored(values, bits, wanted, config, opacity=letters[-1] in "Aa", premultiplied=letters[-1] == "a")


def heif_values(image: Any, bands: int, dtype: np.dtype) -> NDArray:
    """The values (H, W, bands) of an image of pi-heif, whose rows may be longer than its width."""
    rows = np.frombuffer(image.data, np.uint8).reshape(-1, image.stride)  # decodes
    width, height = image.size
    row_bytes = width * bands * dtype.itemsize
    if rows.shape[0] != height or rows.shape[1] < row_bytes:  # as where more bits are announced than there are
        raise UnreadableImage("a HEIC file whose header does not fit its pixels")
    return np.ascontiguousarray(rows[:, :row_bytes]).view(dtype).reshape(height, width, bands)


@cache
def load_pi_heif() -> ModuleType:
    """pi-heif, which decodes in one thread, because loader processes share the cores, and reads no metadata."""
    import pi_heif

    class Picture(pi_heif.heif.BaseImage):
        """An image without metadata. Where the kind of these is no text, pi-heif 1.4 ends the process."""

        def __init__(self, encoded: Any):
            super().__init__(encoded)
            self.info = {"primary": bool(encoded.primary)}

    pi_heif.heif.HeifImage = Picture
    pi_heif.options.DECODE_THREADS = 1
    return pi_heif


def read_avif(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The first image of an AVIF file, turned by the file's own properties."""
    bits = avif_bits(data)
    with open_avif(data) as image:
        check_size(image.size, config)
        if bits == 8:
            return StoredPixels(from_pil(image, config))
        orientation, frames = pil_orientation(image), image.n_frames
        check_size((*image.size, BANDS_PER_PIXEL * frames), config)
    from imagecodecs import avif_decode  # takes a fifth of a second

    values = avif_decode(data)  # all frames: imagecodecs 2026.3 ends the process if asked for only the first
    if frames > 1:
        values = values[0]
    upright = turn_upright(bands_to_front(values), orientation)
    return to_stored(upright.transpose(1, 2, 0), bits, wanted, config, opacity=len(upright) in (2, 4))


def avif_bits(data: bytes) -> int:
    """8, 10 or 12: bits of the values of an AVIF file, the most that one of its images has."""
    flags = 0
    for box in find_inner(data, *IMAGE_BOXES) + find_inner(data, *ANIMATION_BOXES):
        if box.kind == b"av1C":
            flags |= data[box.start + 2]
    if not flags & MORE_THAN_8:
        return 8
    return 12 if flags & TWELVE else 10


def heif_orientation(data: bytes) -> int:
    """The orientation in which a HEIC or AVIF file stores its images, as in EXIF, by its own properties."""
    properties = {box.kind: data[box.start] for box in find_inner(data, *IMAGE_BOXES) if box.kind in (b"irot", b"imir")}
    axis = properties.get(b"imir")
    return ORIENTATIONS[None if axis is None else axis & 1][properties.get(b"irot", 0) & 3]
