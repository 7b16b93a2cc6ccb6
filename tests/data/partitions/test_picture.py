from itertools import pairwise

import numpy as np
import pytest

from lightning_fedstop.data.partitions.picture import FEW_CLIENTS, draw_clients, shades


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 100, 12345])
def test_shades_cover_every_count_once(largest):
    ranges = shades(largest)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == max(1, largest)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))


def test_a_cell_for_each_class_that_a_client_holds():
    counts = [[5, 0, 1], [0, 40, 0], [3, 3, 3]]
    top, below = draw_clients(9.0, [6, 40, 9], counts, ["a", "b", "c"]).axes
    cells = sum(len(patch.get_path().vertices) // 5 for patch in below.patches)
    assert cells == np.count_nonzero(counts)
    assert top.patches[0].get_data().values.tolist() == [6, 40, 9]
    assert below.get_xlabel() == "client"
    assert len(draw_clients(9.0, [6, 40, 9], [], []).axes) == 1


def test_many_clients_stand_by_their_main_class():
    counts = np.eye(3, dtype=int)[np.arange(FEW_CLIENTS + 3) % 3] * np.arange(1, FEW_CLIENTS + 4)[:, None]
    top, below = draw_clients(9.0, counts.sum(1), counts, ["a", "b", "c"]).axes
    drawn = top.patches[0].get_data().values
    first = drawn[: FEW_CLIENTS // 3 + 1]
    assert first.tolist() == sorted(counts[:, 0][counts[:, 0] > 0], reverse=True)
    assert below.get_xlabel() == "clients, by main class and size"


def test_of_very_many_clients_some_are_drawn():
    (axes,) = draw_clients(9.0, np.ones(1000, int), [], []).axes
    assert len(axes.patches[0].get_data().values) == 400
    assert "(400 of 1000 are drawn)" in axes.get_xlabel()
