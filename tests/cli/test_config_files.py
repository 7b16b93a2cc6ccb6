import pytest
import yaml

from lightning_fedstop.cli.config_files import is_named, read_configs
from lightning_fedstop.cli.main import main
from tests.cli_tools import CONF


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must hold keys such as `trainer:`, but holds null"),
        (b"- 1", "must hold keys such as `trainer:`, but holds [1]"),
        (b"trainer: {", "it is not plain YAML"),
        (b"trainer:", "`trainer:` must hold keys of its own, but holds null"),
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
        read_configs(["fit", "--config", str(CONF / "tiny.yaml"), *args])
    assert says in str(error.value)


def test_what_is_no_file_is_left_to_the_parser(tmp_path):
    read_configs(
        ["fit", "--config", "trainer: {max_rounds: 2}", "--config", "none.yaml", "--config", str(tmp_path), "-c"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "trainer: &t {max_rounds: 2}\nmodel: {<<: *t, max_rounds: 3}\n",
        "trainer: {<<: &a {max_rounds: 4, local_epochs: 2}, max_rounds: 5}",
        "trainer: {<<: [&a {max_rounds: 4}, &b {<<: *a, max_rounds: 6}], max_rounds: 5}",
        "model: {x: {y: &b {<<: &a {lr: 3}, lr: 4}}}\ndata: {<<: *b, lr: 5}\n",
        "data: {<<: &b {<<: &a {lr: 3}, lr: 4}, lr: 5}\nmodel: {x: {y: *b}}\ntrainer: *b",
    ],
)
def test_anchors_and_merged_keys_with_overrides(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    read_configs(["fit", "--config", str(path)])
    read_configs(["fit", "--config", text])


@pytest.mark.parametrize("form", [["--config", "{}"], ["-c", "{}"], ["--config={}"]])
def test_a_configuration_as_text_may_be_long(capsys, form):
    text = f"trainer:\n  max_rounds: 7  # {'x' * 4000}\n  local_epochs: 3\n"
    with pytest.raises(SystemExit) as exit:
        main(["fit", *(word.replace("{}", text) for word in form), "--print_config"])
    assert exit.value.code == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["max_rounds"], trainer["local_epochs"]) == (7, 3)
    args = ["fit", "--config", text]
    assert is_named("trainer", args, read_configs(args))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {max_rounds: 8, max_rounds: 9}", "'max_rounds' is there twice"),
        ("trainer: [1]", "`trainer:` must hold keys of its own"),
        pytest.param("[" * 100_000, "nested too deeply", id="brackets"),
    ],
)
def test_a_configuration_as_text_is_checked_as_a_file_is(tmp_path, text, says):
    with pytest.raises(ValueError, match="--config: ") as error:
        read_configs(["fit", "--config", text])
    assert says in str(error.value)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"x\.yaml: ") as error:
        read_configs(["fit", "--config", str(tmp_path / "x.yaml")])
    assert says in str(error.value)
