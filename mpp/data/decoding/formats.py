"""Kinds of files by their first bytes or the endings of their names."""

import codecs
import re
from typing import NamedTuple

KIND_BYTES = 1024  # first bytes of a file that tell its kind; of images but DICOM 18 are enough
DICOMDIR_UID = rb".{0,64}1\.2\.840\.10008\.1\.3\.10[^.\d]"  # the kind of a table of contents, among the first tags


class Format(NamedTuple):
    """A format of image files."""

    name: str
    start: bytes
    """Regular expression of its first bytes."""
    endings: tuple[str, ...]
    package: str = ""
    """Package that decodes it, as pip knows it; "": PIL or numpy, which are always there."""

    def __str__(self) -> str:
        """A file of it in words."""
        return f"{'an' if self.name[0] in 'AEIOUa' else 'a'} {self.name} file"

    def begins(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of this format."""
        return re.match(self.start, head, re.DOTALL) is not None


DICOM = Format("DICOM", rb".{128}DICM(?!%s)" % DICOMDIR_UID, (".dcm", ".dicom", ".ima"), "pydicom")
JPEG = Format("JPEG", rb"\xff\xd8\xff", (".jpg", ".jpeg", ".jpe", ".jfif"))
PNG = Format("PNG", rb"\x89PNG\r\n\x1a\n", (".png", ".apng"))
PPM = Format("PPM", rb"P[1-6f]\s+[#\d-]", (".ppm", ".pgm", ".pbm", ".pnm"))
WEBP = Format("WebP", rb"RIFF....WEBP", (".webp",))
GIF = Format("GIF", rb"GIF8[79]a", (".gif",))
# The size of its second header: text may begin as BMP does.
BMP = Format("BMP", rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", (".bmp", ".dib"))
TIFF = Format("TIFF", rb"II[*+]\0|MM\0[*+]", (".tif", ".tiff"))  # + is BigTIFF
AVIF = Format("AVIF", rb"....ftyp(avi[fs]|m(if1|sf1)....(....){,8}?avi[fs])", (".avif", ".avifs"))
HEIC = Format("HEIC", rb"....ftyp(hei[cmsx]|hev[cmsx]|mif[12]|msf1)", (".heic", ".heif", ".hif"), "pi-heif")
JPEG_XL = Format("JPEG XL", rb"\0\0\0\x0cJXL \r\n\x87\n|\xff\x0a", (".jxl",), "imagecodecs")
JPEG_2000 = Format(
    "JPEG 2000",
    rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
    (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "imagecodecs",
)
NPY = Format(".npy", rb"\x93NUMPY", (".npy",))
NPZ = Format(".npz", rb"PK\x03\x04", (".npz",))
ARRAY = Format("array", rb"(?!)", ())  # in a table, not in a file
PICTURES = (DICOM, JPEG, PNG, PPM, WEBP, GIF, BMP, TIFF, AVIF, HEIC, JPEG_XL, JPEG_2000)
"""The first that fits a file is its format: the preamble of DICOM may be the beginning of another file."""
ARRAYS = (NPY, NPZ)
IMAGE_ENDINGS = frozenset(ending for form in PICTURES for ending in form.endings)
ARRAY_ENDINGS = frozenset(ending for form in ARRAYS for ending in form.endings)
LFS_POINTER = "a Git LFS pointer"
STAND_INS = {  # instead of images that were not fetched or not written
    "an empty file": rb"\Z",
    "a file of zeros": rb"\0{16,}\Z",
    "an HTML file": rb"\s*<(!doctype html|html|head|body|!--.*<html)\b",
    "an XML file": rb"\s*<\?xml(?!.*<svg[\s>])",
    "a table of contents (DICOMDIR)": rb".{128}DICM" + DICOMDIR_UID,
    LFS_POINTER: rb"version https://git-lfs\.github\.com/",
}
OTHERS = STAND_INS | {
    "a video": rb"....(ftyp|moov)|RIFF....AVI |\x1a\x45\xdf\xa3|\0\0\x01[\xb3\xba]",
    "a PDF file": rb"%PDF-",
    "a Photoshop file": rb"8BPS",
    "an OpenEXR file": rb"\x76\x2f\x31\x01",
    "an HDF5 file": rb"\x89HDF\r\n\x1a\n",
    "a FITS file": rb"SIMPLE  =",
    "an SVG file": rb"\s*<(svg|[?!].*<svg)[\s>]",
}

RARE_JPEGS = {
    "a JPEG-LS file": rb"\xff\xf7\0",
    "a lossless JPEG file": rb"\xff\xc3\0",
    "a JPEG file of 12 bits": rb"\xff[\xc1\xc2]\0.\x0c",
}
"""Kinds of JPEG that no decoder here reads -> regular expression of the frame that such a file has."""


def format_of(head: bytes) -> Format | None:
    """The format of a file that some decoder here reads, by its first bytes; None: it is none."""
    return next((form for form in (*PICTURES, *ARRAYS) if form.begins(head)), None)


def is_image(head: bytes) -> bool:
    """Whether a file is an image that `decode` reads, by its first KIND_BYTES bytes.

    `.npy` and `.npz` files are none: they hold arrays of any kind.
    """
    return format_of(head) in PICTURES


def what_is(head: bytes) -> str:
    """The kind of a file for a message, such as "a JPEG 2000 file" or "a Git LFS pointer"; "": unknown.

    Args:
        head: its first KIND_BYTES bytes, or all of a shorter file.
    """
    head = head[:KIND_BYTES].removeprefix(codecs.BOM_UTF8)
    if form := format_of(head):
        return str(form)
    return next((kind for kind, start in OTHERS.items() if re.match(start, head, re.DOTALL | re.IGNORECASE)), "")
