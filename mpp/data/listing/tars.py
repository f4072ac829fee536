"""Tar shards: samples of files whose names differ in their ending, as WebDataset has them, or folders of pictures.

The image of a sample is whichever member is a picture; `cls` is its label. A shard on this machine is indexed by the
headers of its members, and its images are read where they stand. One that is far away is read from its beginning on.
"""

import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import datasets
import fsspec

from mpp.config import ImagesConfig
from mpp.data.decoding.kinds import is_picture
from mpp.data.listing.folders import HEAD, SPLIT_LIKE, SPLITS, Folder, LeftOut, layout_of
from mpp.data.listing.formats import ARRAYS, PICTURES, ending
from mpp.data.listing.lists import as_label
from mpp.data.listing.table import IMAGE, LABEL, SPLIT, Listing
from mpp.errors import UserError, one_line
from mpp.runtime.messages import shortened
from mpp.runtime.output import printable
from mpp.runtime.progress import progress_bar

MEMBER = re.compile(r"tar://(?P<shard>.+?)::(?P<start>\d+)\+(?P<size>\d+)::(?P<name>.*)", re.DOTALL)
"""Path of an image in a shard on this machine: where it begins, its size, its name."""
SPLIT_AT_END = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})$")
OF_MANY = re.compile(r"(\w+)-\d+-of-\d+\.")
LABELS = ("cls", "label")
"""Endings of the member that is a sample's label, unless `data.label_column` names another."""
SMALL = 1 << 16  # bytes: a member that is no image and longer is no label
TRIED = 200  # members of the first shard that show where names are cut


class Member(NamedTuple):
    """A file in a shard."""

    name: str
    start: int
    size: int
    content: bytes | None
    """What is in it, where it was read."""


@dataclass
class Cut:
    """How a member's name is cut into that of its sample and an ending: at the first or the last dot of its file."""

    last: bool = False

    def __call__(self, name: str) -> tuple[str, str]:
        folder, slash, file = name.rpartition("/")
        sample, _, end = file.rpartition(".") if self.last and "." in file else file.partition(".")
        return folder + slash + sample, end.lower()


@dataclass
class Sample:
    """The members of one image."""

    key: str
    pictures: dict[str, Member] = field(default_factory=dict)
    """By their endings."""
    others: dict[str, bytes] = field(default_factory=dict)


def members(file: BinaryIO, seeks: bool, heads: bool = False) -> Iterator[Member]:
    """The files of a shard, in their order; what is short and no picture, with its content. A link is the file that it
    leads to, where that stands before it.

    Args:
        seeks: whether pictures can be read later, where they stand.
        heads: whether only their first bytes are wanted.
    """
    places: dict[str, tuple[int, int]] = {}
    with tarfile.open(None, "r:" if seeks else "r|", file) as shard:
        for about in shard:
            name = about.name.removeprefix("./")
            if os.path.basename(name).startswith("."):
                continue
            if about.islnk() or about.issym():
                target = about.linkname if about.islnk() else posixpath.join(posixpath.dirname(name), about.linkname)
                place = places.get(posixpath.normpath(target))
                if seeks and place:
                    yield Member(name, *place, None)
                continue
            if not about.isreg():
                continue
            if seeks:
                places[posixpath.normpath(name)] = about.offset_data, about.size
            short = about.size if about.size <= SMALL else HEAD
            whole = not seeks and not heads
            size = about.size if whole else 0 if seeks and ending(name) in PICTURES | ARRAYS else short
            content = shard.extractfile(about).read(size) if size else None
            if content is not None and len(content) < min(size, about.size):
                raise tarfile.ReadError(f"unexpected end of data in {name}")
            yield Member(name, about.offset_data, about.size, content)
            shard.members.clear()  # it would keep all of them
        if 0 < shard.fileobj.tell() - shard.offset < tarfile.BLOCKSIZE:  # which tarfile takes for the end
            raise tarfile.ReadError("unexpected end of data in the header of a member")


def is_image(member: Member, end: str) -> bool:
    """Whether a member is a picture or an array: by its ending or, where it has none, by its first bytes."""
    last = f".{end.rpartition('.')[2]}"
    if last in PICTURES | ARRAYS:
        return True
    return ending(member.name) == "" and member.content is not None and is_picture(member.content[:HEAD])


def grouped(found: Iterable[Member], cut: Cut, neighbours: bool) -> Iterator[Sample]:
    """Members as samples.

    Args:
        neighbours: whether those of a sample have to stand next to each other, so that nothing is held in memory.
    Raises:
        UserError: they have to, and do not.
    """
    samples: dict[str, Sample] = {}
    passed: set[str] = set()
    for member in found:
        key, end = cut(member.name)
        if key in passed:
            rule = "members of a sample must stand next to each other in a shard that is far away"
            raise UserError(f"{member.name} stands apart from its sample: {rule} (tar --sort=name)")
        if neighbours and samples and key not in samples:
            yield from samples.values()
            passed |= samples.keys()
            samples = {}
        sample = samples.setdefault(key, Sample(key))
        if is_image(member, end):
            sample.pictures[end] = member  # of two members of one name the last one counts, as tar has it
        elif member.content is not None:
            sample.others[end] = member.content
    yield from samples.values()


