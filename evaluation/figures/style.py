"""Style of all figures: readable at the width of a README, by colour-blind readers too.

Colours of values are cividis's, and colours of lines those of tableau-colorblind10.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import matplotlib
import matplotlib.style
from matplotlib import font_manager
from matplotlib.figure import Figure

from mpp.runtime.files import complete

VALUE_COLORS = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")  # grey: no value
LINE_COLORS = [style["color"] for style in matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"]]
MARKERS = "osD^vPX"  # of lines, besides their colours
WIDTH = 7.5  # inches
MIN_HEIGHT = 2.4  # inches, for the label of a colour bar
DPI = 110


FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
    *("Hiragino Sans", "PingFang SC", "Apple SD Gothic Neo", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS"),
)
"""Fonts of other scripts, of Linux, macOS and Windows, for letters that matplotlib's own font lacks."""
INSTALLED_FONTS = {font.name for font in font_manager.fontManager.ttflist}
FONTS = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in INSTALLED_FONTS)]
STYLE = {
    "font.family": FONTS,
    "text.parse_math": False,  # a user's name with two dollars is not a formula
    "svg.hashsalt": "mpp",  # the same figure is the same file
    "pdf.fonttype": 42,  # fonts that journals accept
}


@contextmanager
def figure_style() -> Iterator[None]:
    """While open, or around a function that draws or writes a figure: our style, instead of the program's."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)  # see `drawable`
        yield


@cache
def drawable_letters() -> frozenset[int]:
    """Code points of the letters that the fonts of figures have."""
    letters: set[int] = set()
    for family in FONTS:
        letters |= set(font_manager.get_font(font_manager.findfont(family)).get_charmap())
    return frozenset(letters)


def drawable(text: str, substitute: str) -> str:
    """The text; or the substitute, where no font of this machine has all its letters."""
    return text if set(map(ord, text)) <= drawable_letters() else substitute


def legend_name(text: str) -> str:
    """The text as a legend has it: matplotlib leaves out those that begin with an underscore."""
    return f" {text}" if text.startswith("_") else text


def color_of_line(number: int) -> str:
    """Colour of the line of this number, from 0."""
    return LINE_COLORS[number % len(LINE_COLORS)]


def marker_of_line(number: int) -> str:
    """Marker of the line of this number, from 0."""
    return MARKERS[number % len(MARKERS)]


@figure_style()
def write_plot(figure: Figure, folder: Path, name: str) -> list[str]:
    """Write NAME.png for screens and NAME.pdf for papers, and return these file names."""
    files = [f"{name}.png", f"{name}.pdf"]
    for file in files:
        with complete(folder / file) as partial:
            figure.savefig(partial, format=file.rpartition(".")[2], dpi=DPI)
    return files
