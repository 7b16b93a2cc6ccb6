import pytest

from lightning_fedstop._cli_config import check_configs
from tests.cli_tools import CONF


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must hold keys such as `trainer:`, but holds nothing"),
        (b"- 1", "must hold keys such as `trainer:`, but holds [1]"),
        (b"trainer: {", "it is not YAML"),
        (b"trainer:", "`trainer:` must hold keys of its own, but holds nothing"),
        (b"trainer: [1]", "`trainer:` must hold keys of its own, but holds [1]"),
        (b"model: 3", "`model:` must hold keys of its own, but holds 3"),
        (b"trainer: {}  # caf\xe9", "it is not text in UTF-8"),
        (b"trainer: {max_rounds: 2, max_rounds: 3}", "'max_rounds' is there twice, in line 1, column 26"),
        (b"trainer: {}\nmodel: A\ntrainer: {}", "'trainer' is there twice, in line 3, column 1"),
    ],
)
@pytest.mark.parametrize("words", [["-c"], ["--config"], ["--config="]])
def test_a_file_of_the_wrong_shape_is_refused_by_its_name(tmp_path, content, says, words):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    args = [*words, str(path)] if words != ["--config="] else [f"--config={path}"]
    with pytest.raises(ValueError, match=r"x\.yaml: ") as error:
        check_configs(["fit", "--config", str(CONF / "tiny.yaml"), *args])
    assert says in str(error.value)


def test_what_is_no_file_is_left_to_the_parser(tmp_path):
    check_configs(
        ["fit", "--config", "trainer: {max_rounds: 2}", "--config", "none.yaml", "--config", str(tmp_path), "-c"]
    )


def test_an_anchor_may_be_used_twice(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("trainer: &t {max_rounds: 2}\nmodel: {<<: *t, max_rounds: 3}\n")
    check_configs(["fit", "--config", str(path)])