def picture_of(sample: Sample, config: ImagesConfig) -> Member | None:
    """The image of a sample: its only picture, that of the ending `data.image_column`, or the one whose ending has no
    dot in it; None: it has none.

    Raises:
        UserError: there are several.
    """
    ends = sample.pictures
    if config.image_column not in (None, IMAGE):
        return ends.get(config.image_column.lower())
    plain = [end for end in ends if "." not in end]
    if len(ends) > 1 and len(plain) != 1:
        has = f"sample {sample.key} has several pictures ({shortened(sorted(ends))})"
        rule = "a name is cut at its first dot, and what follows is one ending for each member"
        raise UserError(f"{has}: {rule}; data.image_column names the ending of the image")
    return ends[plain[0]] if plain else next(iter(ends.values()), None)


class Faults(NamedTuple):
    """What speaks against a cut."""

    several: int = 0
    """Samples that have several pictures."""
    dotted: int = 0
    """Pictures whose endings have a dot in them, and so the endings of their labels."""
    without: int = 0
    """Samples that have no picture: labels that are cut off from theirs."""


def cut_of(shard: str, config: ImagesConfig) -> Cut:
    """Where the names of a dataset's members are cut: at the first dot, as WebDataset does it; at the last one where
    the first leaves several pictures a sample, or dots in endings, and the last leaves no more samples without any.

    Raises:
        UserError: the shard is damaged.
    """
    with damage_named(shard), open_shard(shard) as file:
        tried = [member for member, _ in zip(members(file, is_local(shard), heads=True), range(TRIED), strict=False)]
    first, last = (faults_of(Cut(last), tried, config) for last in (False, True))
    return Cut(last=last.without <= first.without and last < first)


def faults_of(cut: Cut, tried: list[Member], config: ImagesConfig) -> Faults:
    """What speaks against a cut, among some members."""
    several, dotted, without = 0, 0, 0
    for sample in grouped(tried, cut, neighbours=False):
        try:
            picture = picture_of(sample, config)
        except UserError:
            several += 1
            continue
        without += picture is None
        dotted += picture is not None and "." in cut(picture.name)[1]
    return Faults(several, dotted, without)


@contextmanager
def damage_named(shard: str) -> Iterator[None]:
    """Name the shard that is damaged."""
    kinds = (tarfile.TarError, EOFError, OSError) if is_local(shard) else (tarfile.TarError, EOFError)
    try:
        yield
    except kinds as error:
        raise UserError(f"{shard} is damaged: {one_line(error)}; replace it") from error


def is_local(shard: str) -> bool:
    """Whether a shard is a file of this machine."""
    return "://" not in shard


def label_in(sample: Sample, column: str | None) -> Any:
    """A sample's label as text: the member whose ending is `column`, or that key of its JSON; None: it has none.

    Raises:
        UserError: its JSON is none.
    """
    for name in LABELS if column is None else (column.lower(),):
        if name in sample.others:
            text = sample.others[name].decode(errors="replace").strip()
            return text or None
    if column is not None and "json" in sample.others:
        try:
            return as_label(json.loads(sample.others["json"]).get(column))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{sample.key}.json cannot be read: {one_line(error)}") from error
    return None


def open_shard(shard: str) -> BinaryIO:
    """A shard for reading, on this machine or far away."""
    if is_local(shard):
        return open(shard, "rb")
    system, path = fsspec.url_to_fs(shard)
    return system.open(path)


def samples_of(shard: str, config: ImagesConfig, cut: Cut) -> Iterator[tuple[Sample, Member | None]]:
    """The samples of a shard and the image of each, or None, in the order of the shard.

    Raises:
        UserError: a sample has several pictures, or its members are not next to each other.
        tarfile.TarError: the shard is damaged.
    """
    seeks = is_local(shard)
    with open_shard(shard) as file:
        size = os.fstat(file.fileno()).st_size if seeks else None
        for sample in grouped(members(file, seeks), cut, neighbours=not seeks):
            picture = picture_of(sample, config)
            if picture is not None and size is not None and picture.start + picture.size > size:
                raise tarfile.ReadError(f"unexpected end of data in {picture.name}")
            yield sample, picture


