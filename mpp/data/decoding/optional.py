"""Kinds of files whose decoder may be absent: the package that has it, and the command that installs it."""

from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from mpp.errors import MissingDecoder


class Package(NamedTuple):
    """A package that decodes a kind of files."""

    name: str
    """As pip knows it."""
    module: str
    """The module that decodes: the package itself, or one in it that not all releases have."""
    least: str = ""
    """The lowest version that decodes these files, where lower ones are about: ">=11.3"."""


PACKAGES = {
    "HEIC": Package("pi-heif", "pi_heif"),
    "DICOM": Package("pydicom", "pydicom"),
    "AVIF": Package("pillow", "PIL._avif", ">=11.3"),
    "JPEG XL": Package("imagecodecs", "imagecodecs._jpegxl"),
    "JPEG 2000": Package("imagecodecs", "imagecodecs._jpeg2k"),
}
"""Packages by the kind of file that they read."""
OPTIONAL_EXTENSIONS = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIC"),
    **dict.fromkeys((".dcm", ".dicom", ".ima"), "DICOM"),
    **dict.fromkeys((".avif", ".avifs"), "AVIF"),
    ".jxl": "JPEG XL",
    **dict.fromkeys((".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"), "JPEG 2000"),
}
"""Extension -> kind of file."""


def missing_package(kind: str) -> str | None:
    """The package to install before files of a kind can be read; None: nothing is missing."""
    package = PACKAGES.get(kind)
    if package is None or has_module(package.module):
        return None
    return package.name + package.least


@cache
def has_module(name: str) -> bool:
    """Whether a package, or a module in one, is installed; nothing is imported."""
    package, _, inner = name.partition(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None
    return PathFinder.find_spec(name, spec.submodule_search_locations) is not None


def advice(kind: str) -> str:
    """The package that is missing, and how to install it: "need pi-heif: pip install pi-heif"."""
    package = missing_package(kind)
    quoted = f'"{package}"' if ">" in package else package  # a shell takes > for a file
    return f"need {package}: pip install {quoted}"


def require_package(kind: str) -> None:
    """Raise MissingDecoder where the package that reads files of a kind is not installed."""
    if missing_package(kind):
        raise MissingDecoder(f"{kind} files {advice(kind)}")


def describe_packages() -> dict[str, str]:
    """Kind of file -> the package that reads it, with its version, or how to install it."""
    described = {}
    for kind, package in PACKAGES.items():
        try:
            described[kind] = advice(kind) if missing_package(kind) else f"{package.name} {version(package.name)}"
        except PackageNotFoundError:  # installed without its metadata
            described[kind] = package.name
    return described
