import codecs
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fedstop.records.reader import Record, find_records, read_record, read_records
from lightning_fedstop.records.run_record import COLUMNS, RunRecord

OWN = "round,distance,growth_rate,wait_count"


@pytest.fixture
def table(tmp_path):
    """Writes a text or bytes to a file and reads it as a record."""

    def read(content, name="log.csv", **arguments):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_record(file, **arguments)

    return read


def make_run(root, rounds=3, version=None, **summary):
    record = RunRecord(root, version=version)
    for number in range(1, rounds + 1):
        record.write_round({"round": number, "distance": 1.0 + number, "val_loss": 0.5 if number % 2 == 0 else None})
    if summary:
        record.write_summary(summary)
    return Path(record.log_dir)


def test_reading_imports_none_of_the_heavy_libraries():
    code = (
        "import sys, lightning_fedstop.records.reader, lightning_fedstop.records.replay, lightning_fedstop.records;"
        "heavy = {'torch', 'lightning', 'numpy', 'pandas', 'jsonargparse', 'rich', 'yaml'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_record_of_this_package_comes_back_as_it_was_written(tmp_path):
    folder = make_run(tmp_path, rounds=3, budget=10, stop_round=3)
    (folder / "config.yaml").write_text("trainer: {max_rounds: 7}\nseed_everything: 3\n")
    record = read_record(folder)
    assert (record.name, record.folder, record.rounds, record.budget) == (str(folder), folder, [1, 2, 3], 10)
    assert record.columns["distance"] == [2.0, 3.0, 4.0]
    assert record.summary == {"budget": 10, "stop_round": 3}
    assert record.config["seed_everything"] == 3
    assert set(record.columns) == set(COLUMNS) - {"round"}
    assert all(len(values) == 3 for values in record.columns.values())
    assert record.notes == ()
    assert not record.unreadable


def test_every_bit_of_a_number_survives(tmp_path):
    values = [0.1 + 0.2, math.pi * 1e300, 5e-324, 2**53 + 2.0, 1 / 3]
    record = RunRecord(tmp_path)
    for number, value in enumerate(values, start=1):
        record.write_round({"round": number, "distance": value})
    assert read_record(record.log_dir).columns["distance"] == values


def test_an_empty_field_is_no_measurement_but_a_written_nan_is(table):
    record = table("round,distance,val_loss\n1,1.0,\n2,nan,0.5\n3,inf,NA\n4,,NaN\n")
    assert record.measured("distance") == ([1, 2, 3], pytest.approx([1.0, math.nan, math.inf], nan_ok=True))
    assert record.measured("val_loss") == ([2, 4], pytest.approx([0.5, math.nan], nan_ok=True))
    assert math.isnan(record.columns["distance"][3])
    with pytest.raises(ValueError, match="has no column 'val_acc'; it has round, distance, val_loss"):
        record.measured("val_acc")


# --- a run that was killed


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_row_cut_by_a_kill_is_left_out(table, cut):
    whole = f"{OWN},lr\r\n1,1.5,nan,0,0.25\r\n2,1.75,0.16,0,"
    record = table((whole + "0.125\r\n")[:-cut].encode(), name="metrics.csv")
    is_whole = cut == 1  # all but the line feed is there
    assert record.rounds == ([1, 2] if is_whole else [1])
    assert record.notes == (() if is_whole else ("line 3, the last one, is cut short and was left out",))


def test_a_last_row_without_a_newline_counts_in_files_of_others_if_it_is_whole(table):
    assert table("round,distance\n1,2\n2,3").rounds == [1, 2]
    assert table("round,distance,x\n1,2,0\n2,3").rounds == [1]
    assert table('round,distance,x\n1,2,a\n2,3,"b').rounds == [1]


def test_zeros_that_a_disk_keeps_after_a_power_cut_are_no_row(table):
    assert table(b"round,distance\n1,2\n2,3\n" + b"\0" * 100).rounds == [1, 2]


@pytest.mark.parametrize("text", ["", "\n \n", "\0\0"])
def test_an_empty_file_is_refused(table, text):
    with pytest.raises(ValueError, match="is empty"):
        table(text)


@pytest.mark.parametrize("text", [f"{OWN}\r\n", OWN, f"{OWN}\r\n1,0."])
def test_a_file_without_a_finished_round_is_refused(table, text):
    with pytest.raises(ValueError, match="has a header but no round; the run may have been killed in its first"):
        table(text)


@pytest.mark.parametrize("text", ['{"budget": 1', "[1, 2]", "", pytest.param("[" * 100_000, id="brackets"), "\0"])
@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_a_half_written_summary_or_configuration_does_not_prevent_reading(tmp_path, text, name):
    folder = make_run(tmp_path)
    (folder / name).write_text(text)
    record = read_record(folder)
    assert (record.rounds, record.summary, record.config, record.budget) == ([1, 2, 3], {}, {}, 3)
    assert record.notes[0].startswith(f"{name} cannot be read")


def test_a_configuration_of_undecodable_bytes_does_not_prevent_reading(tmp_path):
    folder = make_run(tmp_path)
    (folder / "config.yaml").write_bytes(b"trainer: \xff\xfe\x00")
    assert read_record(folder).config == {}


@pytest.mark.parametrize(
    ("summary", "config", "budget"),
    [
        ({"budget": 50}, "trainer: {max_rounds: 40}", 50),
        ({}, "trainer: {max_rounds: 40}", 40),
        ({"budget": "many"}, "trainer: {max_rounds: 40}", 40),
        ({"budget": True}, "trainer: 3", 3),
        ({"budget": -1}, "trainer: {max_rounds: null}", 3),
        ({"budget": 2}, "{}", 3),  # less than there are rounds
    ],
)
def test_the_budget_is_the_summary_s_else_the_configuration_s_else_the_last_round(tmp_path, summary, config, budget):
    folder = make_run(tmp_path)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(config)
    assert read_record(folder).budget == budget


def test_another_budget_may_be_asked_for(tmp_path):
    folder = make_run(tmp_path, rounds=5, budget=50)
    assert read_record(folder, budget=80).budget == 80
    shorter = read_record(folder, budget=2)
    assert (shorter.rounds, shorter.budget, shorter.columns["distance"]) == ([1, 2], 2, [2.0, 3.0])
    for wrong in (0, -1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match="`budget` must be an integer"):
            read_record(folder, budget=wrong)


def test_summary_and_configuration_beside_a_file_of_another_name_are_not_its_own(tmp_path):
    (tmp_path / "summary.json").write_text('{"budget": 99}')
    (tmp_path / "log.csv").write_text("round,distance\n1,2\n")
    assert read_record(tmp_path / "log.csv").budget == 1


# --- rounds


def test_rounds_out_of_order_are_sorted_and_it_is_said(table):
    record = table("round,distance\n2,20\n1,10\n3,30\n")
    assert (record.rounds, record.columns["distance"]) == ([1, 2, 3], [10.0, 20.0, 30.0])
    assert record.notes == ("the rounds were not in order and have been sorted",)


def test_missing_rounds_are_told(table):
    record = table("round,distance\n1,1\n2,1\n5,1\n")
    assert record.rounds == [1, 2, 5]
    assert record.notes == ("2 of the rounds up to 5 have no row; only the others can be decided on",)


def test_rows_of_one_round_are_put_together_where_they_complete_each_other(table):
    record = table("round,distance,val_loss,lr\n1,1,,0.1\n1,,0.5,0.1\n2,2,,0.1\n2,2,nan,0.1\n2,,nan,0.1\n")
    assert record.rounds == [1, 2]
    assert record.columns["distance"] == [1.0, 2.0]
    assert record.columns["val_loss"] == pytest.approx([0.5, math.nan], nan_ok=True)
    assert record.notes == ("round 1 has more than one row (lines 2 and 3): such rows were put together",)
    assert not record.unreadable


def test_different_values_for_one_round_spoil_their_column_only(table):
    record = table("round,distance,val_loss\n1,1,0.5\n2,2,0.4\n2,3,0.4\n")
    assert record.columns == {"val_loss": [0.5, 0.4]}
    with pytest.raises(ValueError, match=r"log.csv, column 'distance': lines 3 and 4 give different values"):
        record.measured("distance")


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "nan", "inf", "", "1e10", "²"])
def test_what_is_no_round_is_refused_with_its_line(table, text):
    with pytest.raises(ValueError, match=r"log.csv, line 3: the round "):
        table(f"round,distance\n1,2\n{text},3\n")


