"""Samples of tar shards: members whose names differ in their ending, as WebDataset has them.

The image of a sample is whichever member is a picture, and its label the member `cls`.
"""

import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from mpp.config import ImagesConfig
from mpp.data.decoding.formats import is_picture
from mpp.data.listing.formats import IMAGE_EXTENSIONS, extension_of
from mpp.data.listing.image_table import IMAGE
from mpp.data.listing.lists import to_label
from mpp.data.listing.tar_members import Member, is_local_shard, naming_damaged, open_shard, read_members
from mpp.data.listing.tree import PICTURE_HEAD_BYTES
from mpp.errors import UserError, one_line
from mpp.runtime.messages import shortened

LABEL_ENDINGS = ("cls", "label")
"""Endings of the member that is a sample's label, unless `data.label_column` names another."""
TRIED_MEMBERS = 200  # of the first shard: they show where names are cut


def split_name(name: str, at_last_dot: bool) -> tuple[str, str]:
    """The name of a member's sample, with its folder, and the member's ending in small letters.

    Args:
        at_last_dot: cut the name at its last dot, not at its first.
    """
    if at_last_dot:
        sample, extension = os.path.splitext(name)
        return sample, extension[1:].lower()
    folder, slash, file = name.rpartition("/")
    sample, _, end = file.partition(".")
    return folder + slash + sample, end.lower()


@dataclass
class Sample:
    """The members of one image."""

    name: str
    pictures: dict[str, Member] = field(default_factory=dict)
    """By their endings."""
    others: dict[str, bytes] = field(default_factory=dict)
    """Contents by endings, such as labels."""
    replaced: list[str] = field(default_factory=list)
    """Names of pictures that later ones of the same name have replaced, as they do where a tar is unpacked."""

    def picture(self, config: ImagesConfig) -> Member | None:
        """The image: the only picture, that of the ending `data.image_column`, or the one without a dot in its ending.

        Returns:
            None: there is no picture.
        Raises:
            UserError: there are several.
        """
        if config.image_column not in (None, IMAGE):
            return self.pictures.get(config.image_column.lower())
        if len(self.pictures) == 1:
            return next(iter(self.pictures.values()))
        without_dot = [end for end in self.pictures if "." not in end]
        if len(without_dot) == 1:
            return self.pictures[without_dot[0]]
        if not self.pictures:
            return None
        problem = f"sample {self.name} has several pictures ({shortened(sorted(self.pictures))})"
        rule = "a name is cut at its first dot, and what follows is one ending for each member"
        raise UserError(f"{problem}: {rule}; data.image_column names the ending of the image")

    def label(self, column: str | None) -> Any:
        """The label as text: the member with the ending `column`, or that key of its JSON; None: it has none.

        Raises:
            UserError: its JSON cannot be read.
        """
        endings = LABEL_ENDINGS if column is None else (column.lower(),)
        for ending in endings:
            if ending in self.others:
                text = self.others[ending].decode(errors="replace").strip()
                return text or None
        if column is None or "json" not in self.others:
            return None
        try:
            return to_label(json.loads(self.others["json"]).get(column))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.name}.json cannot be read: {one_line(error)}") from error


def group_members(members: Iterable[Member], at_last_dot: bool, contiguous: bool) -> Iterator[Sample]:
    """Members as samples.

    Args:
        at_last_dot: see `split_name`.
        contiguous: whether those of a sample have to stand next to each other, so that nothing is held in memory.
    Raises:
        UserError: they have to, and do not.
    """
    samples: dict[str, Sample] = {}
    passed: set[str] = set()
    for member in members:
        name, end = split_name(member.name, at_last_dot)
        if name in passed:
            why = "members of a sample must be next to each other in a remote shard"
            raise UserError(f"{member.name} is apart from its sample: {why} (tar --sort=name)")
        if contiguous and samples and name not in samples:
            yield from samples.values()
            passed |= samples.keys()
            samples = {}
        sample = samples.setdefault(name, Sample(name))
        if is_image(member, end):
            if end in sample.pictures:
                sample.replaced.append(member.name)
            sample.pictures[end] = member
        elif member.content is not None:
            sample.others[end] = member.content
    yield from samples.values()


def is_image(member: Member, end: str) -> bool:
    """Whether a member is a picture or an array: by its ending or, where it has none, by its first bytes."""
    last_part = end.rpartition(".")[2]
    if f".{last_part}" in IMAGE_EXTENSIONS:
        return True
    if extension_of(member.name) or member.content is None:
        return False
    return is_picture(member.content[:PICTURE_HEAD_BYTES])


class NameProblems(NamedTuple):
    """Problems of one way to cut the names of some members; compared in this order."""

    several: int
    """Samples with several pictures."""
    dotted: int
    """Pictures whose endings have a dot in them, and so the endings of their labels."""
    without: int
    """Samples without a picture: labels that are cut off from theirs."""


def cuts_at_last_dot(shard: str, config: ImagesConfig) -> bool:
    """Whether the names of a dataset's members are cut at their last dot, by its first shard.

    WebDataset cuts at the first dot. The last one is right where the first leaves several pictures a sample, or dots in
    endings, and the last leaves no more samples without a picture.

    Raises:
        UserError: the shard is damaged.
    """
    with naming_damaged(shard), open_shard(shard) as file:
        members = list(islice(read_members(file, is_local_shard(shard), heads_only=True), TRIED_MEMBERS))
    first = count_problems(members, config, at_last_dot=False)
    last = count_problems(members, config, at_last_dot=True)
    return last.without <= first.without and last < first


def count_problems(members: list[Member], config: ImagesConfig, at_last_dot: bool) -> NameProblems:
    """Count the problems of one way to cut the names of some members."""
    several = dotted = without = 0
    for sample in group_members(members, at_last_dot, contiguous=False):
        try:
            picture = sample.picture(config)
        except UserError:
            several += 1
            continue
        if picture is None:
            without += 1
        elif "." in split_name(picture.name, at_last_dot)[1]:
            dotted += 1
    return NameProblems(several, dotted, without)


def read_samples(shard: str, config: ImagesConfig, at_last_dot: bool) -> Iterator[tuple[Sample, Member | None]]:
    """The samples of a shard, in its order, and the image of each, or None.

    Args:
        at_last_dot: see `split_name`.
    Raises:
        UserError: a sample has several pictures, or its members are not next to each other.
        tarfile.TarError: the shard is damaged.
    """
    seeks = is_local_shard(shard)
    with open_shard(shard) as file:
        shard_size = os.fstat(file.fileno()).st_size if seeks else None
        for sample in group_members(read_members(file, seeks), at_last_dot, contiguous=not seeks):
            picture = sample.picture(config)
            if picture is not None and shard_size is not None and picture.start + picture.size > shard_size:
                raise tarfile.ReadError(f"unexpected end of data in {picture.name}")
            yield sample, picture
