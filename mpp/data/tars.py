"""Tar shards as WebDataset has them: members whose names are the same up to their first dot are one sample.

The image of a sample is whichever member is a picture, and its label the member `cls`. On this machine images are read
where they stand in their shard; shards that are far away are streamed.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

import datasets
import fsspec

from mpp.config import ImagesConfig
from mpp.data.data_path import is_url
from mpp.data.decoding.formats import ARRAY_ENDINGS, IMAGE_ENDINGS, is_image
from mpp.data.folder import Tree, ending_of, find_places, split_of_shard
from mpp.data.listing import IMAGE, LABEL, SPLIT, Listing
from mpp.data.lists import to_label, to_label_column
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
    """None: it is an image that can be read where it stands."""


class MemberHeader(tarfile.TarInfo):
    """A header of a member, which is an error where it is broken: tarfile takes it for the end of the shard."""

    @classmethod
    def frombuf(cls, *arguments: Any) -> tarfile.TarInfo:
        try:
            return super().frombuf(*arguments)
        except tarfile.InvalidHeaderError as error:
            raise tarfile.ReadError(f"{error} of a member") from error


@dataclass
class Sample:
    """The members of one image."""

    name: str
    pictures: dict[str, Member] = field(default_factory=dict)
    """By their endings."""
    others: dict[str, bytes] = field(default_factory=dict)
    """Contents by endings, such as labels."""

    def picture(self, config: ImagesConfig) -> Member | None:
        """The image: the only picture, that of the ending `data.image_column`, or the one without a dot in its ending.

        Returns:
            None: there is none.
        Raises:
            UserError: there are several.
        """
        if config.image_column not in (None, IMAGE):
            return self.pictures.get(config.image_column.lower())
        pictures = self.pictures
        if len(pictures) > 1:
            pictures = {end: member for end, member in pictures.items() if "." not in end} or pictures
        if len(pictures) > 1:
            problem = f"sample {self.name} has several pictures ({shortened(sorted(pictures))})"
            rule = "names are cut at their first dot; rename the members, or set data.image_column to an ending"
            raise UserError(f"{problem}: {rule}")
        return next(iter(pictures.values()), None)

    def label(self, column: str | None) -> Any:
        """The label as text: the member with the ending `column`, or that key of its JSON; None: it has none.

        Raises:
            UserError: its JSON cannot be read.
        """
        for ending in LABEL_ENDINGS if column is None else (column.lower(),):
            if ending in self.others:
                return self.others[ending].decode(errors="replace").strip() or None
        if column is None or "json" not in self.others:
            return None
        try:
            return to_label(json.loads(self.others["json"]).get(column))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.name}.json cannot be read: {one_line(error)}") from error


def read_members(file: BinaryIO, is_local: bool) -> Iterator[Member]:
    """The files of a shard, in their order; hidden ones are none. Of one that is far away with their contents."""
    with tarfile.open(None, "r:" if is_local else "r|", file, tarinfo=MemberHeader) as shard:
        for info in shard:
            name = info.name.removeprefix("./")
            if info.islnk() or info.issym():
                raise tarfile.ReadError(f"{name} is a link; pack files by tar --dereference --hard-dereference")
            if info.isreg() and not os.path.basename(name).startswith("."):
                content = None
                if not (is_local and is_named_as_image(name)):
                    content = shard.extractfile(info).read()
                    if len(content) < info.size:
                        raise tarfile.ReadError(f"unexpected end of data in {name}")
                yield Member(name, info.offset_data, info.size, content)
            shard.members.clear()  # it would keep all of them
        if 0 < shard.fileobj.tell() - shard.offset < tarfile.BLOCKSIZE:  # which tarfile takes for the end
            raise tarfile.ReadError("unexpected end of data in the header of a member")
        if is_local:
            file.seek(shard.offset)
            if file.read(MOST_END_BYTES).strip(b"\0"):
                raise tarfile.ReadError(
                    f"more follows its end at byte {shard.offset} (tar -A joins tars, cat does not)"
                )


def is_named_as_image(name: str) -> bool:
    """Whether a member is a picture or an array by its ending."""
    return os.path.splitext(name)[1].lower() in IMAGE_ENDINGS | ARRAY_ENDINGS


def read_samples(shard: str, config: ImagesConfig) -> Iterator[tuple[Sample, Member | None]]:
    """The samples of a shard, in its order, and the image of each, or None.

    In a shard that is far away the members of a sample must be next to each other: nothing is held in memory.

    Raises:
        UserError: the shard is damaged, or a sample has several images.
    """
    is_local = not is_url(shard)
    samples: dict[str, Sample] = {}
    passed: set[str] = set()
    with naming_damaged(shard, is_local), fsspec.open(shard).open() if not is_local else open(shard, "rb") as file:
        for member in read_members(file, is_local):
            folder, slash, base = member.name.rpartition("/")
            key, _, end = base.partition(".")
            name = folder + slash + key
            if name in passed:
                rule = "members of a sample must be next to each other in a remote shard (tar --sort=name)"
                raise UserError(f"{shard}: {member.name} is apart from its sample; {rule}")
            if not is_local and samples and name not in samples:
                (last,) = samples.values()
                yield last, last.picture(config)
                passed |= samples.keys()
                samples = {}
            sample = samples.setdefault(name, Sample(name))
            is_picture = is_named_as_image(base) or (not ending_of(base) and is_image(member.content))
            members = sample.pictures if is_picture else sample.others
            if end.lower() in members:
                raise tarfile.ReadError(f"it has two members {member.name}")
            members[end.lower()] = member if is_picture else member.content
        for sample in samples.values():
            yield sample, sample.picture(config)


@contextmanager
def naming_damaged(shard: str, is_local: bool) -> Iterator[None]:
    """Raise UserError with the name of the shard that is damaged."""
    damages = (tarfile.TarError, EOFError, OSError) if is_local else (tarfile.TarError, EOFError)
    try:
        yield
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
    image_column = config.image_column or IMAGE
    labels: dict[str, list[Any]] = {name: [] for name in label_endings(config)}
    paths: list[str | None] = []
    splits: list[str | None] = []
    folders: list[str] = []
    endings: set[str] = set()  # of members that are not used
    tree = Tree("")
    files = [(split, shard) for split, of_split in shards.items() for shard in of_split]
    for split, shard in progress_bar(files, desc="indexing shards", unit=" shards", delay=1, leave=False):
        for sample, picture in read_samples(shard, config):
            endings |= {*sample.pictures, *sample.others}
            if picture is None:
                tree.leave_out("samples without a picture", f"{os.path.basename(shard)}: {printable(sample.name)}")
                continue
            paths.append(printable(f"tar://{shard}::{picture.start}+{picture.size}::{picture.name}"))
            splits.append(split)
            folders.append(picture.name[: picture.name.rfind("/") + 1])
            for name, ending in label_endings(config).items():
                labels[name].append(sample.label(ending))
    if not paths:
        setting = f"{config.group_name}.image_column is {config.image_column}" if config.image_column else "no images"
        raise UserError(f"{config.path}: {setting}; its shards hold {shortened(sorted(endings)) or 'nothing'}")
    has_labels = any(label is not None for values in labels.values() for label in values)
    names_say_splits = len(files) > 1 or any(split_of_shard(shard) != "train" for _, shard in files)
    if not names_say_splits or not has_labels:
        inside = [
            f"{split}/{folder}" if names_say_splits else folder for split, folder in zip(splits, folders, strict=True)
        ]
        if has_labels:
            config = replace(config, label_folder="inner")  # no class is asked for
        places = find_places(dict.fromkeys(inside), config)
        if not names_say_splits:
            splits = [places[folder].split for folder in inside]
        if not has_labels and config.label_column is None:
            labels = {LABEL: [places[folder].name for folder in inside]}
    columns = {image_column: paths, **{name: to_label_column(values) for name, values in labels.items()}}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    columns[SPLIT] = splits
    kept = [row for row, split in enumerate(splits) if split is not None]
    if len(kept) < len(splits):
        tree.leave_out("images in no split's folder", *(paths[row] for row in range(len(paths)) if splits[row] is None))
        columns = {name: [values[row] for row in kept] for name, values in columns.items()}
    lines = tree.lines()
    others = sorted(end for end in endings if f".{end.rpartition('.')[2]}" not in IMAGE_ENDINGS | ARRAY_ENDINGS)
    if others and not has_labels and config.label_column is None:
        lines.append(
            f"no member is {' or '.join(LABEL_ENDINGS)}; data.label_column may name one of {shortened(others)}"
        )
    return Listing(columns, {image_column}, lines=lines)


def label_endings(config: ImagesConfig) -> dict[str, str | None]:
    """Columns of labels -> ending of the member, or key of its JSON; None: the usual endings."""
    named = {config.label_column, config.eval_label_column} - {None}
    usual: dict[str, str | None] = {LABEL: None} if config.label_column is None else {}
    return usual | {name: name for name in sorted(named)}


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
        for sample, picture in read_samples(shard, config):
            image = None
            if picture is not None:
                content = picture.content
                if content is None:
                    content = read_at(shard, picture.start, picture.size)
                image = {"bytes": content, "path": printable(picture.name)}
            labels = {name: sample.label(ending) for name, ending in label_endings(config).items()}
            yield {config.image_column or IMAGE: image, **labels}


def read_at(file: str, start: int, size: int) -> bytes:
    """Some bytes of a file."""
    with open(file, "rb") as opened:
        return os.pread(opened.fileno(), size, start)


def is_member_path(path: str) -> bool:
    """Whether a path is that of an image in a shard."""
    return MEMBER_PATH.fullmatch(path) is not None


def read_member(path: str) -> bytes:
    """An image of a shard on this machine, by its path."""
    parts = MEMBER_PATH.fullmatch(path)
    return read_at(parts["shard"], int(parts["start"]), int(parts["size"]))


def member_name(path: str) -> str:
    """The name of an image of a shard in messages: "train-000.tar: 000123.jpg"; another path as it is."""
    parts = MEMBER_PATH.fullmatch(path)
    return f"{parts['shard']}: {parts['name']}" if parts else path
