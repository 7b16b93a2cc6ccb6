"""Colours, markers and the style sheet of the page.

Figures are drawn in the light colours; in the page each becomes a custom property, so that one SVG follows the reader's
colour scheme. Colours are told apart with any colour vision (after Okabe and Ito, darkened to a contrast of 3 or more)
and never alone: a series also has its own marker and line style.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

# name -> (light, dark)
COLOURS = {
    "page": ("#ffffff", "#14181d"),
    "ink": ("#1c2128", "#e8ebef"),
    "muted": ("#59626e", "#a3adb9"),
    "grid": ("#dde2e8", "#323a44"),
    "blue": ("#0069ad", "#56b4f0"),
    "vermilion": ("#c94f00", "#ff9152"),
    "green": ("#00805c", "#35cb9f"),
    "purple": ("#a8488a", "#e59dcb"),
    "ochre": ("#a36a00", "#edb33b"),
    "sky": ("#2580b3", "#8fd4f7"),
    "grey": ("#6b6b6b", "#b9b9b9"),
    "brown": ("#7a4a2b", "#cf9c7b"),
}
SERIES = ("blue", "vermilion", "green", "purple", "ochre", "sky", "grey", "brown")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (5, 1, 1, 1)), (0, (1, 1)))

RULE_STYLE = {
    "task_vector": ("blue", "o"),
    "val_loss": ("vermilion", "s"),
    "val_acc": ("green", "^"),
    "consensus": ("purple", "D"),
}

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Helvetica Neue', Arial, sans-serif"
_DRAWN_FONTS = re.compile(r"font-family: [^;\"]+|(font: [^;\"]*?px )'[^;\"]+")


def light(name: str) -> str:
    """Return the colour in which figures are drawn."""
    return COLOURS[name][0]


def rc(salt: str) -> dict[str, Any]:
    """Return Matplotlib's settings; ``salt`` makes element ids the same each time."""
    ink, muted, grid = light("ink"), light("muted"), light("grid")
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": muted,
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.labelsize": 9,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "figure.constrained_layout.h_pad": 0.05,
        "figure.constrained_layout.w_pad": 0.05,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "legend.labelcolor": ink,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        "path.simplify": True,
        "pdf.fonttype": 42,
        "savefig.transparent": True,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.color": ink,
        "text.parse_math": False,
        "xtick.color": muted,
        "xtick.labelcolor": ink,
        "xtick.labelsize": 8.5,
        "ytick.color": muted,
        "ytick.labelcolor": ink,
        "ytick.labelsize": 8.5,
    }


def in_page_colours(svg: str) -> str:
    """Replace the colours of a drawn SVG by custom properties of the page."""
    names = {shades[0]: name for name, shades in COLOURS.items()}
    return re.sub("|".join(names), lambda match: f"var(--{names[match[0]]})", svg)


def in_page_fonts(svg: str) -> str:
    """Replace the fonts of a drawn SVG by the reader's own sans-serif font."""
    return _DRAWN_FONTS.sub(lambda match: f"{match[1]}{FONTS}" if match[1] else f"font-family: {FONTS}", svg)


def sheet() -> str:
    """Build the style sheet, both colour schemes first."""
    light_ones, dark_ones = (
        " ".join(f"--{name}: {shades[index]};" for name, shades in COLOURS.items()) for index in (0, 1)
    )
    schemes = (
        f":root {{ color-scheme: light dark; {light_ones} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark_ones} }} }}\n"
    )
    return schemes + files(__package__).joinpath("page.css").read_text(encoding="utf-8")
