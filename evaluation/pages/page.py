"""A self-contained HTML page: blocks in, one file out. It loads no other file and runs no script.

jinja2 escapes all text: file names, labels, settings. Charts (SVG) and pictures are data URIs.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from evaluation.figures.style import DPI, figure_style
from mpp.runtime.files import write_complete

TEMPLATE = "page.html"
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Link:
    """A link in a cell of a table or in the verdict: to a section of the page, or to a file next to it."""

    text: str
    to: str


@dataclass(frozen=True)
class ColorKey:
    """A cell of a legend: text behind a patch of its colour."""

    text: str
    color: str
    """In hexadecimal: "#800000"."""


@dataclass(frozen=True)
class Table:
    """Rows of text, links and colours under headings; a folded one opens on a click."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Link | list[Link] | ColorKey]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart as an SVG image, with its numbers in a table below."""

    title: str
    source: str
    """A data URI."""
    table: Table | None = None


@dataclass(frozen=True)
class Picture:
    """An image of pixels, as opposed to a chart."""

    source: str
    """A data URI."""
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class PictureGrid:
    """Small pictures side by side, each with its caption."""

    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Text:
    """A paragraph, or with `code` a block of code."""

    text: str
    code: bool = False


Block = Table | Chart | Picture | PictureGrid | Text


@dataclass(frozen=True)
class Missing:
    """Content that a section lacks: the page lists it at its end."""

    content: str
    reason: str


@dataclass
class Section:
    """A titled section of a page."""

    name: str
    """The anchor of links to it."""
    title: str
    blocks: list[Block | Missing] = field(default_factory=list)


@dataclass
class Page:
    """The content of a page."""

    title: str
    subtitle: str
    verdict: Sequence[tuple[str, Link | None]]
    """Sentences, each with a link to its evidence."""
    warnings: Sequence[str]
    sections: Sequence[Section]
    missing: dict[str, str]
    """Missing content, and the reasons."""


def without_missing(sections: Sequence[Section]) -> tuple[list[Section], dict[str, str]]:
    """The sections that have content, and the missing content of all sections with the reasons."""
    shown = []
    missing = {}
    for section in sections:
        missing |= {block.content: block.reason for block in section.blocks if isinstance(block, Missing)}
        blocks = [block for block in section.blocks if not isinstance(block, Missing)]
        if blocks:
            shown.append(Section(section.name, section.title, blocks))
    return shown, missing


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


@figure_style()
def chart(title: str, figure: Figure, table: Table | None = None) -> Chart:
    """A figure as an SVG image, with the numbers behind it."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text, which is smaller
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Chart(title, data_uri("svg+xml", buffer.getvalue()), table)


def data_uri(kind: str, content: bytes) -> str:
    """An image of a MIME type `image/kind` as the source of an <img>."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@figure_style()
def figure_as_picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A figure as a picture, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    with Image.open(buffer) as image:
        return image_as_picture(image, alt, caption)


def image_as_picture(image: Image.Image, alt: str, caption: str = "") -> Picture:
    """An image as a JPEG, or as a PNG where that is smaller, as with few colours."""
    image = image.convert("RGB")
    jpeg = io.BytesIO()
    image.save(jpeg, "jpeg", quality=JPEG_QUALITY, subsampling=0)
    png = io.BytesIO()
    image.save(png, "png", optimize=True)
    sources = [data_uri("jpeg", jpeg.getvalue()), data_uri("png", png.getvalue())]
    return Picture(min(sources, key=len), alt, caption)
