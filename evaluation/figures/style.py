"""Style of all figures: readable at the width of a README, by colour-blind readers too."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure

from mpp.runtime.files import complete

VALUE_COLORS = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")  # grey: no value
LINE_COLORS = ("#006BA4", "#FF800E", "#ABABAB", "#595959", "#5F9ED1", "#C85200", "#898989", "#A2C8EC", "#FFBC79")
"""Those of tableau-colorblind10."""
MARKERS = "osD^vPX"
WIDTH = 7.5  # inches
DPI = 110
FALLBACK_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
    *("Hiragino Sans", "PingFang SC", "Apple SD Gothic Neo", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS"),
)
"""Fonts of other scripts, of Linux, macOS and Windows, for letters that matplotlib's own font lacks."""


@cache
def settings_of_figures() -> dict[str, Any]:
    """matplotlib's settings while one of our figures is drawn or written."""
    installed = set(font_manager.get_font_names())
    return {
        "font.family": ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)],
        "text.parse_math": False,  # a user's name with two dollars is not a formula
        "svg.fonttype": "none",  # text stays text, which is smaller
        "svg.hashsalt": "mpp",  # the same figure is the same file
        "pdf.fonttype": 42,  # fonts that journals accept
    }


@contextmanager
def figure_style() -> Iterator[None]:
    """While open, or around a function that draws or writes a figure: our style, instead of the program's."""
    with matplotlib.rc_context(settings_of_figures()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)  # it is drawn as a box
        yield


def style_of_line(number: int) -> dict[str, str]:
    """Colour and marker of the line of this number, from 0."""
    return {"color": LINE_COLORS[number % len(LINE_COLORS)], "marker": MARKERS[number % len(MARKERS)]}


@figure_style()
def write_plot(figure: Figure, folder: Path, name: str) -> list[str]:
    """Write NAME.png for screens and NAME.pdf for papers, and return these file names."""
    files = [f"{name}.png", f"{name}.pdf"]
    for file in files:
        with complete(folder / file) as partial:
            figure.savefig(partial, format=file.rpartition(".")[2], dpi=DPI)
    return files
