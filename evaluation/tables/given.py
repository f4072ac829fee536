"""The other columns that images were given with, such as site and date, next to the columns of a table."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from evaluation.tables.parts import RowsOf
from mpp.data.columns import can_hold_images
from mpp.data.dataset import ImageDataset
from mpp.data.labels import SEPARATOR
from mpp.runtime.files import short_digest
from mpp.runtime.messages import note, shortened

PREFIX = "given_"
"""Of a column whose name is one of the table's own."""
ROWS_PER_DIGEST = 4096  # in memory at a time


@dataclass(frozen=True)
class GivenColumns:
    """The columns of a dataset, but those of images, in the order of its rows."""

    splits: Mapping[str, datasets.Dataset]
    """Split -> its rows, with such columns only."""
    types: Mapping[str, pa.DataType]
    """Column -> its type in the table; a split without the column has nulls."""

    def identity(self) -> dict[str, str]:
        """The part of a table's identity that depends on these columns; empty: there are none."""
        return {"given": short_digest(self.pieces())} if self.types else {}

    def pieces(self) -> Iterator[bytes]:
        """Names and values, as bytes."""
        for split, rows in self.splits.items():
            yield json.dumps([split, rows.column_names]).encode()
            if rows.column_names:
                for batch in rows.with_format("arrow").iter(ROWS_PER_DIGEST):
                    yield json.dumps(batch.to_pydict(), default=str).encode()

    def joined_to(self, rows_of: RowsOf) -> RowsOf:
        """Rows of a table with these columns after its column `error`."""

        def rows_with_given(images: ImageDataset, indices: range, on_images: Callable[[int], Any]) -> pa.Table:
            return self.add_to(rows_of(images, indices, on_images), images.split, indices)

        return rows_with_given

    def add_to(self, table: pa.Table, split: str, indices: range) -> pa.Table:
        """The rows of some images, with these columns."""
        place = table.column_names.index("error") + 1
        rows = self.splits[split]
        given = rows.with_format("arrow")[indices.start : indices.stop] if rows.column_names else None
        renamed = []
        for name, kind in self.types.items():
            values = pa.nulls(len(indices), kind)
            if name in rows.column_names:
                values = convert(given.column(name).combine_chunks(), rows.features[name], kind)
            new_name = name
            while new_name in table.column_names:
                new_name = f"{PREFIX}{new_name}"
            if new_name != name:
                renamed.append(f"{name} ({new_name})")
            table = table.add_column(place, new_name, values)
            place += 1
        if renamed:
            note(f"image columns renamed, because the table has columns of that name: {shortened(renamed)}")
        return table


def given_columns(splits: Mapping[str, datasets.Dataset], out: Path, others: Collection[str]) -> GivenColumns:
    """The columns of a dataset that a table takes over.

    Args:
        splits: name -> its rows.
        out: the table's file; CSV has lists as text.
        others: columns that are not taken over: of images, and those that the table has anyway.
    """
    types: dict[str, pa.DataType] = {}
    left_out: dict[str, None] = {}
    kept: dict[str, datasets.Dataset] = {}
    for split, rows in splits.items():
        names = [name for name in rows.column_names if name not in others]
        holding_files = [name for name in names if holds_files(rows.features[name])]
        left_out |= dict.fromkeys(holding_files)
        names = [name for name in names if name not in holding_files]
        kept[split] = rows.select_columns(names)
        for name in names:
            kind = type_in_table(rows.features[name], as_text=out.suffix == ".csv")
            types[name] = kind if types.get(name, kind) == kind else pa.string()
    if left_out:
        note(f"columns of images, files or arrays are not in the table: {shortened([*left_out])}")
    return GivenColumns(kept, types)


def arrow_type(feature: Any) -> pa.DataType:
    """The type of a column of a dataset."""
    return datasets.Features({"column": feature}).arrow_schema.field("column").type


def holds_files(feature: Any) -> bool:
    """Whether a column has images, arrays, or files of another kind."""
    return can_hold_images(feature) or "binary" in str(arrow_type(feature))


def type_in_table(feature: Any, as_text: bool) -> pa.DataType:
    """The type of a column in a table: of classes their names, of nothing but nulls text.

    Args:
        as_text: lists and the like are text.
    """
    kind = arrow_type(feature)
    if isinstance(feature, datasets.ClassLabel) or pa.types.is_null(kind):
        return pa.string()
    return pa.string() if as_text and (pa.types.is_nested(kind) or pa.types.is_dictionary(kind)) else kind


def convert(values: pa.Array, feature: Any, kind: pa.DataType) -> pa.Array:
    """Values of a column as the table has them."""
    if isinstance(feature, datasets.ClassLabel):
        names = feature.names
        found = [names[number] if number is not None and number >= 0 else None for number in values.to_pylist()]
        return pa.array(found, kind)
    if values.type == kind:
        return values
    return pa.array([value_as_text(value) for value in values.to_pylist()], kind)


def value_as_text(value: Any) -> str | None:
    """A value as text: a list of texts with `;` between them, other lists and records as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return SEPARATOR.join(value)
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
