"""A self-contained HTML page: blocks in, one file out. It loads no other file and runs no script.

jinja2 escapes all text: file names, labels, settings. Figures (SVG) and pictures (JPEG) are data URIs.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from evaluation.figures.charts import figure_style
from mpp.runtime.files import write_complete

TEMPLATE = "page.html"
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Link:
    """A link in a cell of a table or in the verdict: to a section of the page, or to a file next to it."""

    text: str
    to: str


@dataclass(frozen=True)
class Table:
    """Rows of text and links under headings; a folded one opens on a click."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Link | list[Link]]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """An image, below its title."""

    source: str
    """A data URI."""
    title: str
    table: Table | None = None
    """The numbers in it."""


@dataclass(frozen=True)
class Text:
    """A paragraph, or with `code` a block of code."""

    text: str
    code: bool = False


Block = Table | Picture | Text


@dataclass
class Section:
    """A titled section of a page."""

    name: str
    """The anchor of links to it."""
    title: str
    blocks: list[Block] = field(default_factory=list)
    in_columns: bool = False
    """Whether blocks stand side by side where there is room."""


@dataclass
class Page:
    """The content of a page."""

    title: str
    subtitle: str
    verdict: Sequence[tuple[str, Link | None]]
    """Sentences, each with a link to its evidence."""
    warnings: Sequence[str]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(page=page)


def write_page(path: Path, page: Page) -> None:
    """Write the page, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_complete(path, render(page))


def data_uri(kind: str, content: bytes) -> str:
    """An image of a MIME type `image/kind` as the source of an <img>."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@figure_style()
def figure_as_picture(figure: Figure, title: str, table: Table | None = None) -> Picture:
    """A figure as SVG, with the numbers behind it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Picture(data_uri("svg+xml", buffer.getvalue()), title, table)


def image_as_picture(file: Path, title: str) -> Picture:
    """The image of a file, as a JPEG."""
    jpeg = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").save(jpeg, "jpeg", quality=JPEG_QUALITY, subsampling=0)
    return Picture(data_uri("jpeg", jpeg.getvalue()), title)