@pytest.mark.parametrize("text", ["1", " 1 ", "1.0", "1e0", "+1", '"1"'])
def test_a_round_may_be_written_in_other_ways(table, text):
    assert table(f"round,distance\n{text},2\n").rounds == [1]


def test_rounds_counted_from_0_must_be_said_to_be(table):
    assert table("round,distance\n0,1\n1,2\n", zero_based=True).rounds == [1, 2]
    with pytest.raises(ValueError, match="line 2: rounds are counted from 1; say `zero_based`"):
        table("round,distance\n0,1\n1,2\n")


# --- files of other tools


def test_columns_of_other_names(table):
    record = table("t,dist,loss\n1,1.5,9\n2,1.75,8\n", columns={"round": "t", "distance": "dist"})
    assert record.columns == {"distance": [1.5, 1.75], "loss": [9.0, 8.0]}
    with pytest.raises(ValueError, match="no column 'd', named for 'distance'; it has t, dist"):
        table("t,dist\n1,2\n", columns={"round": "t", "distance": "d"})
    with pytest.raises(ValueError, match="no column 'round', nor is another named for it; it has t, dist"):
        table("t,dist\n1,2\n")


def test_a_named_column_goes_before_one_that_has_our_name(table):
    text = "round,t,distance,dist\n7,1,0,5\n8,2,0,6\n"
    record = table(text, columns={"round": "t", "distance": "dist"})
    assert (record.rounds, record.columns) == ([1, 2], {"distance": [5.0, 6.0]})


