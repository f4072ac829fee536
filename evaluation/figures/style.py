"""Style of all figures: readable at the width of a README, by colour-blind readers too.

Colours of values are cividis's, and colours of lines those of tableau-colorblind10.
"""

import matplotlib
import matplotlib.style

matplotlib.rcParams["svg.hashsalt"] = "mpp"  # the same figure is the same file
matplotlib.rcParams["text.parse_math"] = False  # a user's name with two dollars is not a formula
VALUE_COLORS = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")  # grey: no value
LINE_COLORS = [style["color"] for style in matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"]]
MARKERS = "osD^vPX"  # of lines, beside their colours
WIDTH = 7.5  # inches
MIN_HEIGHT = 2.4  # inches, for the label of a colour bar
DPI = 110


def color_of_line(number: int) -> str:
    """Colour of the line of this number, from 0."""
    return LINE_COLORS[number % len(LINE_COLORS)]


def marker_of_line(number: int) -> str:
    """Marker of the line of this number, from 0."""
    return MARKERS[number % len(MARKERS)]
