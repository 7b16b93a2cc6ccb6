import pytest

from lightning_fedstop.records.report.markup import Html, details, markup, plain, table, tag


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "<script>", Html("<b>1</b>"), 2, None) == "<p>&lt;script&gt;<b>1</b>2</p>"


def test_an_attribute_is_escaped():
    assert tag("p", aria_label='"><script>') == '<p aria-label="&quot;&gt;&lt;script&gt;"></p>'


def test_attributes_that_are_not_there():
    assert tag("details", open=False, id=None, class_="a") == '<details class="a"></details>'
    assert tag("details", open=True) == "<details open></details>"
    assert tag("td", colspan=1) == '<td colspan="1"></td>'


def test_a_sequence_is_joined():
    assert markup(["a", ["&", Html("<br>")]]) == "a&amp;<br>"


def test_a_table_has_a_caption_and_scopes():
    text = table("What & why", ["Run", "Round"], [["a<b", 5], ["c", None]])
    assert "<caption><span>What &amp; why</span></caption>" in text
    assert '<th scope="col" class="text">Run</th><th scope="col" class="number">Round</th>' in text
    assert '<th scope="row" class="text">a&lt;b</th><td class="number">5</td>' in text
    assert '<td class="number">–</td>' in text
    assert text.startswith('<div class="scroll" tabindex="0" role="region" aria-label="What &amp; why">')


def test_groups_of_columns():
    text = table("x", ["a", "b", "c"], [], groups=[("", 1), ("both", 2)])
    assert '<tr><td colspan="1"></td><th scope="colgroup" colspan="2">both</th></tr>' in text


def test_a_row_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError):
        table("x", ["a", "b"], [["1", "2", "3"]])


def test_details_and_plain_text():
    assert details("More", "x") == "<details><summary>More</summary>x</details>"
    assert plain(Html("<b>a</b> &lt; 2")) == "a < 2"
