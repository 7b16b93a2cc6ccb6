import dataclasses
import hashlib

import numpy as np
import pytest

from lightning_fedstop.data import DirichletSkew, Iid, Partition, PathologicalSkew, QuantitySkew, Skew
from lightning_fedstop.data.partitions.partition import fingerprint

LABELS = np.random.default_rng(0).integers(0, 4, 400)


@pytest.fixture
def partition():
    return Partition.create(DirichletSkew(0.3), LABELS, 12, seed=5)


def test_the_digest_tells_who_has_which_samples():
    labels = np.arange(12) % 3
    digests = [
        Partition.create(skew, labels, 3, seed).digest for skew in (Iid(), DirichletSkew(1.0)) for seed in (0, 1)
    ]
    assert len(set(digests)) == 4
    assert digests[0] == Partition.create(Iid(), labels, 3, 0).digest
    assert digests[0] != Partition.create(Iid(), labels[::-1], 3, 0).digest


def test_holds_what_the_skew_dealt(partition):
    lists = DirichletSkew(0.3).partition(LABELS, 12, 5)
    assert len(partition) == 12
    assert partition.sizes.tolist() == [len(client) for client in lists]
    for client, expected in enumerate(lists):
        np.testing.assert_array_equal(partition[client], expected)
    assert partition.skew == repr(DirichletSkew(0.3))
    for wrong in (12, -1):
        with pytest.raises(IndexError, match="there are 12"):
            partition[wrong]


def test_cannot_be_changed(partition):
    with pytest.raises(ValueError, match="read-only"):
        partition[0][0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        partition.seed = 1
    mine = np.arange(3)
    Partition(mine, np.array([0, 3]), 3, "")
    mine[0] = 2


def test_counts_classes(partition):
    counts = partition.class_counts(LABELS[:, None], 6)
    assert counts.shape == (12, 6)
    for client in range(12):
        assert counts[client].tolist() == np.bincount(LABELS[partition[client]], minlength=6).tolist()
    with pytest.raises(ValueError, match="from 0 to 2"):
        partition.class_counts(LABELS, 3)
    with pytest.raises(ValueError, match="400 classes"):
        partition.class_counts(LABELS[:-1], 4)


def test_saved_and_loaded_is_the_same(partition, tmp_path):
    path = partition.save(tmp_path / "deep" / "deal")
    assert path.name == "deal.npz"
    loaded = Partition.load(path, LABELS, 12)
    for field in dataclasses.fields(Partition):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(partition, field.name))
    Partition.create(Iid(), LABELS, 3).save(path)
    assert len(Partition.load(path)) == 3
    assert [file.name for file in path.parent.iterdir()] == ["deal.npz"]


def test_other_data_or_clients_are_refused(partition, tmp_path):
    path = partition.save(tmp_path / "deal.npz")
    with pytest.raises(ValueError, match="has 12 clients, but `num_clients=13`"):
        Partition.load(path, LABELS, 13)
    with pytest.raises(ValueError, match="made for other data"):
        Partition.load(path, LABELS[::-1], 12)
    with pytest.raises(ValueError, match="made for other data"):
        Partition.load(path, LABELS[:-1], 12)


def test_dealt_without_classes_it_is_known_by_the_number_of_samples(tmp_path):
    path = Partition.create(Iid(), np.zeros(400, int), 12).save(tmp_path / "deal.npz")
    assert len(Partition.load(path, LABELS)) == 12
    with pytest.raises(ValueError, match="other data"):
        Partition.load(path, LABELS[:-1])


def test_files_that_are_no_partition_are_refused(tmp_path, partition):
    with pytest.raises(FileNotFoundError, match="no saved partition"):
        Partition.load(tmp_path / "absent.npz")
    text, other, cut = (tmp_path / name for name in ("text.npz", "other.npz", "cut.npz"))
    text.write_text("hello")
    np.savez(other, indices=np.arange(3))
    whole = partition.save(tmp_path / "whole.npz").read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    for path in (text, other, cut):
        with pytest.raises(ValueError, match="is not a saved partition"):
            Partition.load(path)
    np.savez(other, **{**np.load(tmp_path / "whole.npz"), "indices": np.array([object()])}, allow_pickle=True)
    with pytest.raises(ValueError, match="is not a saved partition"):
        Partition.load(other)
    np.savez(other, **{**np.load(tmp_path / "whole.npz"), "indices": np.full(400, 400)})
    with pytest.raises(ValueError, match="sample numbers from 0 to 399"):
        Partition.load(other)


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        (np.arange(3), np.array([0, 2])),
        (np.arange(3), np.array([0, 2, 1, 3])),
        (np.arange(3), np.array([1, 3])),
        (np.arange(3), np.array([0])),
        (np.arange(3.0), np.array([0, 3])),
        (np.array([0, 1, 9]), np.array([0, 3])),
        (np.array([0, 1, -1]), np.array([0, 3])),
    ],
)
def test_arrays_that_do_not_fit_are_refused(indices, offsets):
    with pytest.raises(ValueError):
        Partition(indices, offsets, 3, "")


