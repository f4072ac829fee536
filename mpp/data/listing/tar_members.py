"""The files in a tar shard, on this machine or far away: their headers, and their contents where they stand."""

import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import fsspec

from mpp.data.listing.formats import IMAGE_EXTENSIONS, extension_of
from mpp.data.listing.tree import PICTURE_HEAD_BYTES, first_bytes
from mpp.errors import UserError, one_line

MEMBER_PATH = re.compile(r"tar://(?P<shard>.+?)::(?P<start>\d+)\+(?P<size>\d+)::(?P<name>.*)", re.DOTALL)
"""Path of an image in a shard on this machine: where it begins, its size, its name."""
COMPRESSED_STARTS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # of gzip, bzip2, xz, zstd
MOST_END_BYTES = 1 << 20  # zeros at the end of a tar, which fill its last record: mostly 10 kB
MAGIC, MAGIC_OFFSET = b"ustar", 257  # in the header of a member
MAX_LABEL_BYTES = 1 << 16  # a member that is no image and longer is no label


class Member(NamedTuple):
    """A file in a shard."""

    name: str
    start: int
    """Offset in the shard, in bytes."""
    size: int
    content: bytes | None
    """Its bytes, or the first of them; None: not read."""


class MemberHeader(tarfile.TarInfo):
    """A header of a member, which is an error where it is broken: tarfile takes it for the end of the shard."""

    @classmethod
    def frombuf(cls, *arguments: Any) -> tarfile.TarInfo:
        try:
            return super().frombuf(*arguments)
        except tarfile.InvalidHeaderError as error:
            raise tarfile.ReadError(f"{error} of a member") from error


def is_local_shard(shard: str) -> bool:
    """Whether a shard is a file of this machine."""
    return "://" not in shard


def open_shard(shard: str) -> BinaryIO:
    """A shard for reading, on this machine or far away."""
    if is_local_shard(shard):
        return open(shard, "rb")
    system, path = fsspec.url_to_fs(shard)
    return system.open(path)


def read_members(file: BinaryIO, seeks: bool, heads_only: bool = False) -> Iterator[Member]:
    """The files of a shard, in their order. A link is the file that it leads to, where that stands before it.

    Args:
        seeks: whether images can be read later, where they stand. Else they are read now, with all others.
        heads_only: whether the first bytes are enough.
    """
    places: dict[str, tuple[int, int]] = {}  # of the files that links may lead to
    with tarfile.open(None, "r:" if seeks else "r|", file, tarinfo=MemberHeader) as shard:
        for info in shard:
            name = info.name.removeprefix("./")
            if os.path.basename(name).startswith("."):
                continue
            if info.islnk() or info.issym():
                place = places.get(link_target(info, name))
                if place:
                    yield Member(name, *place, None)
            elif info.isreg():
                if seeks:
                    places[posixpath.normpath(name)] = (info.offset_data, info.size)
                yield Member(name, info.offset_data, info.size, read_content(shard, info, seeks, heads_only))
                shard.members.clear()  # it would keep all of them
        if 0 < shard.fileobj.tell() - shard.offset < tarfile.BLOCKSIZE:  # which tarfile takes for the end
            raise tarfile.ReadError("unexpected end of data in the header of a member")
        if seeks:
            refuse_more(file, shard.offset)


def refuse_more(file: BinaryIO, end: int) -> None:
    """Raise ReadError where another tar follows the end of a shard, as `cat` joins two: tarfile reads only the first.

    Args:
        end: offset at which no more members follow.
    """
    file.seek(end)
    behind = file.read(MOST_END_BYTES)
    for block in range(0, len(behind), tarfile.BLOCKSIZE):
        if behind.startswith(MAGIC, block + MAGIC_OFFSET):
            raise tarfile.ReadError(f"another tar begins behind its end (byte {end + block}; `tar -A` joins tars)")


def link_target(info: tarfile.TarInfo, name: str) -> str:
    """The name of the member that a link, called `name`, leads to."""
    if info.islnk():
        return posixpath.normpath(info.linkname)
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))


def read_content(shard: tarfile.TarFile, info: tarfile.TarInfo, seeks: bool, heads_only: bool) -> bytes | None:
    """The bytes of a member: all of a short one, or of any in a shard that is streamed; else the first, or None."""
    if not seeks and not heads_only:
        size = info.size
    elif seeks and extension_of(info.name) in IMAGE_EXTENSIONS:
        return None
    else:
        size = info.size if info.size <= MAX_LABEL_BYTES else PICTURE_HEAD_BYTES
    if not size:
        return None
    content = shard.extractfile(info).read(size)
    if len(content) < min(size, info.size):
        raise tarfile.ReadError(f"unexpected end of data in {info.name.removeprefix('./')}")
    return content


@contextmanager
def naming_damaged(shard: str) -> Iterator[None]:
    """Raise UserError with the name of the shard that is damaged."""
    errors = (tarfile.TarError, EOFError, OSError) if is_local_shard(shard) else (tarfile.TarError, EOFError)
    try:
        yield
    except errors as error:
        if is_local_shard(shard) and first_bytes(shard).startswith(COMPRESSED_STARTS):
            raise UserError(f"{shard} is a compressed tar, whose images cannot be read alone; decompress it") from error
        raise UserError(f"{shard} is damaged: {one_line(error)}; replace it") from error


def member_path(shard: str, member: Member) -> str:
    """The path of an image in a shard: see MEMBER_PATH."""
    return f"tar://{shard}::{member.start}+{member.size}::{member.name}"


def is_member_path(path: str) -> bool:
    """Whether a path is that of an image in a shard."""
    return MEMBER_PATH.fullmatch(path) is not None


def read_member(path: str) -> bytes | None:
    """An image of a shard on this machine, by its path; None: the path is another one."""
    parts = MEMBER_PATH.fullmatch(path)
    if parts is None:
        return None
    with open(parts["shard"], "rb") as file:
        return os.pread(file.fileno(), int(parts["size"]), int(parts["start"]))


def member_name(path: str) -> str:
    """The name of an image of a shard in messages: "train-000.tar: 000123.jpg"; another path as it is."""
    parts = MEMBER_PATH.fullmatch(path)
    return f"{parts['shard']}: {parts['name']}" if parts else path
