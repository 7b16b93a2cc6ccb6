"""What users of such tools tripped over, as tests: what goes in. The table of rows is in ``test_runs.py``."""

import time
import warnings

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.cli.main import main
from lightning_fedstop.data import (
    DirichletSkew,
    FederatedDataModule,
    Iid,
    NpzImages,
    PathologicalSkew,
    QuantitySkew,
)
from lightning_fedstop.models import ImageClassifier, _backbone
from tests.cli_tools import TINY, refusal
from tests.helpers import QUIET, Deep, FederatedLoop, fit, make_loop

SMALL = {"depths": [1, 1, 1, 1], "dims": [4, 4, 8, 8]}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quick(skew, counts, num_clients, seed=0):
    """Deal within the time that a user waits, without an endless loop."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return skew.partition(np.repeat(np.arange(len(counts)), counts), num_clients, seed)
    finally:
        assert time.perf_counter() - began < 5


@pytest.mark.parametrize("variant", ["paper", "released_code"])
@pytest.mark.parametrize("kind", [Iid, DirichletSkew, PathologicalSkew, QuantitySkew])
def test_05_a_minimum_that_cannot_be_met_is_refused_at_once(kind, variant):
    skew = kind(variant=variant, min_samples=40)
    with pytest.raises(ValueError) as error:
        quick(skew, [100, 100, 100], 100)
    message = str(error.value)
    assert "cannot deal 300 samples to 100 clients with at least 40 each" in message
    assert "0 tries" in message
    assert repr(skew) in message
    assert "concentration=0.1" in message or not hasattr(skew, "concentration")


@pytest.mark.parametrize("concentration", [1e-300, 1e-9, 0.1, 1e4, 1e15])
@pytest.mark.parametrize("kind", [DirichletSkew, QuantitySkew])
def test_05_any_concentration_gives_the_minimum_that_can_be_met(kind, concentration):
    for seed in range(3):
        clients = quick(kind(concentration, min_samples=3), [150, 100, 50], 100, seed)
        assert sorted(np.concatenate(clients)) == list(range(300))
        assert min(map(len, clients)) >= 3


@pytest.mark.parametrize("balance", [False, True])
def test_05_classes_that_run_out_and_many_clients_come_to_an_end(balance):
    clients = quick(DirichletSkew(0.01, balance=balance), [1, 2, 3000, 1], 1000)
    assert sum(map(len, clients)) == 3004
    quick(PathologicalSkew(3), [1, 1, 1, 3000], 1000)


@pytest.mark.parametrize("skew", [PathologicalSkew(1, "released_code")], ids=repr)
def test_05_a_draw_that_would_not_end_is_refused(skew):
    with pytest.raises(ValueError, match="would not end"):
        quick(skew, [5, 0, 0, 0, 0, 295], 20)


def archive(path, labels, shape=(8, 8), **more):
    rng = np.random.default_rng(0)
    content = {}
    for split in ("train", "val", "test"):
        content[f"{split}_images"] = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
        content[f"{split}_labels"] = labels
    np.savez(path, **content | more)
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint64, bool])
@pytest.mark.parametrize("column", [True, False])
def test_09_labels_of_both_shapes_are_class_numbers(tmp_path, dtype, column):
    labels = np.array([0, 1, 1, 0]).astype(dtype)
    data = NpzImages(archive(tmp_path / "a.npz", labels[:, None] if column else labels), num_clients=2, batch_size=2)
    data.setup("fit")
    assert data.train_labels.tolist() == [0, 1, 1, 0]
    (_, batch), *_ = data.client_dataloader(0, torch.Generator())
    assert (batch.dtype, batch.shape) == (torch.int64, (2,))


@pytest.mark.parametrize("column", [True, False])
def test_09_accuracy_by_hand(tmp_path, column):
    """Four images of classes 0, 0, 0, 1; predicted 0, 0, 1, 1: the mean over classes of 2/3 and 1."""

    class ByBrightness(ImageClassifier):
        def forward(self, images):
            bright = (images.flatten(1).mean(1) > 0).float()
            return torch.stack([1 - bright, bright], 1) + 0 * sum(p.sum() for p in self.parameters())

    labels = np.array([0, 0, 0, 1], np.uint8)
    images = np.zeros((4, 8, 8), np.uint8)
    images[2:] = 255
    file = archive(tmp_path / "a.npz", labels[:, None] if column else labels, test_images=images)
    model = ByBrightness("convnextv2_atto", 2, 1, backbone_kwargs=SMALL)
    (metrics,) = FederatedLoop(**QUIET, default_root_dir=tmp_path).test(model, NpzImages(file), verbose=False)
    assert metrics["test_acc"] == pytest.approx((2 / 3 + 1) / 2)


@pytest.mark.parametrize("side", [1, 8, 28, 31, 32, 33])
def test_10_small_images_are_resized_or_refused_in_one_line(side):
    model = ImageClassifier("convnextv2_atto", 3, 1, backbone_kwargs=SMALL)
    assert model(torch.zeros(2, 1, side, side)).shape == (2, 3)
    if side < 32:
        with pytest.raises(ValueError, match=rf"^`image_size={side}`: convnextv2_atto needs >= 32 px\.$"):
            ImageClassifier("convnextv2_atto", 3, 1, image_size=side, backbone_kwargs=SMALL)


def test_10_of_28_pixels_are_trained_on(tmp_path):
    data = NpzImages(archive(tmp_path / "a.npz", np.arange(8) % 2, (28, 28)), num_clients=2, batch_size=4)
    model = ImageClassifier("convnextv2_atto", 2, 1, backbone_kwargs=SMALL)
    loop = make_loop(tmp_path, max_rounds=1)
    loop.fit(model, data)
    assert loop.current_epoch == 1


@pytest.mark.parametrize(
    ("argument", "given", "fits"), [("in_chans", 3, "`in_chans` must be 1"), ("num_classes", 2, "at least 3")]
)
def test_10_a_model_for_other_images_is_refused_before_training_and_leaves_nothing(tmp_path, argument, given, fits):
    data = NpzImages(archive(tmp_path / "a.npz", np.arange(9) % 3, (32, 32)), num_clients=2)
    model = ImageClassifier(
        "convnextv2_atto", backbone_kwargs=SMALL, **{"in_chans": 1, "num_classes": 3} | {argument: given}
    )
    with pytest.raises(ValueError, match=fits):
        make_loop(tmp_path).fit(model, data)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_11_without_a_network_one_error_names_the_local_file(root, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    args = ["--model", "ImageClassifier", "--model.backbone", "convnextv2_atto", "--model.pretrained", "true"]
    sentence = refusal(capsys, "fit", *TINY, *args)
    assert "`pretrained=True`" in sentence
    assert "`weights_path`" in sentence
    assert sentence.startswith("model: ")


def test_11_weights_are_read_once_a_run(tmp_path, monkeypatch):
    kwargs = {"backbone_kwargs": SMALL, "in_chans": 1}
    weights = tmp_path / "weights.pth"
    torch.save(ImageClassifier("convnextv2_atto", 2, **kwargs).backbone.state_dict(), weights)
    reads = []
    read = _backbone.read_weights
    monkeypatch.setattr(_backbone, "read_weights", lambda path: reads.append(path) or read(path))
    model = ImageClassifier("convnextv2_atto", 2, weights_path=weights, **kwargs)
    data = NpzImages(archive(tmp_path / "a.npz", np.arange(12) % 2, (32, 32)), num_clients=3, batch_size=4)
    make_loop(tmp_path, max_rounds=2, clients_per_round=3).fit(model, data)
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        ({"class_path": "EarlyStopping"}, ["trainer.callbacks", "monitor", "required"]),
        ({"class_path": "StochasticWeightAveraging"}, ["trainer.callbacks", "swa_lrs", "required"]),
        ({"class_path": "ModelCheckpoint", "init_args": {"save_top": 1}}, ["trainer.callbacks", "did you mean save_"]),
        (
            {"class_path": "TaskVectorEarlyStopping", "init_args": {"patiense": 3}},
            ["trainer.callbacks", "'patiense' is not ", "; did you mean patience?"],
        ),
        (
            {"class_path": "TaskVectorEarlyStopping", "init_args": {"patience": "three"}},
            ["trainer.callbacks.patience: must be int, got 'three'"],
        ),
        (
            {"class_path": "TaskVectorEarlyStopping", "init_args": {"patience": 0}},
            ["trainer.callbacks[0]: TaskVectorEarlyStopping: `patience` must be an integer of at least 1, got 0."],
        ),
        ({"class_path": "TaskVectorEarlyStoping"}, ["trainer.callbacks", "did you mean TaskVectorEarlyStopping"]),
        (
            {"class_path": "TaskVectorEarlyStopping", "init_arg": {}},
            ["trainer.callbacks[0].init_arg: there is no such key", "`init_args`"],
        ),
        ({"class_pth": "TaskVectorEarlyStopping"}, ["trainer.callbacks: ", "'class_pth'", "did you mean class_path?"]),
        ({"class_path": None}, ["trainer.callbacks[0].class_path: must be the name or the import path", "got null"]),
        ({"class_path": "FedAvg"}, ["trainer.callbacks", "there is no class 'FedAvg'"]),
    ],
)
def test_12_what_is_wrong_with_a_callback_is_said_with_its_key(root, capsys, callback, says):
    (root / "x.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    sentence = refusal(capsys, "fit", *TINY, "--config", "x.yaml")
    assert [part for part in says if part not in sentence] == []
    assert not (root / "lightning_logs").exists()


def test_12_a_callback_whose_default_is_a_word_of_an_enumeration(root):
    main(["fit", *TINY, "--trainer.max_rounds=1", "--trainer.callbacks+=Timer"])
    saved = yaml.safe_load(next(root.rglob("config.yaml")).read_text())
    assert saved["trainer"]["callbacks"][-1]["init_args"]["interval"] == "step"


def test_13_the_same_command_twice_takes_two_folders(root):
    main(["fit", *TINY, "--trainer.max_rounds=1"])
    first = next(root.rglob("config.yaml")).read_bytes()
    main(["fit", *TINY, "--trainer.max_rounds=1"])
    configs = sorted(root.rglob("config.yaml"))
    assert [path.parent.name for path in configs] == ["version_0", "version_1"]
    assert configs[0].read_bytes() == first


# More of the same kind


def test_the_message_of_a_missing_file_says_how_to_get_it(root, capsys):
    args = ["--data", "MedMNIST", "--data.root", str(root), "--data.dataset", "bloodmnist"]
    sentence = refusal(capsys, "fit", *TINY, *args)
    assert "bloodmnist_64.npz' is missing: set `download=True`, or put" in sentence
    assert "by hand" in sentence


@pytest.mark.parametrize("name", ["chestmnist", "organmnist3d", "bloodmnst", "BloodMNIST3D"])
def test_sets_that_cannot_be_served_are_refused_with_those_that_can(root, capsys, name):
    sentence = refusal(capsys, "fit", *TINY, "--data", "MedMNIST", "--data.dataset", name)
    assert sentence.startswith("data: MedMNIST: `dataset")
    assert "pathmnist, dermamnist" in sentence


def test_shortened_official_files_are_read(tmp_path):
    from lightning_fedstop.data import MedMNIST

    archive(tmp_path / "breastmnist.npz", np.arange(12) % 2, (28, 28))
    data = MedMNIST("breastmnist", size=28, root=tmp_path, num_clients=3)
    data.setup("fit")
    assert data.client_sizes == [4, 4, 4]


def test_a_callback_on_the_command_line_joins_those_of_the_file(root, capsys):
    (root / "x.yaml").write_text("trainer: {callbacks: [{class_path: TaskVectorEarlyStopping}]}")
    with pytest.raises(SystemExit):
        main(["fit", *TINY, "--config=x.yaml", "--trainer.callbacks+=LearningRateMonitor", "--print_config"])
    callbacks = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert [path["class_path"].rpartition(".")[2] for path in callbacks] == [
        "TaskVectorEarlyStopping",
        "LearningRateMonitor",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "data: {init_args: {num_clients: 7}, class_path: Digits}",
        "data: {class_path: Digits, init_args: {num_clients: 7}}",
        "data: {num_clients: 7}",
        "data: {init_args: {num_clients: 7}}",
    ],
)
def test_the_order_of_class_and_arguments_does_not_matter(root, capsys, text):
    (root / "x.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", *TINY, "--config=x.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["num_clients"] == 7


def test_keyword_arguments_that_a_class_does_not_take_are_not_ignored(root, capsys):
    (root / "x.yaml").write_text("data: {class_path: Digits, dict_kwargs: {speed: 3}}")
    assert "unexpected keyword argument 'speed'" in refusal(capsys, "fit", *TINY, "--config=x.yaml")


@pytest.mark.parametrize("size", [1, 3, 5])
def test_samples_are_neither_lost_nor_piled_on_one_client(size):
    data = LightningDataModule.from_datasets(TensorDataset(torch.randn(23, 4), torch.arange(23) % 2), batch_size=4)
    federated = FederatedDataModule.from_datamodule(data, size)
    federated.setup("fit")
    assert sum(federated.client_sizes) == 23
    assert max(federated.client_sizes) - min(federated.client_sizes) <= 1


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_of_one_that_the_users_loader_makes_is_refused_for_batchnorm_and_one_that_it_drops_is_not(
    tmp_path, drop_last
):
    class Own(LightningDataModule):
        def train_dataloader(self):
            data = TensorDataset(torch.randn(10, 4), torch.arange(10) % 2)
            return DataLoader(data, batch_size=4, shuffle=True, drop_last=drop_last)

    data, module = FederatedDataModule.from_datamodule(Own(), num_clients=2), Deep()
    if drop_last:
        loop, _ = fit(tmp_path, module=module, data=data, max_rounds=1)
        assert loop.current_epoch == 1
        return
    with pytest.raises(ValueError, match=r"\(the first is client 0 with 5 samples\) have a batch of 1 at the batch"):
        fit(tmp_path, module=module, data=data, max_rounds=1)
