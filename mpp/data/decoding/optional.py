"""Formats whose decoder may be absent: how a file of each begins, and the package that reads it."""

from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from mpp.errors import MissingDecoder

DICOMDIR_UID = rb".{0,64}1\.2\.840\.10008\.1\.3\.10[^.\d]"  # the kind of a table of contents, among the first tags


class OptionalFormat(NamedTuple):
    """A format of pictures."""

    name: str
    start: bytes
    """A regular expression of its first bytes."""
    extensions: tuple[str, ...]
    package: str
    """The package that decodes it, as pip knows it."""
    module: str
    """The module that decodes: the package itself, or one in it that not all releases have."""
    lowest_version: str = ""
    """The lowest version that decodes these files, where lower ones are about: ">=11.3"."""
    is_lossy: bool = False
    """Whether numbers may change in it, and a file does not say whether they have."""

    @property
    def kind(self) -> str:
        """A file of it in words."""
        return f"{'an' if self.name[0] in 'AEIOU' else 'a'} {self.name} file"


DICOM = OptionalFormat("DICOM", rb".{128}DICM(?!%s)" % DICOMDIR_UID, (".dcm", ".dicom", ".ima"), "pydicom", "pydicom")
AVIF = OptionalFormat(
    "AVIF",
    rb"....ftyp(avi[fs]|m(if1|sf1)....(....){,8}?avi[fs])",
    (".avif", ".avifs"),
    "pillow",
    "PIL._avif",
    ">=11.3",
    is_lossy=True,
)
HEIC = OptionalFormat(
    "HEIC",
    rb"....ftyp(hei[cmsx]|hev[cmsx]|mif[12]|msf1)",
    (".heic", ".heif", ".hif"),
    "pi-heif",
    "pi_heif",
    is_lossy=True,
)
JPEG_XL = OptionalFormat(
    "JPEG XL",
    rb"\0\0\0\x0cJXL \r\n\x87\n|\xff\x0a",
    (".jxl",),
    "imagecodecs",
    "imagecodecs._jpegxl",
    is_lossy=True,
)
JPEG_2000 = OptionalFormat(
    "JPEG 2000",
    rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
    (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "imagecodecs",
    "imagecodecs._jpeg2k",
)
OPTIONAL_FORMATS = (DICOM, AVIF, HEIC, JPEG_XL, JPEG_2000)
"""The first that fits a file is its format: the preamble of DICOM may be the beginning of another file."""
OPTIONAL_EXTENSIONS = {extension: form for form in OPTIONAL_FORMATS for extension in form.extensions}


def missing_package(form: OptionalFormat) -> str | None:
    """The package to install before files of a format can be read; None: nothing is missing."""
    return None if has_module(form.module) else form.package + form.lowest_version


@cache
def has_module(name: str) -> bool:
    """Whether a package, or a module in one, is installed; nothing is imported."""
    package, _, inner = name.partition(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None
    return PathFinder.find_spec(name, spec.submodule_search_locations) is not None


def how_to_install(form: OptionalFormat) -> str:
    """The package that is missing, and how to install it: "need pi-heif: pip install pi-heif"."""
    package = missing_package(form)
    quoted = f'"{package}"' if ">" in package else package  # a shell takes > for a file
    return f"need {package}: pip install {quoted}"


def require_package(form: OptionalFormat) -> None:
    """Raise MissingDecoder where the package that reads files of a format is not installed."""
    if missing_package(form):
        raise MissingDecoder(f"{form.name} files {how_to_install(form)}")


def describe_packages() -> dict[str, str]:
    """Format -> the package that reads it, with its version, or how to install it."""
    described = {}
    for form in OPTIONAL_FORMATS:
        try:
            is_missing = missing_package(form) is not None
            described[form.name] = how_to_install(form) if is_missing else f"{form.package} {version(form.package)}"
        except PackageNotFoundError:  # installed without its metadata
            described[form.name] = form.package
    return described