def list_shards(shards: dict[str, list[str]], config: ImagesConfig) -> Listing:
    """The images of shards on this machine.

    Args:
        shards: split -> files.
    Raises:
        UserError: a shard is damaged, or its samples follow no rule.
    """
    left_out = LeftOut()
    cut = cut_of(next(iter(shards.values()))[0], config)
    image = config.image_column or IMAGE
    columns: dict[str, list[Any]] = {image: [], SPLIT: []}
    wanted = {LABEL: config.label_column} | {name: name for name in asked_for(config)}
    labels: dict[str, list[Any]] = {name: [] for name in wanted}
    folders: list[str] = []
    files = [(split, shard) for split, of_split in shards.items() for shard in of_split]
    for split, shard in progress_bar(files, desc="indexing shards", unit=" shards", delay=1, leave=False):
        with damage_named(shard):
            for sample, picture in samples_of(shard, config, cut):
                if picture is None:
                    left_out.add("samples without a picture", f"{os.path.basename(shard)}: {sample.key}")
                    continue
                columns[image].append(path_of(shard, picture))
                columns[SPLIT].append(split)
                folders.append(picture.name.rpartition("/")[0])
                for name, column in wanted.items():
                    labels[name].append(label_in(sample, column))
    named = {split_of(shard, ()) for _, shard in files} != {"train"} or len(shards) > 1
    layout = layout_inside(folders, columns[SPLIT] if named else None, config.label_folder)
    if not named:
        columns[SPLIT] = [split or "train" for split, _ in layout]
    if config.label_column not in (None, LABEL):
        labels.pop(LABEL)
    elif config.label_column is None and not any(labels[LABEL]):
        labels[LABEL] = [name for _, name in layout]
    used = {name: values for name, values in labels.items() if any(value is not None for value in values)}
    return Listing(columns | used, {*used}, {image}).with_left_out(left_out)


def layout_inside(
    folders: list[str], splits: list[str] | None, label_folder: str
) -> list[tuple[str | None, str | None]]:
    """The split and the class of each image by the folder that it has in its shard, as if shards were folders.

    Args:
        splits: of each image, where the names of shards say it.
    """
    keys = [*zip(splits or [""] * len(folders), folders, strict=True)]
    known: dict[tuple[str, str], Folder] = {}
    for split, name in keys:
        parts = tuple(part for part in (split, *name.split("/")) if part)
        known.setdefault((split, name), Folder(parts, name, [])).files.append("")
    layout = layout_of([*known.values()], label_folder)
    found = dict(zip(known, zip(layout.splits, layout.classes, strict=True), strict=True))
    return [found[key] for key in keys]


def split_of(shard: str, folders: Iterable[str]) -> str:
    """The split of a shard by its name: NAME of NAME-00000-of-00012, or a word such as train, val or test in its name
    or that of its folder; else train."""
    name = os.path.basename(shard)
    numbered = OF_MANY.match(name)
    if numbered and not SPLIT_AT_END.search(numbered[1].lower()):
        return numbered[1]
    for each in (name, *reversed([*folders])):
        found = SPLIT_LIKE.search(each.lower())
        if found:
            return SPLITS[found[1]]
    return "train"


def path_of(shard: str, member: Member) -> str:
    """The path of a shard's image in the table: see MEMBER."""
    return f"tar://{shard}::{member.start}+{member.size}::{member.name}"


def read_member(path: str) -> bytes | None:
    """An image of a shard on this machine, by its path in the table; None: the path is another one."""
    found = MEMBER.fullmatch(path)
    if found is None:
        return None
    with open(found["shard"], "rb") as file:
        return os.pread(file.fileno(), int(found["size"]), int(found["start"]))


def name_of_member(path: str) -> str:
    """An image of a shard as a person calls it: "train-000.tar: 000123.jpg"; another path as it is."""
    found = MEMBER.fullmatch(path)
    return f"{found['shard']}: {found['name']}" if found else path


def asked_for(config: ImagesConfig) -> set[str]:
    """The columns of labels that are named."""
    return {config.label_column, getattr(config, "eval_label_column", None)} - {None}


def stream_of(shards: list[str], config: ImagesConfig) -> datasets.IterableDataset:
    """The samples of shards as a stream of {image, label}: a shard each, images with their bytes."""
    columns = tuple(sorted(asked_for(config) or {LABEL}))
    kinds = {config.image_column or IMAGE: datasets.Image(decode=False)}
    kinds |= {name: datasets.Value("string") for name in columns}
    how = {"config": config, "cut": cut_of(shards[0], config), "columns": columns}
    return datasets.IterableDataset.from_generator(
        stream_rows, features=datasets.Features(kinds), gen_kwargs={"shards": shards, **how}
    )


def stream_rows(
    shards: list[str], config: ImagesConfig, cut: Cut, columns: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """The rows of some shards. A sample without a picture has no bytes, which its reader says."""
    for shard in shards:
        for sample, picture in samples_of(shard, config, cut):
            cell: dict[str, Any] | None = None
            if picture is not None:
                stored = read_member(path_of(shard, picture)) if is_local(shard) else picture.content
                cell = {"bytes": stored, "path": printable(picture.name)}
            labels = {name: label_in(sample, name if name in asked_for(config) else None) for name in columns}
            yield {config.image_column or IMAGE: cell} | labels
