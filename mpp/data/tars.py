"""Tar shards as WebDataset has them: neighbours whose names are the same up to their first dot are one sample.

The image of a sample is whichever member is a picture, and its label the member `cls`. On this machine images are read
where they stand in their shard; streams have their bytes.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import datasets
import fsspec

from mpp.config import ImagesConfig
from mpp.data.data_path import is_url
from mpp.data.decoding.formats import ARRAY_ENDINGS, IMAGE_ENDINGS, is_image
from mpp.data.folder import Tree, ending_of
from mpp.data.listing import IMAGE, LABEL, Listing
from mpp.data.lists import add_folders, to_label
from mpp.errors import UserError, one_line
from mpp.runtime.messages import printable, progress_bar, shortened

MEMBER_PATH = re.compile(r"tar://(?P<shard>.+?)::(?P<start>\d+)\+(?P<size>\d+)::(?P<name>.*)", re.DOTALL)
"""Path of an image in a shard on this machine: where it begins, its size, its name."""
LABEL_ENDINGS = ("cls", "label")
"""Endings of the member that is a sample's label, unless `data.label_column` names another."""
MOST_END_BYTES = 1 << 20  # zeros at the end of a tar, which fill its last record: mostly 10 kB


class Member(NamedTuple):
    """A file in a shard."""

    name: str
    start: int
    """Offset in the shard, in bytes."""
    size: int
    content: bytes | None
    """None: it is named as an image, which can be read where it stands."""

    @property
    def is_picture(self) -> bool:
        """Whether it is an image, by its ending, or else by its first bytes."""
        return is_named_as_image(self.name) or (not ending_of(self.name) and is_image(self.content))


class Sample(NamedTuple):
    """The members of one image."""

    name: str
    members: dict[str, Member]
    """By their endings."""

    def picture(self, config: ImagesConfig) -> Member | None:
        """The image: the only picture, that of the ending `data.image_column`, or the one without a dot in its ending.

        Returns:
            None: there is none.
        Raises:
            UserError: there are several.
        """
        pictures = {end: member for end, member in self.members.items() if member.is_picture}
        if config.image_column not in (None, IMAGE):
            return pictures.get(config.image_column.lower())
        chosen = {end: member for end, member in pictures.items() if "." not in end} or pictures
        if len(chosen) > 1:
            problem = f"sample {self.name} has several pictures ({shortened(sorted(chosen))})"
            rule = "names are cut at their first dot; rename the members, or set data.image_column to an ending"
            raise UserError(f"{problem}: {rule}")
        return next(iter(chosen.values()), None)

    def label(self, column: str | None) -> Any:
        """The label as text: the member with the ending `column`, or that key of its JSON; None: it has none.

        Raises:
            UserError: its JSON cannot be read.
        """
        texts = {end: member.content for end, member in self.members.items() if not member.is_picture}
        for ending in LABEL_ENDINGS if column is None else (column.lower(),):
            if ending in texts:
                return texts[ending].decode(errors="replace").strip() or None
        if column is None or "json" not in texts:
            return None
        try:
            return to_label(json.loads(texts["json"]).get(column))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.name}.json cannot be read: {one_line(error)}") from error


def read_members(shard: str, streaming: bool) -> Iterator[Member]:
    """The files of a shard, in their order; hidden ones are none.

    Raises:
        TarError: the shard is damaged, or has links or sparse files.
    """
    with (
        fsspec.open(shard) if is_url(shard) else open(shard, "rb") as file,
        tarfile.open(None, "r|" if streaming else "r:", file) as tar,
    ):
        for info in tar:
            name = info.name.removeprefix("./")
            if info.islnk() or info.issym() or info.issparse():
                advice = "pack files by tar --dereference --hard-dereference, without --sparse"
                raise tarfile.ReadError(f"{name} is a link, or sparse; {advice}")
            if info.isreg() and not os.path.basename(name).startswith("."):
                content = None
                if streaming or not is_named_as_image(name):
                    content = tar.extractfile(info).read()
                    if len(content) < info.size:
                        raise tarfile.ReadError(f"unexpected end of data in {name}")
                yield Member(name, info.offset_data, info.size, content)
            tar.members.clear()  # it would keep all of them
        if 0 < tar.fileobj.tell() - tar.offset < tarfile.BLOCKSIZE:  # which tarfile takes for the end
            raise tarfile.ReadError("unexpected end of data in the header of a member")
        if tar.fileobj.read(MOST_END_BYTES).strip(b"\0"):  # a broken header is the end for tarfile, too
            problem = f"more follows its end at byte {tar.offset}, or a header is broken there"
            raise tarfile.ReadError(f"{problem} (tar -A joins tars, cat does not)")


def is_named_as_image(name: str) -> bool:
    """Whether a member is a picture or an array by its ending."""
    return os.path.splitext(name)[1].lower() in IMAGE_ENDINGS | ARRAY_ENDINGS


def sample_name(member: Member) -> str:
    """The name of a member up to the first dot, with its folders."""
    folder, base = os.path.split(member.name)
    return os.path.join(folder, base.partition(".")[0])


