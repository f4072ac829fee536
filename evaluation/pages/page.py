"""A self-contained HTML page: blocks in, one file out. It loads no other file and runs no script.

jinja2 escapes all text: file names, labels, settings. Figures (SVG) and pictures (PNG) are data URIs.
"""

import base64
import io
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

import mpp
from evaluation.figures.charts import figure_style
from mpp.runtime.files import write_complete

TEMPLATE = "page.html"
LIBRARIES = ("torch", "timm", "accelerate", "datasets", "numpy")


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """An image, below its title."""

    source: str
    """A data URI."""
    title: str


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
    verdict: Sequence[tuple[str, str]]
    """Sentences, each with the name of the section that shows it; "": none does."""
    warnings: Sequence[str]
    sections: Sequence[Section]


def write_page(path: Path, page: Page) -> None:
    """Write the page, complete or not at all."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_complete(path, environment.get_template(TEMPLATE).render(page=page))


@figure_style()
def figure_as_picture(figure: Figure, title: str) -> Picture:
    """A figure as SVG."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Picture(data_uri("svg+xml", svg.getvalue()), title)


def image_as_picture(file: Path, title: str) -> Picture:
    """The image of a PNG file."""
    return Picture(data_uri("png", file.read_bytes()), title)


def data_uri(kind: str, image: bytes) -> str:
    """An image of a MIME type `image/kind` as the source of an <img>."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def recorded_versions() -> dict[str, str]:
    """Versions of mpp, Python and the libraries in this process; results that it took over may be of others."""
    own = {"mpp": mpp.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}