@pytest.mark.parametrize("text", ["abc", "1_000", "0x10", "1.2.3", "1,5", "１"])
def test_a_text_among_numbers_spoils_its_column_only(table, text):
    record = table(f'round,distance,val_loss\n1,"{text}",0.5\n')
    assert record.columns == {"val_loss": [0.5]}
    with pytest.raises(ValueError, match=r"log.csv, column 'distance': line 2, .* is not a number"):
        record.measured("distance")


def test_a_name_that_stands_twice_cannot_be_meant(table):
    record = table("round,x,x,distance\n1,5,6,2\n")
    assert record.columns == {"distance": [2.0]}
    with pytest.raises(ValueError, match="stands more than once in the header"):
        record.measured("x")
    with pytest.raises(ValueError, match="more than one column 'round'"):
        table("round,round\n1,1\n")


@pytest.mark.parametrize(
    "text",
    [
        "round,distance\n1,0.5\n2,0.75\n",
        "round,distance\r\n1,0.5\r\n2,0.75\r\n",
        "round,distance\r1,0.5\r2,0.75\r",
        "\n\nround,distance\n\n1,0.5\n , \n2,0.75\n\n\n",
        "round;distance\n1;0.5\n2;0.75\n",
        "round;distance\n1;0,5\n2;0,75\n",
        "sep=;\nround;distance\n1;0,5\n2;0,75\n",
        "round\tdistance\n1\t0.5\n2\t0.75\n",
        '"round","distance"\n"1","0.5"\n"2","0.75"\n',
        " round , distance \n 1 , 0.5 \n 2 , 0.75 \n",
        "round,distance,\n1,0.5,\n2,0.75,\n",
        "round,distance\n1,0.5,\n2,0.75,,\n",
        ",round,distance\n0,1,0.5\n1,2,0.75\n",
        codecs.BOM_UTF8 + b"round,distance\n1,0.5\n2,0.75\n",
        "\ufeffround\tdistance\n1\t0.5\n2\t0.75\n".encode("utf-16-le"),
        "\ufeffround,distance\n1,0.5\n2,0.75\n".encode("utf-16-be"),
    ],
)
def test_spreadsheets_and_platforms_write_the_same_table_in_many_ways(table, text):
    record = table(text)
    assert record.rounds == [1, 2]
    assert record.columns["distance"] == [0.5, 0.75]
    assert record.notes == ()


def test_a_header_in_latin_1_is_read(table):
    record = table("round,distance,größe\n1,2,3\n".encode("latin-1"))
    assert record.columns == {"distance": [2.0], "größe": [3.0]}


def test_missing_fields_at_the_end_of_a_row_are_empty(table):
    assert table("round,distance,val_loss\n1,2\n2,3,0.5\n").measured("val_loss") == ([2], [0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,distance\n1,2\n2,3,4\n", "line 3: there are 3 fields under a header of 2"),
        ('round,distance\n1,"2\n2,3\n', "line 3: unexpected end of data"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not a text file"),
    ],
)
def test_what_is_no_table_is_refused(table, text, message):
    with pytest.raises(ValueError, match=message):
        table(text)


TEXTS = st.text("0123456789.,;\t\n\r\"'-+enainf \0_#rounddistance|é", max_size=80)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.sampled_from(["", "round,distance\n", "round;distance\r\n", f"{OWN}\r\n", '"round"\tdistance\n']),
    content=st.one_of(TEXTS.map(str.encode), st.binary(max_size=60)),
)
def test_no_text_raises_anything_but_a_value_error(table, header, content):
    try:
        record = table(header.encode() + content)
    except ValueError:
        return
    assert record.rounds == sorted(set(record.rounds))
    assert record.rounds[0] >= 1
    assert all(len(values) == len(record.rounds) for values in record.columns.values())
    assert record.budget == record.rounds[-1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.none() | st.floats(), min_size=1, max_size=12),
    delimiter=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    seed=st.randoms(use_true_random=False),
)
def test_any_floats_come_back_from_any_dialect_in_any_order(table, values, delimiter, end, bom, seed):
    rows = [f"{n}{delimiter}{'' if v is None else repr(v)}{end}" for n, v in enumerate(values, start=1)]
    seed.shuffle(rows)
    text = f"round{delimiter}distance{end}" + "".join(rows)
    record = table(("\ufeff" if bom else "") + text)
    rounds, got = record.measured("distance")
    expected = {n: v for n, v in enumerate(values, start=1) if v is not None}
    assert dict(zip(rounds, map(repr, got), strict=True)) == {n: repr(v) for n, v in expected.items()}


