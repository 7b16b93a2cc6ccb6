# ruff: noqa: NPY002 - these tests are about the global generator
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fedstop.data.labels import dataset_labels


class Items(Dataset):
    def __init__(self, items, **attributes):
        self.items = items
        self.reads = 0
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


PLAIN = [("x", k) for k in (2, 0, 1, 1)]


@pytest.mark.parametrize(
    "dataset",
    [
        Items([None] * 4, targets=[2, 0, 1, 1]),
        Items([None] * 4, labels=np.array([[2], [0], [1], [1]], np.uint8)),
        Items([None] * 4, targets=torch.tensor([2, 0, 1, 1])),
        TensorDataset(torch.zeros(4, 2), torch.tensor([2, 0, 1, 1])),
    ],
    ids=["list", "column", "tensor", "tensors"],
)
def test_found_without_reading(dataset):
    labels = dataset_labels(dataset)
    assert labels.dtype == np.int64
    assert labels.tolist() == [2, 0, 1, 1]
    assert getattr(dataset, "reads", 0) == 0


@pytest.mark.parametrize(
    "items",
    [
        PLAIN,
        [(0.5, torch.tensor(k)) for _, k in PLAIN],
        [(0.5, np.array([k])) for _, k in PLAIN],
        [{"image": 0, "label": k} for _, k in PLAIN],
        [[0, k, "more"] for _, k in PLAIN],
    ],
)
def test_found_by_reading_each_item_once(items):
    dataset = Items(items)
    assert dataset_labels(dataset).tolist() == [2, 0, 1, 1]
    assert dataset.reads == 4
    assert dataset_labels(dataset, read_items=False) is None


def test_through_subsets_and_concatenations():
    named = Items([None] * 4, targets=[2, 0, 1, 1])
    both = ConcatDataset(
        [Subset(named, [3, 0]), Subset(Items(PLAIN), [1, 2]), TensorDataset(torch.zeros(1), torch.tensor([7]))]
    )
    assert dataset_labels(both).tolist() == [1, 2, 0, 1, 7]
    known = ConcatDataset([named, TensorDataset(torch.zeros(1), torch.tensor([7]))])
    assert dataset_labels(Subset(known, torch.tensor([4, 0]))).tolist() == [7, 2]
    assert named.reads == 0


def test_a_target_transform_is_honoured():
    dataset = Items([("x", 1), ("x", 0)], targets=[5, 4], target_transform=lambda y: y - 4)
    assert dataset_labels(dataset).tolist() == [1, 0]


@pytest.mark.parametrize(
    "items",
    [
        [torch.zeros(3)] * 2,
        [(torch.zeros(3),)] * 2,
        [(0, 0.5), (0, 0.1)],
        [(0, torch.zeros(14, dtype=torch.int64))] * 2,
        [{"image": 0}] * 2,
    ],
    ids=["tensor", "single", "float", "multi-label", "mapping"],
)
def test_none_where_there_are_no_classes(items):
    assert dataset_labels(Items(items)) is None


def test_unfit_attributes_are_passed_over():
    assert dataset_labels(Items(PLAIN, targets=[0])).tolist() == [2, 0, 1, 1]
    assert dataset_labels(Items(PLAIN, labels=["a", "b", "c"])).tolist() == [2, 0, 1, 1]
    assert dataset_labels(Items(PLAIN, targets=[0.5] * 4)).tolist() == [2, 0, 1, 1]


def test_reading_leaves_the_generators_alone():
    class Augmented(Items):
        def __getitem__(self, index):
            torch.rand(1)
            np.random.rand()
            return super().__getitem__(index)

    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    dataset_labels(Augmented(PLAIN))
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.parametrize(
    "dataset",
    [
        Items([None] * 3, targets=["b", "a", "b"]),
        Items([None] * 3, labels=np.array(["b", "a", "b"], object)),
        Items([("x", "b"), ("x", "a"), ("x", "b")]),
        Items([{"label": np.str_(name)} for name in "bab"]),
    ],
)
def test_classes_may_be_strings(dataset):
    assert dataset_labels(dataset).tolist() == ["b", "a", "b"]


def test_a_data_set_of_batches_is_read_by_lists():
    class Table(Items):
        def __getitem__(self, rows):
            return {"x": torch.zeros(len(rows)), "y": torch.tensor([self.items[row][1] for row in rows])}

    assert dataset_labels(Table(PLAIN), by_list=True).tolist() == [2, 0, 1, 1]
    assert dataset_labels(Subset(Table(PLAIN), [3, 0]), by_list=True).tolist() == [1, 2]
