"""A figure of a report: drawn once for wide and once for narrow screens, described in words, with its numbers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fedstop.records.atomic import atomic_file
from lightning_fedstop.records.report import style
from lightning_fedstop.records.report.markup import Content, Html, details, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 8.6
NARROW = 3.7
_SVG_DATE = {"Date": None, "Creator": None}
_PDF_DATE = {"CreationDate": None, "Creator": None, "Producer": None}


@dataclass(frozen=True)
class Picture:
    """A figure before it is drawn.

    Attributes:
        name: of its files and element ids; unique in a report.
        title: what it shows, a few words.
        description: what is to be seen, for who does not see it.
        draw: makes the figure, given its width in inches; called within :func:`figure_style`.
        table: its numbers.
        caption: how to read it; the title by default.
    """

    name: str
    title: str
    description: str
    draw: Callable[[float], Figure]
    table: Content
    caption: Content = None

    def html(self) -> Html:
        """The figure with its caption and its numbers behind a fold."""
        return tag(
            "figure",
            self._inline(self._wide[1], "wide"),
            self._inline(self._svg_of(NARROW, "narrow")[1], "narrow"),
            tag("figcaption", self.caption or self.title),
            details("The numbers of this figure", self.table, class_="numbers"),
        )

    def write(self, folder: Path) -> list[Path]:
        """Write ``<name>.svg`` and ``<name>.pdf`` and return their paths."""
        paths = [folder / f"{self.name}.svg", folder / f"{self.name}.pdf"]
        figure, svg = self._wide
        with atomic_file(paths[0]) as temporary:
            temporary.write_text(described(svg, self.name, self.title, self.description), "utf-8")
        with figure_style(self.name), atomic_file(paths[1]) as temporary:
            figure.savefig(temporary, format="pdf", metadata={**_PDF_DATE, "Title": self.title})
        return paths

    @cached_property
    def _wide(self) -> tuple[Figure, str]:
        """Drawn once, for the page and for the files."""
        return self._svg_of(WIDE, "wide")

    def _svg_of(self, width: float, kind: str) -> tuple[Figure, str]:
        with figure_style(f"{self.name}-{kind}"):
            figure = self.draw(width)
            svg = _svg(figure)
            # The layout is found; it need not be sought again for the next file.
            figure.set_layout_engine(None)
            return figure, svg

    def _inline(self, svg: str, kind: str) -> Html:
        name = f"{self.name}-{kind}"
        told = described(svg, name, self.title, self.description, kind)
        return Html(style.in_page_colours(with_own_ids(told, name)))


@contextmanager
def figure_style(salt: str) -> Iterator[None]:
    """Matplotlib's defaults with the settings of a report, whatever the user's are."""
    import matplotlib.style

    with warnings.catch_warnings(), matplotlib.style.context(["default", style.rc(salt)]):
        # On a very narrow screen the decoration of an axis may need all there is.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def _svg(figure: Figure) -> str:
    """The ``svg`` element of a figure, without prologue, metadata and rules that would reach beyond it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_SVG_DATE)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    # Shorter by a third, and the same picture: hundredths of a point are enough.
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\d\.\d\d)\d+", r"\1", match[0]), text)
    return style.in_page_fonts(re.sub(r"\s*\n\s*", "\n", text))


def described(svg: str, name: str, title: str, description: str, kind: str | None = None) -> str:
    """An SVG that says what it shows."""
    head, _, rest = svg.partition(">")
    head += f' role="img" aria-labelledby="{name}-title {name}-desc" style="stroke-linejoin: round"'
    head += f' class="{kind}"' if kind else ""
    return f"{head}>{tag('title', title, id=f'{name}-title')}{tag('desc', description, id=f'{name}-desc')}{rest}"


def with_own_ids(svg: str, name: str) -> str:
    """An SVG whose element ids begin with its name, so that several can stand in one page."""
    own = f"{name}-"
    prefixed = re.sub(rf'\bid="(?!{re.escape(own)})', f'id="{own}', svg)
    return prefixed.replace('href="#', f'href="#{own}').replace("url(#", f"url(#{own}")