# --- finding


def test_a_record_is_found_by_folder_file_or_any_folder_above_and_only_once(tmp_path):
    folders = [make_run(tmp_path / "a", version=None) for _ in range(11)]
    other = make_run(tmp_path / "b")
    assert find_records([tmp_path]) == [*folders, other]  # version_2 before version_10
    assert find_records([other, folders[1], tmp_path / "a", folders[1] / "metrics.csv"]) == [*folders, other]
    assert find_records(str(other / "metrics.csv")) == [other]
    (tmp_path / "link").symlink_to(other)
    assert find_records([other, tmp_path / "link"]) == [other]


def test_a_csv_file_of_another_name_stands_for_itself(tmp_path):
    files = [tmp_path / "b.csv", tmp_path / "a.csv"]
    for file in files:
        file.write_text("round,distance\n1,2\n")
    assert find_records(files) == sorted(files)
    with pytest.raises(FileNotFoundError, match=r"no metrics.csv in .*; name the CSV files in it themselves"):
        find_records([tmp_path])


@pytest.mark.parametrize(
    ("paths", "message"),
    [([], "No run is given"), (["nowhere"], "no file or folder 'nowhere'"), (["."], "no metrics.csv in '.' or below")],
)
def test_where_there_is_no_record_it_is_said(tmp_path, monkeypatch, paths, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        find_records(paths)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file '.*metrics.csv'; a record is a version folder or a CSV"):
        read_record(tmp_path)


def test_runs_are_called_by_what_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/c0.1/seed0", "runs/c0.1/seed1", "runs/c1/seed0"):
        make_run(tmp_path / name)

    def names(*paths):
        return [record.name for record in read_records(paths)]

    assert names("runs") == ["c0.1/seed0", "c0.1/seed1", "c1/seed0"]
    assert names("runs/c0.1/seed0", "runs/c1/seed0") == ["c0.1", "c1"]
    assert names("runs/c0.1") == ["seed0", "seed1"]
    assert names("runs/c1") == ["runs/c1"]
    make_run(tmp_path / "runs/c1/seed0")
    assert names("runs/c1") == ["version_0", "version_1"]
    monkeypatch.chdir(tmp_path / "runs/c0.1/seed1")
    assert names(".") == ["seed1"]


def test_names_stay_different_where_one_path_lies_in_another(tmp_path):
    outer = make_run(tmp_path)
    inner = make_run(outer)
    assert len({record.name for record in read_records([tmp_path])}) == 2
    assert [record.folder for record in read_records([outer, inner])] == [outer, inner]


def test_an_unreadable_record_in_a_folder_is_left_out_and_told_and_one_named_itself_is_refused(tmp_path):
    good = make_run(tmp_path)
    bad = make_run(tmp_path, rounds=1)
    (bad / "metrics.csv").write_text("")
    told = []
    assert [record.folder for record in read_records([tmp_path], say=told.append)] == [good]
    assert len(told) == 1
    assert told[0].startswith(f"{bad} is left out: ")
    for path in (bad, bad / "metrics.csv"):
        with pytest.raises(ValueError, match="is empty"):
            read_records([tmp_path, path], say=told.append)
    (good / "metrics.csv").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_records([tmp_path], say=told.append)
    make_run(tmp_path)
    with pytest.warns(UserWarning, match="is left out"):
        read_records([tmp_path])


def test_a_record_made_by_hand_takes_nan_for_an_empty_field():
    record = Record("x", Path(), [1, 2], {"distance": [1.0, math.nan]}, {}, {}, 2)
    assert record.measured("distance") == ([1], [1.0])
