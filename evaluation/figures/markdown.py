"""Tables of text, in Markdown."""


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    headings, *rows = [[" ".join(cell.splitlines()).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    rule = ["-" * widths[0]]
    rule += ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for line in (headings, rule, *rows):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def without_empty_columns(headings: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have no value ("-" in all rows); with all columns where none has one."""
    places = range(len(headings))
    kept = [place for place in places if any(row[place] != "-" for row in rows)] or places
    return [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]
