"""The report in a real browser."""

import pytest

pytestmark = pytest.mark.browser

BOXES = """[...document.querySelectorAll('figure')].map(figure =>
    [...figure.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect())
        .filter(box => box.width > 0).map(box => [box.width, box.height]))"""
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(element =>
    !element.closest('.scroll') && element.getBoundingClientRect().right > innerWidth + 1
    && getComputedStyle(element).display != 'none').map(element => element.outerHTML.slice(0, 80))"""
COLOURS = """(() => { const of = (element, name) => getComputedStyle(element)[name];
    const label = document.querySelector('figure svg text');
    return [of(document.body, 'backgroundColor'), of(document.body, 'color'), of(label, 'fill')]; })()"""


@pytest.fixture
def show(browser, compared):
    def show(width, **options):
        browser.complaints.clear()
        browser.asked.clear()
        browser.show(compared.page, width, **options)

    return show


@pytest.mark.parametrize("width", [1200, 768, 360])
def test_it_renders_without_complaint(show, browser, compared, width):
    show(width, mobile=width == 360)
    assert browser.evaluate("document.querySelector('h1').textContent") == "When to stop: 4 runs compared"
    assert browser.complaints == []
    assert browser.asked == [compared.page.resolve().as_uri()]


@pytest.mark.parametrize("width", [1200, 360])
def test_each_figure_is_there_once(show, browser, width):
    show(width)
    boxes = browser.evaluate(BOXES)
    assert len(boxes) == 8
    for drawings in boxes:
        assert len(drawings) == 1
        assert drawings[0][0] > 0.8 * min(width, 900) - 50
        assert drawings[0][1] > 100


def test_nothing_is_wider_than_a_phone(show, browser):
    show(360, mobile=True)
    browser.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") == 360
    assert browser.evaluate(TOO_WIDE) == []


def test_tables_scroll_in_their_boxes_and_their_captions_stay_in_sight(show, browser):
    show(360, mobile=True)
    assert browser.evaluate("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
    widths = browser.evaluate(
        "[...document.querySelectorAll('caption span')].map(c => c.getBoundingClientRect().right)"
    )
    assert max(widths) <= 360


def test_text_in_figures_is_large_enough_on_a_phone(show, browser):
    show(360, mobile=True)
    heights = browser.evaluate(
        "[...document.querySelectorAll('svg.narrow text')].map(t => t.getBoundingClientRect())"
        ".filter(box => box.height > 0).map(box => Math.max(box.height, box.width))"
    )
    assert min(heights) >= 9


def test_it_follows_the_colour_scheme(show, browser):
    show(1200)
    assert browser.evaluate(COLOURS) == ["rgb(255, 255, 255)", "rgb(28, 33, 40)", "rgb(28, 33, 40)"]
    show(1200, dark=True)
    assert browser.evaluate(COLOURS) == ["rgb(20, 24, 29)", "rgb(232, 235, 239)", "rgb(232, 235, 239)"]


def test_it_prints(show, browser, tmp_path):
    show(1200, dark=True)
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_an_image_of_a_figure_stands_alone(browser, compared, tmp_path):
    svg = next(path for path in compared.figures if path.name == "curves-1.svg")
    browser.complaints.clear()
    browser.show(svg, 800)
    assert browser.evaluate("document.documentElement.getBoundingClientRect().width") > 300
    assert browser.complaints == []


def test_tables_on_runs_fit_a_laptop(show, browser):
    show(1100)
    cut = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
        ".map(box => box.getAttribute('aria-label'))"
    )
    assert not {"The runs and how they ended", "What the runs cost, all rounds together"}.intersection(cut)
