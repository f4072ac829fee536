"""The images of a folder: all that are in it, or those that its lists name.

The rules are in mpp/data.md: folders are splits and classes, and lists say which files count, with their labels.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mpp.config import ImagesConfig
from mpp.data.listing.image_table import IMAGE, LABEL, SPLIT, Listing, text_column
from mpp.data.listing.layout import find_layout, masks_beside_images
from mpp.data.listing.left_out import IN_NO_SPLIT, other_files
from mpp.data.listing.listed_files import ListedFiles
from mpp.data.listing.lists import ImageList, read_list, to_label_column
from mpp.data.listing.split_names import split_order
from mpp.data.listing.tree import Folder, Parts, Tree, is_below
from mpp.errors import UserError
from mpp.runtime.messages import shortened


def list_images(tree: Tree, config: ImagesConfig) -> Listing:
    """The images of a folder, by its lists where there are some.

    Raises:
        UserError: a list cannot be read, or names files that are not there.
    """
    lists = read_lists(tree, config)
    if lists:
        listing = list_by_lists(tree, lists, config)
    elif config.file_column is None:
        listing = list_by_folders(tree, config)
    else:
        raise UserError(
            f"data.file_column is {config.file_column}; {tree.root} has no list of images with such a column"
        )
    listing.add_left_out(tree.left_out)
    return listing


def read_lists(tree: Tree, config: ImagesConfig) -> list[ImageList]:
    """The lists of a tree, or that of `data.labels`, whose names start at the top."""
    if config.labels is not None:
        leave_out_other_lists(tree, config)
        return [read_list(os.path.expanduser(config.labels), "", config)]
    lists = []
    for parts, path in tree.lists:
        image_list = read_list(path, "/".join(parts), config)
        if image_list is None:
            reason = "tables without a column of file names (data.file_column names one)"
            tree.leave_out(reason, parts, path, about_images=False)
        else:
            lists.append(image_list)
    return lists


def leave_out_other_lists(tree: Tree, config: ImagesConfig) -> None:
    """Leave out the lists in the tree but that of `data.labels`."""
    for _, other in tree.lists:
        if not is_named_list(other, config):
            tree.left_out.add("lists other than data.labels", os.path.basename(other))
    path = os.path.realpath(os.path.expanduser(config.labels))
    root = os.path.realpath(tree.root)
    if is_below(path, root):
        tree.left_out.forget(other_files(path), os.path.relpath(path, root))


def is_named_list(path: str, config: ImagesConfig) -> bool:
    """Whether a file in the tree is the list that `data.labels` names."""
    if config.labels is None:
        return False
    named = os.path.expanduser(config.labels)
    return os.path.exists(named) and os.path.samefile(path, named)


def list_by_folders(tree: Tree, config: ImagesConfig) -> Listing:
    """The images of all folders that are in a split, the training split first."""
    image_counts = [len(folder.files) for folder in tree.folders]
    layout = find_layout([folder.parts for folder in tree.folders], image_counts, config.label_folder)
    kept = []
    for folder_index, folder in enumerate(tree.folders):
        if layout.splits[folder_index] is None:
            tree.left_out.add(IN_NO_SPLIT, folder.first, len(folder.files))
        else:
            kept.append(folder_index)
    kept.sort(key=lambda folder_index: split_order(layout.splits[folder_index]))
    paths: list[str] = []
    for folder_index in kept:
        paths += tree.folders[folder_index].paths()
    folder_of_image = pa.array(np.repeat(kept, [image_counts[folder_index] for folder_index in kept]))
    columns: dict[str, Any] = {IMAGE: paths, SPLIT: text_column(layout.splits).take(folder_of_image)}
    labels = text_column(layout.classes).take(folder_of_image)
    if labels.null_count < len(labels):
        columns[LABEL] = labels
    warnings = layout.warnings + masks_beside_images([tree.folders[folder_index] for folder_index in kept])
    return Listing(columns, label_columns={LABEL} & columns.keys(), warnings=warnings)


def list_by_lists(tree: Tree, lists: Sequence[ImageList], config: ImagesConfig) -> Listing:
    """The images that lists name, and those of folders without a list.

    Where lists have no value, folders are splits and classes.
    """
    listed = ListedFiles(tree, lists, config)
    folders, indices_by_folder = keep_listed(tree, listed)
    image_counts = [len(file_indices) for file_indices in indices_by_folder]
    layout = find_layout(folders, image_counts, config.label_folder)
    splits: dict[int, str | None] = {}
    labels: dict[int, Any] = {}
    for file_indices, split, name in zip(indices_by_folder, layout.splits, layout.classes, strict=True):
        splits |= dict.fromkeys(file_indices, split)
        labels |= dict.fromkeys(file_indices, name)

    outside = sorted(listed.images - splits.keys(), key=listed.files.paths.__getitem__)
    splits |= dict.fromkeys(outside, "train")
    splits |= listed.values.get(SPLIT, {})
    listed_labels = listed.values.get(listed.label, {})
    labels |= {file_index: listed_labels.get(file_index) for file_index in listed.with_label_cell}

    kept = []
    for file_index in itertools.chain(*indices_by_folder, outside):
        if splits[file_index] is None:
            tree.left_out.add(IN_NO_SPLIT, listed.name(file_index))
        else:
            kept.append(file_index)

    columns: dict[str, Any] = {IMAGE: [listed.files.paths[file_index] for file_index in kept]}
    for column, values in listed.values.items():
        if column != IMAGE:
            columns[column] = [values.get(file_index) for file_index in kept]
    columns[SPLIT] = [splits[file_index] for file_index in kept]
    columns[listed.label] = to_label_column(labels.get(file_index) for file_index in kept)
    if not any(columns[listed.label]):
        del columns[listed.label]

    return Listing(
        columns,
        label_columns=listed.label_columns & columns.keys(),
        path_columns={IMAGE, config.mask_column} & columns.keys(),
        notes=[*listed.notes, *notes_on_columns(listed, kept, columns), *note_outside(listed, outside)],
        warnings=[*layout.warnings, *listed.warnings],
    )


def notes_on_columns(listed: ListedFiles, kept: Sequence[int], columns: dict[str, Any]) -> list[str]:
    """Lines on splits and classes that no list gives.

    Args:
        kept: indices of the images, in the order of the columns.
    """
    notes = []
    named_splits = listed.values.get(SPLIT, {})
    training = [file_index for file_index, split in zip(kept, columns[SPLIT], strict=True) if split == "train"]
    unnamed = [file_index for file_index in training if file_index not in named_splits]
    if named_splits and unnamed:
        notes.append(f"images without a split in a list are used for training ({listed.describe_files(unnamed)})")
    unused = sorted(columns.keys() - {IMAGE, SPLIT, listed.label, listed.config.mask_column})
    if listed.label in columns and unused and not listed.with_label_cell:
        reason = f"no list has a column `{listed.label}`"
        notes.append(f"classes are folders: {reason}; data.label_column may name one of {shortened(unused)}")
    return notes


def note_outside(listed: ListedFiles, outside: Sequence[int]) -> list[str]:
    """A line on listed files outside of the folder, if there are any."""
    if not outside:
        return []
    what = f"listed files outside of {listed.tree.root}, used for training unless a list gives their split"
    return [f"{what} ({listed.describe_files(outside)})"]


def keep_listed(tree: Tree, listed: ListedFiles) -> tuple[list[Parts], list[list[int]]]:
    """The folders of the images that count, and the indices of these images, folder by folder.

    In a folder with a list (its own, or one of a folder above): the images that the list names. In other folders: every
    file that is not a mask.
    """
    folders = []
    indices_by_folder = []
    first = 0
    for folder in tree.folders:
        has_list = not listed.folders.isdisjoint(folders_above(folder))
        file_indices: list[int] = []
        for file_index, file in enumerate(folder.files, start=first):
            is_mask = file_index in listed.masks
            wanted = file_index in listed.images or (not has_list and not is_mask)
            if wanted:
                file_indices.append(file_index)
            elif not is_mask:
                tree.leave_out("files missing from all lists", folder.parts, file)
        first += len(folder.files)
        if file_indices:
            folders.append(folder.parts)
            indices_by_folder.append(file_indices)
    return folders, indices_by_folder


def folders_above(folder: Folder) -> list[str]:
    """A folder and those around it, from the top."""
    return ["/".join(folder.parts[:depth]) for depth in range(len(folder.parts) + 1)]
