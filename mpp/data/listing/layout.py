"""Splits and classes of images by the names of their folders.

Splits are folders `train`, `val` and `test` at the top, or below one single folder. Classes are the innermost folders
whose name is not the same for all. See mpp/data.md for the rules.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mpp.data.listing.formats import without_extension
from mpp.data.listing.split_names import SPLIT_WORD_INSIDE, SPLIT_WORDS
from mpp.data.listing.tree import Folder, Parts
from mpp.runtime.messages import shortened

MASK_WORD = re.compile(r"masks|segmentation|annotation|trimap|ground_?truth")
MASK_FILE = re.compile(r"(.+)[ _-](masks?|seg|segmentation|labels?|annotation|trimap|gt|ground_?truth)", re.IGNORECASE)
FILES_LOOKED_AT = 64  # of a folder: in the order of names, a mask is near its image
ADVICE_ON_MASKS = "move them away, or list the images in a metadata.csv"
MIN_SHARE_AT_DEPTH = 0.2  # of the images: folders at a depth that has fewer are not the level of the classes
MAX_SHARE_OF_ONE_NAME = 0.95  # of the images: where one name has more, the level is the same for all but a few


@dataclass
class Layout:
    """A split and a class for each folder of a tree, by their names."""

    splits: list[str | None]
    """None: the folder is in no split."""
    classes: list[str | None]
    """None: the images of the folder have no label."""
    warnings: list[str] = field(default_factory=list)


def find_layout(
    folders: Sequence[Parts], image_counts: Sequence[int], label_folder: Literal["inner", "outer"]
) -> Layout:
    """Splits and classes of folders.

    Args:
        image_counts: number of images in each folder.
        label_folder: the class, where several levels have different names.
    """
    top = count_common_levels(folders)
    splits = [SPLIT_WORDS.get(parts[top].lower()) if len(parts) > top else None for parts in folders]
    if any(splits):
        top += 1
    else:
        splits = ["train"] * len(folders)
    below = [parts[top:] for parts in folders]
    layout = Layout(splits, [None] * len(folders))

    training_splits = {"train"} if "train" in splits else {*splits} - {None}
    training = [folder_index for folder_index, split in enumerate(splits) if split in training_splits]
    training_parts = [below[folder_index] for folder_index in training]
    differing, levels = class_levels(training_parts, [image_counts[folder_index] for folder_index in training])
    layout.warnings += suspicious_names(training_parts)
    if not levels:
        return layout

    level = differing[0] if label_folder == "outer" else levels[-1]
    for folder_index in training:
        if len(below[folder_index]) > level:
            layout.classes[folder_index] = below[folder_index][level]
    known_classes = {layout.classes[folder_index] for folder_index in training} - {None}
    for split in {*splits} - training_splits - {None}:
        held_out = [folder_index for folder_index, other in enumerate(splits) if other == split]
        classes = held_out_classes([below[folder_index] for folder_index in held_out], level, known_classes)
        for folder_index, name in zip(held_out, classes, strict=True):
            layout.classes[folder_index] = name
    if level > differing[0]:
        layout.warnings.append(describe_levels(training_parts, differing[0], level))
    return layout


def count_common_levels(folders: Sequence[Parts]) -> int:
    """The number of levels from the top where there is one single folder, whose name is not that of a split."""
    level = 0
    for names in zip(*folders, strict=False):
        if len({*names}) > 1 or names[0].lower() in SPLIT_WORDS:
            break
        level += 1
    return level


def class_levels(below: list[Parts], image_counts: list[int]) -> tuple[list[int], list[int]]:
    """The levels at which the names of folders differ, among the images of the usual depth.

    Args:
        below: each folder's parts, below its split.
        image_counts: number of images in each folder.
    Returns:
        All of them; and those at which no name has nearly all images, if there are any.
    """
    depth = usual_depth(below, image_counts)
    differing = []
    levels = []
    for level in range(depth):
        images_by_name = Counter[str]()
        for parts, count in zip(below, image_counts, strict=True):
            if len(parts) >= depth:
                images_by_name[parts[level]] += count
        if len(images_by_name) > 1:
            differing.append(level)
            if max(images_by_name.values()) < MAX_SHARE_OF_ONE_NAME * images_by_name.total():
                levels.append(level)
    return differing, levels or differing


def usual_depth(below: list[Parts], image_counts: list[int]) -> int:
    """The smallest depth, above 0, that has a good share of the images in folders; 0: no image is in a folder."""
    images_by_depth = Counter[int]()
    for parts, count in zip(below, image_counts, strict=True):
        if parts:
            images_by_depth[len(parts)] += count
    for depth in sorted(images_by_depth):
        if images_by_depth[depth] >= MIN_SHARE_AT_DEPTH * images_by_depth.total():
            return depth
    return 0


def held_out_classes(below: list[Parts], level: int, known_classes: set[str]) -> list[str | None]:
    """The class of each folder of a held-out split: one of training, at any level, or another at the usual level.

    A single folder that is no class of training holds images without labels, as ImageNet's `val` is unpacked.
    """
    names = {parts[level] for parts in below if len(parts) > level}
    is_one_other_folder = len(names) == 1 and names.isdisjoint(known_classes)
    classes: list[str | None] = []
    for parts in below:
        known = [part for part in parts if part in known_classes]
        if known:
            classes.append(known[-1])
        elif len(parts) > level and not is_one_other_folder:
            classes.append(parts[level])
        else:
            classes.append(None)
    return classes


def describe_levels(below: list[Parts], outer_level: int, inner_level: int) -> str:
    """A line where folders on several levels have different names: the classes, and the other choice.

    It names folders of the same name in different folders, which are one class.
    """
    inner = sorted({parts[inner_level] for parts in below if len(parts) > inner_level})
    outer = sorted({parts[outer_level] for parts in below if len(parts) > outer_level})
    line = f"classes are the innermost folders ({len(inner)}: {shortened(inner)})"

    parents: dict[str, set[Parts]] = {}
    for parts in below:
        if len(parts) > inner_level:
            parents.setdefault(parts[inner_level], set()).add(parts[:inner_level])
    repeated = sorted(name for name in parents if len(parents[name]) > 1)
    if repeated:
        first = repeated[0]
        places = ["/".join((*parts, first)) for parts in sorted(parents[first])]
        line += f"; {shortened(places)} are one class"
        if len(repeated) > 1:
            line += f", and so with {len(repeated) - 1} more"
    return f"{line}; data.label_folder outer takes the outer ones ({len(outer)}: {shortened(outer)})"


def masks_beside_images(folders: Sequence[Folder]) -> list[str]:
    """Warnings of files that are called as masks of others in their folder, such as `1_mask.tif` next to `1.tif`."""
    like_masks = []
    for folder in folders:
        files = folder.files[:FILES_LOOKED_AT]
        stems = {without_extension(file) for file in files}
        for file in files:
            named = MASK_FILE.fullmatch(without_extension(file))
            if named and named[1] in stems:
                like_masks.append("/".join((*folder.parts, file)))
    if not like_masks:
        return []
    return [f"files look like masks and count as images, such as {shortened(like_masks[:3])}; {ADVICE_ON_MASKS}"]


def suspicious_names(below: list[Parts]) -> list[str]:
    """Warnings of folders that look like splits or masks, and are taken for folders of images."""
    names = sorted({part for parts in below for part in parts})
    warnings = []
    like_splits = [name for name in names if SPLIT_WORD_INSIDE.search(name.lower())]
    if like_splits:
        rule = "splits are folders train, val and test at the top level"
        warnings.append(f"folders look like splits but are not: {shortened(like_splits)}; {rule}: rename or move them")
    like_masks = [name for name in names if MASK_WORD.search(name.lower())]
    if like_masks:
        what = "folders look like masks and count as images"
        warnings.append(f"{what}: {shortened(like_masks)}; {ADVICE_ON_MASKS}")
    return warnings
