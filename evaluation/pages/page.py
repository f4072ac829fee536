"""A self-contained HTML page: blocks in, one file out. It loads nothing, and runs nothing.

Text is escaped by jinja2, whatever it is: a file name, a label, a setting. Charts are inline SVG, in the colour of the
page's text; pictures are data URIs.
"""

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from evaluation.figures import DPI
from mpp.runtime.files import write_complete

TEMPLATE = "page.html"
INK = "#010203"  # stands for the colour of the page's text, which no chart knows
CHART_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"},
    **{"legend.facecolor": "none", "legend.edgecolor": "none", "legend.framealpha": 0.0, "text.parse_math": False},
}
QUALITY = 85  # of JPEG


@dataclass(frozen=True)
class Link:
    """A cell of a table that leads somewhere: a place in the page, or a page beside it."""

    text: str
    to: str


@dataclass(frozen=True)
class Table:
    """Numbers, for whoever reads rather than looks."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Link | list[Link]]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawing of numbers, with the numbers below it."""

    title: str
    svg: Markup
    table: Table | None = None


@dataclass(frozen=True)
class Picture:
    """Pixels."""

    source: str
    """A data URI."""
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph; `code`: as it is typed."""

    text: str
    code: bool = False


Block = Table | Chart | Picture | Text


@dataclass
class Section:
    """A part of a page."""

    name: str
    """Its anchor."""
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Page:
    """What a report says."""

    title: str
    subtitle: str
    verdict: Sequence[tuple[str, Link | None]]
    """Sentences, with what says so."""
    warnings: Sequence[str]
    sections: Sequence[Section]
    missing: dict[str, str]
    """What the page would have, and why it has not."""


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


def chart(title: str, draw: Callable[[], Figure], table: Table | None = None) -> Chart:
    """A figure as inline SVG: names that are its own, colours of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**CHART_STYLE, "svg.hashsalt": title}):
        draw().savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    prefix = re.sub(r"\W+", "_", title)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}_", text).replace(INK, "currentColor")
    text = re.sub(r'(<svg)[^>]*?(viewBox="[^"]*")[^>]*>', r"\1 \2" + ROLE, text, count=1)
    text = text.replace("xlink:href", "href").replace("@TITLE@", str(Markup.escape(title)))
    return Chart(title, Markup(text), table)


ROLE = ' role="img" aria-label="@TITLE@" xmlns="http://www.w3.org/2000/svg">'


def picture_of(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A figure as a picture, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    with Image.open(buffer) as image:
        return picture(image, alt, caption)


def picture(image: Image.Image, alt: str, caption: str = "") -> Picture:
    """Pixels as a JPEG, or as a PNG where that is smaller, as of few colours."""
    image, found = image.convert("RGB"), []
    for kind, options in (("jpeg", {"quality": QUALITY, "subsampling": 0}), ("png", {"optimize": True})):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        found.append(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return Picture(min(found, key=len), alt, caption)
