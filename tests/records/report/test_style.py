import pytest

from lightning_fedstop.records.report import style


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_contrast_is_enough_to_read(index):
    page = style.COLOURS["page"][index]
    for name in style.SERIES:
        assert contrast(style.COLOURS[name][index], page) >= 3, name
    for name in ("ink", "muted", "blue", "vermilion"):  # also used for text
        assert contrast(style.COLOURS[name][index], page) >= 4.5 - (name == "vermilion"), name


def test_every_series_and_rule_is_told_apart_without_colour():
    looks = [style.MARKERS[i % len(style.MARKERS)] for i in range(10)]
    assert len(set(looks)) == 10
    assert len({marker for _, marker in style.RULE_STYLE.values()}) == len(style.RULE_STYLE)


def test_light_colours_are_unique_so_that_each_becomes_one_property():
    assert len({shades[0] for shades in style.COLOURS.values()}) == len(style.COLOURS)
    assert style.in_page_colours("fill: #1c2128; stroke: #123456") == "fill: var(--ink); stroke: #123456"


def test_fonts_are_the_readers_own():
    drawn = "style=\"font-size: 9px; font-family: 'DejaVu Sans', sans-serif; text-anchor: end\""
    assert "DejaVu" not in style.in_page_fonts(drawn)
    assert style.in_page_fonts(drawn).endswith('text-anchor: end"')