def read_samples(shard: str, streaming: bool = False) -> Iterator[Sample]:
    """The samples of a shard, in its order.

    Args:
        streaming: images have their bytes.
    Raises:
        UserError: the shard is damaged, or members of a sample are not next to each other.
    """
    passed: set[str] = set()
    damages = (tarfile.TarError, EOFError, *(() if is_url(shard) else (OSError,)))  # else an outage
    try:
        for name, members in groupby(read_members(shard, streaming), sample_name):
            sample = Sample(name, {})
            for member in members:
                ending = member.name.removeprefix(name).removeprefix(".").lower()
                if name in passed or ending in sample.members:
                    rule = "must be next to each other (tar --sort=name), and have different endings"
                    raise tarfile.ReadError(f"{member.name}: the members of a sample {rule}")
                sample.members[ending] = member
            passed.add(name)
            yield sample
    except damages as error:
        advice = "replace it, or decompress it if it is a compressed tar"
        raise UserError(f"{shard} cannot be read: {one_line(error)}; {advice}") from error


# --- the images of shards ---


def list_tars(shards: dict[str, list[str]], config: ImagesConfig) -> Listing:
    """The images of shards on this machine, by the headers of their members; labels are read.

    Without labels, the folders in the shards are splits and classes, as if the shards were unpacked.

    Args:
        shards: split -> files.
    Raises:
        UserError: a shard is damaged, or its samples follow no rule.
    """
    endings = label_endings(config)
    columns: dict[str, dict[str, Any]] = {name: {} for name in endings}
    splits: dict[str, str | None] = {}
    folders: dict[str, str] = {}
    members: set[str] = set()  # their endings
    tree = Tree("")
    files = [(split, shard) for split, of_split in shards.items() for shard in of_split]
    for split, shard in progress_bar(files, desc="indexing shards", unit=" shards", delay=1, leave=False):
        for sample in read_samples(shard):
            members |= sample.members.keys()
            picture = sample.picture(config)
            if picture is None:
                tree.leave_out("samples without a picture", f"{os.path.basename(shard)}: {sample.name}")
                continue
            path = printable(f"tar://{shard}::{picture.start}+{picture.size}::{picture.name}")
            splits[path] = split
            folders[path] = picture.name[: picture.name.rfind("/") + 1]
            for name, ending in endings.items():
                columns[name][path] = sample.label(ending)
    if not splits:
        setting = f"{config.group_name}.image_column is {config.image_column}"
        raise UserError(f"{config.path} holds no images ({setting}); its shards hold {shortened(sorted(members))}")
    if {*shards} == {"train"}:
        splits = {}  # folders inside may say otherwise
    else:
        folders = {path: f"{splits[path]}/{folder}" for path, folder in folders.items()}
    labels = columns[config.label_column or LABEL]
    if not config.label_column and all(label is None for label in labels.values()):
        labels.clear()
    splits = add_folders(folders, splits, labels, tree, config)
    return Listing(splits, columns, image_column=config.image_column or IMAGE, lines=tree.lines())


def label_endings(config: ImagesConfig) -> dict[str, str | None]:
    """Columns of labels -> ending of the member, or key of its JSON; None: the usual endings."""
    endings = {config.label_column or LABEL: config.label_column, config.eval_label_column: config.eval_label_column}
    return {column: ending for column, ending in endings.items() if column}


def stream_tars(shards: list[str], config: ImagesConfig) -> datasets.IterableDataset:
    """The samples of shards as a stream of {image, label}: a shard each, images with their bytes."""
    features = {config.image_column or IMAGE: datasets.Image(decode=False)}
    features |= {name: datasets.Value("string") for name in label_endings(config)}
    arguments = {"shards": shards, "config": config}
    return datasets.IterableDataset.from_generator(
        stream_rows, features=datasets.Features(features), gen_kwargs=arguments
    )


def stream_rows(shards: list[str], config: ImagesConfig) -> Iterator[dict[str, Any]]:
    """The rows of some shards. A sample without a picture is a row without an image, which is unreadable."""
    for shard in shards:
        for sample in read_samples(shard, streaming=True):
            picture = sample.picture(config)
            image = {"bytes": picture.content, "path": printable(picture.name)} if picture else None
            labels = {name: sample.label(ending) for name, ending in label_endings(config).items()}
            yield {config.image_column or IMAGE: image, **labels}


def read_member(path: str) -> bytes:
    """An image of a shard on this machine, by its path."""
    parts = MEMBER_PATH.fullmatch(path)
    with open(parts["shard"], "rb") as file:
        return os.pread(file.fileno(), int(parts["size"]), int(parts["start"]))


def shard_of(path: str) -> str:
    """The shard of an image in one; another path as it is."""
    parts = MEMBER_PATH.fullmatch(path)
    return parts["shard"] if parts else path


def member_name(path: str) -> str:
    """The name of an image of a shard in messages: "train-000.tar: 000123.jpg"; another path as it is."""
    parts = MEMBER_PATH.fullmatch(path)
    return f"{parts['shard']}: {parts['name']}" if parts else path
