"""Figures of a report, for wide and narrow screens, with words and numbers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from lightning_fedstop.records.report import style
from lightning_fedstop.records.report.tables import Table
from lightning_fedstop.utilities.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = {"wide": 8.6, "narrow": 3.7}
"""Inches; text keeps its size, so that a phone gets a drawing of its own."""
_NO_DATE = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}


@dataclass(frozen=True)
class Picture:
    """Figure before it is drawn.

    Attributes:
        name: Of its files and element ids; unique in a report.
        title: A few words on what it shows.
        description: What is to be seen, for readers who do not see it.
        draw: Makes the figure, given its width in inches; called within :func:`figure_style`.
        table: Its numbers.
        caption: How to read it.
    """

    name: str
    title: str
    description: str
    draw: Callable[[float], Figure]
    table: Table
    caption: str

    def svg(self, kind: str) -> Markup:
        """Drawing for a kind of screen, in the page's colours and font."""
        name = f"{self.name}-{kind}"
        text = style.in_page_colours(
            self._described((self._wide if kind == "wide" else self._drawn(kind))[1], name, kind)
        )
        # Several drawings stand in one page: the ids in each begin with its name.
        text = re.sub(rf'\bid="(?!{re.escape(name)}-)', f'id="{name}-', text)
        return Markup(text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-"))

    def write(self, folder: Path) -> list[Path]:
        """Write ``<name>.svg`` and ``<name>.pdf`` and return their paths."""
        paths = [folder / f"{self.name}.svg", folder / f"{self.name}.pdf"]
        figure, svg = self._wide
        with atomic_file(paths[0]) as temporary:
            temporary.write_text(self._described(svg, self.name), "utf-8")
        with figure_style(self.name), atomic_file(paths[1]) as temporary:
            figure.savefig(temporary, format="pdf", metadata={**_NO_DATE["pdf"], "Title": self.title})
        return paths

    @cached_property
    def _wide(self) -> tuple[Figure, str]:
        """Drawn once, for the page and for the files."""
        return self._drawn("wide")

    def _drawn(self, kind: str) -> tuple[Figure, str]:
        """The figure, and its ``svg`` element without prologue, metadata and rules that reach beyond it."""
        with figure_style(f"{self.name}-{kind}"):
            figure, buffer = self.draw(WIDTHS[kind]), io.StringIO()
            figure.savefig(buffer, format="svg", metadata=_NO_DATE["svg"])
            # The layout is found; it need not be sought again for the next file.
            figure.set_layout_engine(None)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
        # Shorter by a third, and the same picture: hundredths of a point are enough.
        text = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\d\.\d\d)\d+", r"\1", match[0]), text)
        return figure, style.in_page_fonts(re.sub(r"\s*\n\s*", "\n", text))

    def _described(self, svg: str, name: str, kind: str | None = None) -> str:
        head, _, rest = svg.partition(">")
        head += f' role="img" aria-labelledby="{name}-title {name}-desc" style="stroke-linejoin: round"'
        head += f' class="{kind}"' if kind else ""
        title = f'<title id="{name}-title">{escape(self.title)}</title>'
        return f'{head}>{title}<desc id="{name}-desc">{escape(self.description)}</desc>{rest}'


@contextmanager
def figure_style(salt: str) -> Iterator[None]:
    """Matplotlib's defaults with the settings of a report, whatever the user's are."""
    import matplotlib.style

    with warnings.catch_warnings(), matplotlib.style.context(["default", style.rc(salt)]):
        # On a very narrow screen the decoration of an axis may need all there is.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def described(lines: Mapping[str, Mapping[float, float]], text: Callable[[float], str | None]) -> str:
    """Where each line of a figure begins and ends.

    Args:
        lines: For each line, the values by place.
        text: Writes a value.

    >>> described({"accuracy": {1: 12.5, 9: 80.0}}, "{:g}".format)
    'accuracy: 12.5 at 1, 80 at 9.'
    """
    ends = {label: (min(values), max(values)) for label, values in lines.items() if values}
    return " ".join(
        f"{label}: {text(lines[label][first])} at {first:g}, {text(lines[label][last])} at {last:g}."
        for label, (first, last) in ends.items()
    )
