"""The kind of a file by its first bytes: a picture, a file that must be converted first, or no image."""

import codecs
import re

from mpp.data.decoding.optional import DICOMDIR_UID, OPTIONAL_FORMATS, OptionalFormat

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # + is BigTIFF
NPY_START = b"\x93NUMPY"
ZIP_START = b"PK\x03\x04"  # of .npz, too
PNG_START = b"\x89PNG\r\n\x1a\n"
JPEG_START = b"\xff\xd8\xff"
PICTURE_STARTS = {  # of the files that a decoder here reads
    "a JPEG file": re.escape(JPEG_START),
    "a PNG file": re.escape(PNG_START),
    "a WebP file": rb"RIFF....WEBP",
    "a GIF file": rb"GIF8[79]a",
    "a BMP file": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",  # the size of its second header: text may begin so
    "a TIFF file": b"|".join(map(re.escape, TIFF_STARTS)),
    "a PPM file": rb"P[1-6f]\s+[#\d-]",
    **{form.kind: form.start for form in OPTIONAL_FORMATS},
}
CONVERTIBLE_STARTS = {
    "a Canon raw file": rb"....ftypcrx ",
    "an MP4 or QuickTime video": rb"....(ftyp|moov)",
    "a Matroska or WebM video": rb"\x1a\x45\xdf\xa3",
    "an AVI video": rb"RIFF....AVI ",
    "an MPEG video": rb"\0\0\x01[\xb3\xba]",
    "a PDF file": rb"%PDF-",
    "a Photoshop file": rb"8BPS",
    "an OpenEXR file": rb"\x76\x2f\x31\x01",
    "an HDF5 file": rb"\x89HDF\r\n\x1a\n",
    "a FITS file": rb"SIMPLE  =",
    "a gzip file": rb"\x1f\x8b",
    "an SVG file": rb"\s*<(svg|[?!].*<svg)[\s>]",
}
LFS_POINTER = "a Git LFS pointer"
STAND_IN_STARTS = {  # instead of images that were not fetched or not written
    "an empty file": rb"\Z",
    "a file of zeros": rb"\0{16,}\Z",
    "an HTML file": rb"\s*<(!doctype html|html|head|body|!--.*<html)\b",
    "an XML file": rb"\s*<\?xml(?!.*<svg[\s>])",
    "a table of contents (DICOMDIR)": rb".{128}DICM" + DICOMDIR_UID,
    LFS_POINTER: rb"version https://git-lfs\.github\.com/",
}
ARRAY_STARTS = {"a .npy file": re.escape(NPY_START), "a .npz file": re.escape(ZIP_START)}
KIND_BYTES = 1024  # first bytes of a file that tell its kind
ANY_PICTURE = re.compile(b"|".join(PICTURE_STARTS.values()), re.DOTALL)
OTHER_KINDS = {
    kind: re.compile(start, re.DOTALL | re.IGNORECASE) for kind, start in (STAND_IN_STARTS | CONVERTIBLE_STARTS).items()
}
READ_KINDS = {kind: re.compile(start, re.DOTALL) for kind, start in (PICTURE_STARTS | ARRAY_STARTS).items()}
ANY_OPTIONAL = re.compile(b"|".join(form.start for form in OPTIONAL_FORMATS), re.DOTALL)


def is_tiff(image: bytes) -> bool:
    """Whether a file is a TIFF. A DICOM file may begin as one, and be read as one, too."""
    return image.startswith(TIFF_STARTS) and optional_format(image) is None


def is_picture(head: bytes) -> bool:
    """Whether a file is a picture that `decode` reads, by its first bytes, of which 18 are enough, and 256 of DICOM.

    `.npy` and `.npz` are none: they hold arrays of any kind.
    """
    return ANY_PICTURE.match(head) is not None


def optional_format(head: bytes) -> OptionalFormat | None:
    """The format of a picture whose decoder may be absent, by its first bytes; None: it is of another one."""
    if not ANY_OPTIONAL.match(head):
        return None
    return next(form for form in OPTIONAL_FORMATS if re.match(form.start, head, re.DOTALL))


def kind_of_file(head: bytes) -> str | None:
    """The kind of a file, such as "a JPEG 2000 file"; None: unknown.

    Args:
        head: its first KIND_BYTES bytes, or all of a shorter file.
    """
    start = head[:KIND_BYTES].removeprefix(codecs.BOM_UTF8)
    if form := optional_format(start):  # some begin as videos do
        return form.kind
    for kind, pattern in (OTHER_KINDS | READ_KINDS).items():
        if pattern.match(start):
            return kind
    return None


def unidentified(data: bytes) -> str:
    """The reason why no decoder reads a file."""
    kind = kind_of_file(data)
    if kind is None:
        return "no image file of a known sort"
    if kind in STAND_IN_STARTS:
        return f"{kind} instead of an image"
    if kind in CONVERTIBLE_STARTS:
        return f"{kind}, which mpp does not read; convert it to PNG or TIFF"
    return f"{kind} whose header cannot be read"