def test_a_skew_of_the_wrong_length_is_refused():
    class Half(Skew):
        def partition(self, labels, num_clients, seed=0):
            return [np.arange(len(labels))]

    with pytest.raises(ValueError, match="returned 1 index lists for 2 clients"):
        Partition.create(Half(), LABELS, 2)


def test_fingerprint_knows_values_and_order():
    assert fingerprint(LABELS) == fingerprint(LABELS[:, None].astype(np.uint8))
    assert fingerprint([0, 1]) != fingerprint([1, 0])


def test_table_shows_every_client_of_a_few():
    partition = Partition.create(PathologicalSkew(2), LABELS, 6, seed=1)
    text = partition.describe(LABELS, 4, ["a cat", "a dog", "a hen", "a pig"])
    assert all(name in text for name in ("a cat", "a pig", "samples", "classes", "400 of 400"))
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    assert [int(row[2]) for row in rows] == partition.sizes.tolist()
    assert {int(row[3]) for row in rows} == {2}
    assert [[int(cell) for cell in row[4:8]] for row in rows] == partition.class_counts(LABELS, 4).tolist()


def test_table_sums_up_many_clients_and_classes():
    partition = Partition.create(QuantitySkew(0.5), LABELS, 100)
    text = partition.describe(LABELS)
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows[:4]] == ["min", "median", "max", "0"]
    assert len(rows) == 14
    many = np.arange(400) % 50
    assert max(map(len, Partition.create(Iid(), many, 5).describe(many).splitlines())) < 120
    assert "classes" not in partition.describe()
    with pytest.raises(ValueError, match="must name the 4 classes"):
        partition.table(LABELS, 4, ["one"])


@pytest.mark.parametrize(
    ("name", "head"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("deep/p.pdf", b"%PDF")], ids=["png", "svg", "pdf"]
)
def test_picture(tmp_path, name, head):
    for skew, clients in ((DirichletSkew(0.3), 10), (QuantitySkew(0.01), 200)):
        path = Partition.create(skew, LABELS, clients).plot(tmp_path / name, LABELS, 4)
        assert path.read_bytes().startswith(head)


def test_picture_without_labels_and_of_unknown_kind(tmp_path, partition):
    assert partition.plot(tmp_path / "p.png").stat().st_size > 1000
    for name in ("p.xyz", "p"):
        with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
            partition.plot(tmp_path / name)


def test_partitions_of_before_are_known_by_the_numbers_as_they_were(tmp_path):
    labels = LABELS * 1000 - 7
    raw = hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()
    dealt = Partition.create(DirichletSkew(0.3), labels, 12, seed=5)
    path = dataclasses.replace(dealt, fingerprint=raw).save(tmp_path / "before.npz")
    assert Partition.load(path, labels, 12).sizes.tolist() == dealt.sizes.tolist()
    with pytest.raises(ValueError, match="other data"):
        Partition.load(path, labels[::-1])


def test_classes_of_any_name_are_counted_and_named(tmp_path):
    names = np.array(["cat", "dog", "hen", "pig"])[LABELS]
    numbered = Partition.create(PathologicalSkew(2), LABELS, 6)
    partition = Partition.create(PathologicalSkew(2), names, 6)
    assert partition.digest == numbered.digest
    assert Partition.load(partition.save(tmp_path / "p.npz"), LABELS).digest == numbered.digest
    np.testing.assert_array_equal(partition.class_counts(names, 4), numbered.class_counts(LABELS, 4))
    assert all(name in partition.describe(names) for name in ("cat", "dog", "hen", "pig"))
    partition.plot(tmp_path / "p.svg", names)
    with pytest.raises(ValueError, match="classes of the training set, from 0 to 2"):
        partition.class_counts(names, 3)


def test_very_many_classes_are_not_tabulated(tmp_path):
    labels = np.arange(5000) % 2500
    partition = Partition.create(Iid(), labels, 10)
    assert "classes" not in partition.describe(labels)
    partition.plot(tmp_path / "p.png", labels)


class Fixed(Skew):
    """A skew of one's own, of given lists."""

    needs_labels = False

    def __init__(self, *lists):
        self.lists = lists

    def partition(self, labels, num_clients, seed=0):
        return list(self.lists)


@pytest.mark.parametrize(
    "wrong",
    [np.array([True, False, True, False]), np.array([0.0, 1.0]), np.array([[0, 1]]), ["0"]],
    ids=["mask", "floats", "matrix", "strings"],
)
def test_lists_of_ones_own_must_be_sample_numbers(wrong):
    with pytest.raises(ValueError, match="must return a vector of whole sample numbers for each client"):
        Partition.create(Fixed([1], wrong), np.zeros(4, int), 2)


def test_samples_that_a_skew_of_ones_own_leaves_out_are_told():
    with pytest.warns(UserWarning, match=r"Fixed\(.*\) gives 3 of 6 samples to no client"):
        partition = Partition.create(Fixed([0, 3], [], [5]), np.zeros(6, int), 3)
    assert partition.sizes.tolist() == [2, 0, 1]
