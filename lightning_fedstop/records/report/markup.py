"""HTML written from parts: whatever is not markup already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias


class Html(str):
    """Text that is markup already."""


Content: TypeAlias = "Html | str | float | Sequence[Content] | None"

_EMPTY = ("meta", "link", "br", "hr")
_CLASSES = {"l": "text", "w": "text sentence", "r": "number"}
NO_VALUE = "\N{EN DASH}"


def markup(content: Content) -> Html:
    """Content as markup: text and numbers escaped, sequences joined, ``None`` as nothing.

    >>> markup(["a < b", Html("<br>"), 2])
    'a &lt; b<br>2'
    """
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str | int | float):
        return Html(html.escape(str(content)))
    return Html("".join(markup(part) for part in content))


def tag(name: str, /, *content: Content, **attributes: str | int | bool | None) -> Html:
    """An element; ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; ``None`` and ``False`` are none.

    >>> tag("p", "1 & 2", class_="note", id=None)
    '<p class="note">1 &amp; 2</p>'
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written += " " + key.rstrip("_").replace("_", "-")
        written += "" if value is True else f'="{html.escape(str(value))}"'
    inner = markup(content)
    return Html(f"<{name}{written}>" if name in _EMPTY else f"<{name}{written}>{inner}</{name}>")


def table(
    caption: Content,
    header: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    align: str = "",
    groups: Sequence[tuple[Content, int]] = (),
) -> Html:
    """A table that scrolls inside its own box; the first cell of each row is the row's header.

    Args:
        caption: what it shows.
        header: one name a column.
        rows: as many cells as there are columns; ``None`` is shown as a dash.
        align: a letter a column: ``l`` for text that may wrap, ``w`` for sentences, ``r`` for numbers; by default ``l``
            and then ``r``.
        groups: names above several columns, with the number of columns of each (0 columns in all: no such row).
    """
    align = align or "l" + "r" * (len(header) - 1)
    classes = [_CLASSES[letter] for letter in align]
    head: list[Content] = []
    if groups:
        cells = [
            tag("th", name, scope="colgroup", colspan=span) if name else tag("td", colspan=span)
            for name, span in groups
        ]
        head.append(tag("tr", cells))
    head.append(
        tag("tr", [tag("th", name, scope="col", class_=kind) for name, kind in zip(header, classes, strict=True)])
    )
    body: list[Content] = []
    for row in rows:
        cells = [
            tag("td", NO_VALUE if cell is None else cell, class_=kind)
            for cell, kind in zip(row[1:], classes[1:], strict=True)
        ]
        body.append(tag("tr", tag("th", NO_VALUE if row[0] is None else row[0], scope="row", class_=classes[0]), cells))
    inner = tag("table", tag("caption", tag("span", caption)), tag("thead", head), tag("tbody", body))
    # A box that scrolls must be reachable by keyboard and say what it holds.
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=plain(markup(caption)))


def details(summary: Content, *content: Content, open: bool = False, class_: str | None = None) -> Html:
    """Content folded away behind its summary."""
    return tag("details", tag("summary", summary), *content, open=open, class_=class_)


def plain(text: Html) -> str:
    """Markup as text."""
    inside, kept = False, []
    for letter in text:
        if letter in "<>":
            inside = letter == "<"
        elif not inside:
            kept.append(letter)
    return html.unescape("".join(kept))
