import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lightning_fedstop.loop import checkpoint_file as checkpoints
from lightning_fedstop.loop.pickled import Pickled
from tests.helpers import ToyModule


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Data(LightningDataModule):
    def __init__(self, size=3):
        super().__init__()
        self.save_hyperparameters()

    def state_dict(self):
        return {"drawn": 7}


def dump(module=None, datamodule=None):
    module = ToyModule(lr=0.5) if module is None else module
    federated = {"method": "FedAvg", "seed": 1}
    return checkpoints.model_checkpoint(module, datamodule, 4, 5) | {"federated": federated}


def test_the_layout_is_that_of_a_trainer():
    content = dump(datamodule=Data())
    assert (content["epoch"], content["global_step"]) == (4, 5)
    assert content["hyper_parameters"] == {"lr": 0.5}
    assert content["datamodule_hyper_parameters"] == {"size": 3}
    assert content["Data"] == {"drawn": 7}
    assert {"pytorch-lightning_version", "state_dict"} <= content.keys()


def test_the_state_is_a_copy():
    module = ToyModule()
    content = dump(module)
    with torch.no_grad():
        module.net.bias.fill_(9)
    assert not content["state_dict"]["net.bias"].any()


def test_written_files_are_whole_or_the_former_ones(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "x.ckpt"
    checkpoints.write_checkpoint({"state_dict": {}, "n": 1}, path)

    def breaks(content, file):
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write_checkpoint({"state_dict": {}, "n": 2}, path)
    assert checkpoints.read_checkpoint(path)["n"] == 1
    assert os.listdir(path.parent) == ["x.ckpt"]


def test_unreadable_files_are_refused_by_name(tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    torch.save({"state_dict": {}, "loss": nn.MSELoss()}, tmp_path / "objects.ckpt")
    for name, error, message in (
        ("none.ckpt", FileNotFoundError, "There is no checkpoint at"),
        ("text.ckpt", ValueError, "cannot be read as a checkpoint"),
        ("objects.ckpt", ValueError, "cannot be read as a checkpoint: it holds other objects"),
        ("other.ckpt", ValueError, "it has no 'state_dict'"),
    ):
        with pytest.raises(error, match=message) as raised:
            checkpoints.read_checkpoint(tmp_path / name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)


def test_hyperparameters_are_pickled_apart_and_read_by_nobody_who_does_not_ask(tmp_path):
    net, went_off = nn.Linear(2, 1), tmp_path / "went off"
    allowed = set(torch.serialization.get_safe_globals())
    content = dump() | {"hyper_parameters": {"lr": 0.5, "net": net, "again": net, "bomb": Bomb(went_off)}}
    checkpoints.write_checkpoint(checkpoints.storable(content, left_out := []), tmp_path / "x.ckpt")
    read = checkpoints.read_checkpoint(tmp_path / "x.ckpt")
    assert "hyper_parameters" not in read
    assert read["federated"] == content["federated"]
    assert checkpoints.find_last(tmp_path) == tmp_path / "x.ckpt"
    assert left_out == []
    assert not went_off.exists()
    assert set(torch.serialization.get_safe_globals()) == allowed
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.ckpt", weights_only=True)
    whole = torch.load(tmp_path / "x.ckpt", weights_only=False)["hyper_parameters"]
    assert went_off.exists()
    assert whole["net"] is whole["again"]
    assert torch.equal(whole["net"].weight, net.weight)
    assert whole["lr"] == 0.5


def test_plain_hyperparameters_stay_plain(tmp_path):
    checkpoints.write_checkpoint(checkpoints.storable(dump(), []), tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"] == {"lr": 0.5}


@pytest.mark.parametrize("net", [None, nn.ReLU()], ids=["plain", "with another object"])
def test_what_cannot_be_pickled_is_left_out_by_name(tmp_path, net):
    content = dump() | {"hyper_parameters": {"lr": 0.5, "net": net, "loss": lambda x: x}}
    checkpoints.write_checkpoint(checkpoints.storable(content, left_out := []), tmp_path / "x.ckpt")
    assert left_out == ["hyper_parameters.loss"]
    whole = torch.load(tmp_path / "x.ckpt", weights_only=net is None)["hyper_parameters"]
    assert (whole.keys(), type(whole["net"])) == ({"lr", "net"}, type(net))


def test_objects_elsewhere_are_left_out_by_name():
    content = dump() | {"mine": nn.ReLU(), "callbacks": {"a": {"n": 1, "f": print}}}
    stored = checkpoints.storable(content, left_out := [])
    assert sorted(left_out) == ["callbacks.a.f", "mine"]
    assert stored["callbacks"] == {"a": {"n": 1}}


def test_parameters_amid_a_fit_are_pickled_without_the_vector_they_are_views_of():
    net = nn.Linear(4, 4)
    before = len(pickle.dumps(Pickled(net)))
    vector = torch.zeros(100_000)
    for parameter, place in zip(net.parameters(), (0, 50_000), strict=True):
        parameter.data = vector[place : place + parameter.numel()].view(parameter.shape)
    assert len(pickle.dumps(Pickled(net))) < 1.1 * before


def test_the_keys_of_a_configuration_are_a_trainers():
    omegaconf = pytest.importorskip("omegaconf")

    class Configured(ToyModule):
        def __init__(self, conf):
            super().__init__(net=nn.Linear(4, 2))
            self.save_hyperparameters(conf)

    content = checkpoints.storable(dump(Configured(omegaconf.OmegaConf.create({"a": {"b": 1}}))), [])
    torch.save(content, file := io.BytesIO())
    whole = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert whole["hparams_name"] == "conf"
    assert whole["hparams_type"] is omegaconf.DictConfig
    assert whole["hyper_parameters"].a.b == 1


def test_load_weights_refuses_another_model_in_one_line():
    content = dump(ToyModule(net=nn.Linear(4, 5)))
    with pytest.raises(ValueError, match=r"'x.ckpt' holds another model than ToyModule: .* size mismatch") as raised:
        checkpoints.load_weights(ToyModule(), content, "x.ckpt")
    assert "\n" not in str(raised.value)


def test_load_weights_follows_strict_loading():
    module = ToyModule()
    content = dump(module)
    content["state_dict"]["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="extra"):
        checkpoints.load_weights(module, content, "x")
    module.strict_loading = False
    checkpoints.load_weights(module, content, "x")


def test_find_last_takes_the_newest_and_no_half_written_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="found no checkpoint of a run under"):
        checkpoints.find_last(tmp_path)
    for age, name in enumerate([".half.ckpt", "b/new.ckpt", "a/old.ckpt", "c/notes.txt"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    assert checkpoints.find_last(tmp_path) == tmp_path / "b/new.ckpt"
    # What holds weights alone is no run to go on with, however new; what cannot be read is for the reader to name.
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert checkpoints.find_last(tmp_path) == tmp_path / "b/new.ckpt"
    torch.save({"state_dict": {}, checkpoints.FEDERATED_KEY: {}}, tmp_path / "run.ckpt")
    assert checkpoints.find_last(tmp_path) == tmp_path / "run.ckpt"
