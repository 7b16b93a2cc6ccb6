import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_fedstop.records.run_record import COLUMNS, RunRecord, read_rounds
from lightning_fedstop.utilities.files import atomic_file


def rows(record):
    return [{k: v for k, v in row.items() if v} for row in read_rounds(f"{record.log_dir}/metrics.csv")]


def test_versions_count_up_and_look_like_a_lightning_logger(tmp_path):
    (tmp_path / "lightning_logs/version_7").mkdir(parents=True)
    (tmp_path / "lightning_logs/version_x").mkdir()
    records = [RunRecord(tmp_path) for _ in range(2)]
    assert [record.version for record in records] == [8, 9]
    assert records[0].log_dir == str(tmp_path / "lightning_logs/version_8")
    assert (records[0].save_dir, records[0].name) == (str(tmp_path), "lightning_logs")
    assert records[0].root_dir == str(tmp_path / "lightning_logs")
    assert RunRecord(tmp_path, version=3).version == 3


def test_runs_that_start_together_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda _: RunRecord(tmp_path).version, range(32)))
    assert sorted(versions) == list(range(32))


def test_rows_have_the_known_columns_first_and_all_digits(tmp_path):
    record = RunRecord(tmp_path)
    record.write_round({"round": 1, "train_loss": 0.1 + 0.2, "task_vector/distance": 2.0, "lr": 1e-20})
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert header == ",".join(COLUMNS)
    assert rows(record) == [{"round": "1", "train_loss": "0.30000000000000004", "distance": "2", "lr": "1e-20"}]


def test_new_names_become_new_columns_and_old_rows_stay(tmp_path):
    record = RunRecord(tmp_path)
    record.write_round({"round": 1, "train_loss": 1})
    record.write_round({"round": 2, "my/metric": float("nan")})
    record.write_round({"round": 3})
    assert rows(record) == [{"round": "1", "train_loss": "1"}, {"round": "2", "my/metric": "nan"}, {"round": "3"}]


@pytest.mark.parametrize(
    ("last_row", "round", "expected"),
    [
        (None, 2, ["1:a", "2:b"]),
        ({"round": 2, "train_loss": 0.5}, 2, ["1:a", "2:b"]),
        ({"round": 4, "train_loss": 0.5}, 4, ["1:a", "2:b", "3:c", "4:0.5"]),
        (None, 0, []),
    ],
)
def test_a_continued_run_begins_with_the_rows_it_continues(tmp_path, last_row, round, expected):
    earlier, record = RunRecord(tmp_path), RunRecord(tmp_path)
    for number, loss in enumerate("abc", start=1):
        earlier.write_round({"round": number, "train_loss": loss, "extra": 1})
    before = rows(earlier)
    record.continue_from(earlier.log_dir, last_row, round)
    record.write_round({"round": 9, "train_loss": "z"})
    assert [f"{row['round']}:{row['train_loss']}" for row in rows(record)] == [*expected, "9:z"]
    assert rows(earlier) == before


def test_a_run_continued_from_elsewhere_has_the_row_of_its_checkpoint(tmp_path):
    record = RunRecord(tmp_path)
    record.continue_from(str(tmp_path / "gone"), {"round": 2, "train_loss": 1.5}, 2)
    assert rows(record) == [{"round": "2", "train_loss": "1.5"}]


def test_summary_and_unused_logger_methods(tmp_path):
    record = RunRecord(tmp_path)
    record.write_summary({"stop_round": 3})
    assert json.loads((tmp_path / "lightning_logs/version_0/summary.json").read_text()) == {"stop_round": 3}
    record.log_metrics({"a": 1.0}, step=1)
    record.log_hyperparams({"a": 1})
    assert len(list((tmp_path / "lightning_logs/version_0").iterdir())) == 1


def test_atomic_file_leaves_the_former_one_on_an_error(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")

    def breaks():
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert path.read_text() == "old"
    with atomic_file(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
