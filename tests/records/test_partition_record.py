import json
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_fedstop import Digits, DirichletSkew
from lightning_fedstop.records import partition_record
from lightning_fedstop.records.partition_record import (
    PartitionCounts,
    deal_again,
    partition_counts,
    read_partition,
    write_partition,
)
from tests.records.report.made import config


@pytest.fixture(scope="module")
def digits():
    data = Digits(num_clients=20, skew=DirichletSkew(0.1), seed=3)
    data.setup("fit")
    return data


def test_what_is_written_is_what_was_dealt(digits, tmp_path):
    write_partition(tmp_path, digits)
    read = read_partition(tmp_path)
    assert read == partition_counts(digits)
    assert read.sizes == digits.client_sizes
    assert read.counts == digits.partition.class_counts(digits.train_labels, 10).tolist()
    assert (read.seed, read.class_names) == (3, [str(k) for k in range(10)])
    assert "DirichletSkew" in read.skew


def test_dealt_again_from_the_configuration(digits):
    assert deal_again(config(seed=3)) == partition_counts(digits)
    assert deal_again(config(seed=5) | {"seed_everything": None}) != partition_counts(digits)


def test_a_data_module_that_knows_sizes_alone(tmp_path):
    write_partition(tmp_path, SimpleNamespace(client_sizes=[3, 0]))
    assert read_partition(tmp_path) == PartitionCounts([3, 0], [], [])


def test_no_file(tmp_path):
    assert read_partition(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        json.dumps({"counts": [[1, 2]], "class_names": ["a"]}),
        json.dumps({"sizes": [2, 3], "counts": [[1], [3]], "class_names": ["a"]}),
        json.dumps({"sizes": [1.5]}),
        json.dumps({"sizes": [-1]}),
        json.dumps({"sizes": [True]}),
        json.dumps({"sizes": []}),
        json.dumps({"counts": [[1, 2], [3]], "class_names": ["a", "b"]}),
    ],
)
def test_a_file_of_something_else(content, tmp_path):
    (tmp_path / "partition.json").write_text(content)
    with pytest.raises(ValueError, match="no partition that a run has written"):
        read_partition(tmp_path)


def test_no_class_of_others_is_built(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for made in (config(data_class="Digits"), config()):
        made["data"]["class_path"] = "trap.Digits"
        with pytest.raises(ValueError, match=r"trap\.Digits is not one of this package"):
            deal_again(made)
    made = config()
    made["data"]["init_args"]["skew"]["class_path"] = "trap.DirichletSkew"
    with pytest.raises(ValueError, match=r"skew trap\.DirichletSkew"):
        deal_again(made)
    with pytest.raises(ValueError, match="no data module"):
        deal_again({})


def test_data_that_cannot_be_loaded_is_a_reason(tmp_path):
    made = config(data_class="NpzImages", path=str(tmp_path / "gone.npz"))
    with pytest.raises(ValueError, match=r"cannot be loaded here: .*gone\.npz"):
        deal_again(made)


def test_nothing_is_written_where_a_run_kept_its_images(tmp_path):
    np.savez(tmp_path / "a.npz", train_images=np.zeros((9, 4, 4), np.uint8), train_labels=np.arange(9) % 3)
    given = {"path": str(tmp_path / "a.npz"), "cache_dir": str(tmp_path / "cache"), "num_clients": 3}
    config = {"data": {"class_path": "NpzImages", "init_args": given}, "seed_everything": 0}
    assert sum(deal_again(config).sizes) == 9
    assert not (tmp_path / "cache").exists()


def test_many_clients_are_written_in_parts(tmp_path, monkeypatch, digits):
    monkeypatch.setattr(partition_record, "_ROWS_AT_ONCE", 7)
    for data in (digits, SimpleNamespace(client_sizes=list(range(15)))):
        write_partition(tmp_path, data)
        assert read_partition(tmp_path) == partition_counts(data)


def test_nothing_is_downloaded(tmp_path):
    made = config(data_class="MedMNIST", dataset="bloodmnist", size=64, root=str(tmp_path), download=True)
    with pytest.raises(ValueError, match="cannot be loaded here"):
        deal_again(made)
    assert list(tmp_path.iterdir()) == []
