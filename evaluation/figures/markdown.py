"""Tables of text, in Markdown."""

from itertools import compress


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    lines = [[" ".join(cell.splitlines()).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    text = []
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def without_empty_columns(headings: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have no value ("-" in all rows); with all columns where none has one."""
    has_value = [any(row[place] != "-" for row in rows) for place in range(len(headings))]
    if not any(has_value):
        return headings, rows
    return [*compress(headings, has_value)], [[*compress(row, has_value)] for row in rows]
