"""Metadata of image files: who took a photograph, when, where and with which camera."""

from mpp.data.decoding.kinds import NPY_START, TIFF_STARTS, ZIP_START
from mpp.data.decoding.opening import ignoring_warnings_as_errors, open_with_pil
from mpp.data.decoding.pictures import PPM_HEADER

SHOWS_PIXELS = frozenset(
    (
        *("dpi", "gamma", "srgb", "chromaticity", "icc_profile", "transparency", "background", "aspect", "compression"),
        *(
            "jfif",
            "jfif_version",
            "jfif_unit",
            "jfif_density",
            "adobe",
            "adobe_transform",
            "progressive",
            "progression",
        ),
        *("interlace", "version", "loop", "duration", "timestamp", "default_image", "blend", "disposal", "bbox"),
    )
)
"""Entries of PIL's `info` that say how pixels are shown, and nothing about them."""
SEGMENTS_OF_PIXELS = {"APP0": b"JFIF\0", "APP2": b"ICC_PROFILE\0", "APP14": b"Adobe"}
"""Segments of JPEG that do the same, and how each begins."""
LAST_BYTES = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""Of files behind which nothing is hidden, such as the video of a photograph that moves."""


@ignoring_warnings_as_errors()
def has_metadata(image: bytes) -> bool:
    """Whether an image file holds more than its pixels, such as EXIF, XMP, comments or a preview; also if in doubt."""
    if image.startswith((NPY_START, ZIP_START)) or PPM_HEADER.match(image):
        return False
    if image.startswith(TIFF_STARTS):
        return True  # its tags may be anything: names, descriptions, coordinates
    try:
        with open_with_pil(image) as opened:
            opened.load()  # text may stand behind the pixels of a PNG
            segments = getattr(opened, "applist", ())
            is_plain = (
                opened.format in ("JPEG", "PNG", "WEBP", "GIF", "BMP")
                and opened.info.keys() <= SHOWS_PIXELS
                and image.endswith(LAST_BYTES.get(opened.format, b""))
                and not getattr(opened, "text", None)
                and not getattr(opened, "private_chunks", None)
            )
    except Exception:  # what cannot be looked at
        return True
    return not is_plain or any(
        not content.startswith(SEGMENTS_OF_PIXELS.get(name, b"no such segment")) for name, content in segments
    )
