import math

import torch

from lightning_fedstop.stopping.callbacks.history import History


def test_rows_come_back_with_all_their_bits(tmp_path):
    rows = [(0, 0.1, math.inf), (3, 1e-300, math.nan)]
    history = History()
    for row in rows:
        history.append(*row)
    torch.save(history.state(), tmp_path / "x.pt")
    again = History.of(torch.load(tmp_path / "x.pt", weights_only=True))
    assert len(again) == 2
    assert str(list(again)) == str([(0.0, 0.1, math.inf), (3.0, 1e-300, math.nan)])
    again.append(4, 1.0, 2.0)
    assert (len(again), len(history)) == (3, 2)


def test_an_empty_one_stays_empty():
    assert list(History.of(History().state())) == []
