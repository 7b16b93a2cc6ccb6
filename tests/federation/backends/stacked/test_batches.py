"""How the batches of several clients become one."""

import torch

from lightning_fedstop.federation.backends.stacked.batches import group_batches


def batches(*sizes, width=2):
    """One batch of each size, numbered from 0, with the samples counted from the size times 100."""
    return [(0, (torch.arange(n).unsqueeze(1).expand(n, width) + 100.0 * n, torch.arange(n))) for n in sizes]


def rows(groups):
    return sorted(group.rows for group in groups)


def test_without_padding_only_equal_shapes_go_together():
    groups = group_batches(batches(4, 2, 4, 2, 3), pads=False, by_index=False)
    assert rows(groups) == [[0, 2], [1, 3], [4]]
    assert all(group.weights is None and group.padded_size is None for group in groups)
    pair = next(group for group in groups if group.rows == [1, 3])
    assert pair.sizes.tolist() == [2.0, 2.0]
    assert [tuple(tensor.shape) for tensor in pair.tensors] == [(2, 2, 2), (2, 2)]


def test_padding_at_most_doubles_a_batch():
    groups = group_batches(batches(3, 16, 8, 1, 9, 7), pads=True, by_index=False)
    assert rows(groups) == [[0], [1, 2, 4], [3], [5]]
    padded = next(group for group in groups if group.rows == [1, 2, 4])
    assert padded.padded_size == 16
    assert padded.sizes.tolist() == [16.0, 8.0, 9.0]


def test_padding_copies_a_sample_and_weighs_nothing():
    (group,) = group_batches(batches(4, 3), pads=True, by_index=False)
    values, labels = group.tensors
    assert torch.equal(values[1], torch.tensor([300.0, 301.0, 302.0, 300.0]).unsqueeze(1).expand(4, 2))
    assert labels[1].tolist() == [0, 1, 2, 0]
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 1e30]])
    weighed = (losses[:1] * group.weights[:1]).mean(1), (losses[1, :3] * group.weights[1, :3]).sum() / 4
    assert [float(value) for value in weighed] == [2.5, 6.0]
    assert group.weights[1, 3] == 0


def test_batches_of_other_structure_width_number_or_values_stay_apart():
    drawn = [
        *batches(4),
        *batches(4, width=3),
        (1, batches(4)[0][1]),
        (0, {"x": torch.zeros(4)}),
        (0, (torch.zeros(4), "a")),
    ]
    drawn += [(0, (torch.zeros(4), "a")), (0, (torch.zeros(4), "b")), (0, (torch.zeros(4), ["a"]))]
    assert rows(group_batches(drawn, pads=True, by_index=False)) == [[0, 2], [1], [3], [4, 5], [6], [7]]
    assert rows(group_batches(drawn, pads=True, by_index=True)) == [[0], [1], [2], [3], [4, 5], [6], [7]]


def test_what_is_no_tensor_reaches_each_client():
    drawn = [(0, {"x": torch.zeros(2), "name": "a"}), (0, {"x": torch.ones(2), "name": "a"})]
    (group,) = group_batches(drawn, pads=False, by_index=False)
    assert group.batch([tensor[1] for tensor in group.tensors])["name"] == "a"


def test_tensors_that_disagree_about_the_samples_are_never_padded():
    drawn = [(0, (torch.zeros(3, 3), torch.zeros(5))), (0, (torch.zeros(2, 3), torch.zeros(5)))]
    assert rows(group_batches(drawn, pads=True, by_index=False)) == [[0], [1]]
