import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.models import ImageClassifier
from tests.oracles import read_oracles

# The smallest ConvNeXtV2 there is: two stages would be enough, but timm fixes four.
TINY = {"depths": [1, 1, 1, 1], "dims": [4, 4, 8, 8]}


def tiny(**arguments):
    given = {"backbone": "convnextv2_atto", "num_classes": 3, "in_chans": 1, "backbone_kwargs": TINY}
    return ImageClassifier(**given | arguments)


def loader(size=32, n=6, labels_shape=()):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 1, size, size, generator=generator)
    return DataLoader(TensorDataset(images, (torch.arange(n) % 3).reshape(n, *labels_shape)), batch_size=4)


def test_data_of_more_classes_is_refused(tmp_path):
    loader_of = LightningDataModule.from_datasets(loader().dataset, batch_size=4)
    loader_of.num_classes = 4
    with pytest.raises(ValueError, match="`num_classes` must be at least 4, the classes of the data, got 3"):
        trainer(tmp_path).fit(tiny(), loader_of)


def trainer(path, **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_epochs=1, accelerator="cpu", default_root_dir=path, **quiet | arguments)


@pytest.mark.parametrize("case", read_oracles("macro_accuracy"))
def test_macro_accuracy_is_that_of_the_oracles(case):
    module = tiny(num_classes=case["classes"])
    logits = torch.nn.functional.one_hot(torch.tensor(case["pred"]), case["classes"]).float()
    module.val_metrics.update(logits, torch.tensor(case["y"]))
    assert 100 * module.val_metrics.compute()["val_acc"].item() == pytest.approx(case["macro_percent"], abs=1e-4)


def test_plain_trainer_logs_losses_and_macro_figures(tmp_path):
    module = tiny()
    run = trainer(tmp_path, enable_checkpointing=False)
    run.fit(module, loader(), loader())
    assert {"train_loss", "val_loss", "val_acc", "val_f1"} <= set(run.callback_metrics)
    (test,) = run.test(module, loader(), verbose=False)
    assert set(test) == {"test_loss", "test_acc", "test_f1"}
    with torch.no_grad():
        images, labels = loader().dataset.tensors
        module.eval()
        expected = torch.nn.functional.cross_entropy(module(images), labels)
        recall = [(module(images).argmax(1) == labels)[labels == k].float().mean() for k in range(3)]
    assert test["test_loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert test["test_acc"] == pytest.approx(sum(recall).item() / 3, abs=1e-6)


def test_metrics_start_anew_with_each_evaluation(tmp_path):
    module = tiny()
    run = trainer(tmp_path)
    first, second = (run.validate(module, loader(), verbose=False)[0] for _ in range(2))
    assert first == second
    assert not any("metrics" in key for key in module.state_dict())


def test_optimizer_is_sgd_over_trainable_parameters_decayed_per_epoch():
    module = tiny(lr=0.5, momentum=0.8, weight_decay=0.1, lr_decay=0.9)
    module.backbone.stem.requires_grad_(False)
    (optimizer,), (scheduler,) = module.configure_optimizers()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.8, 0.1)
    assert len(group["params"]) == sum(p.requires_grad for p in module.parameters())
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.45)]


def test_labels_may_have_a_second_axis_of_one():
    module = tiny()
    images, labels = next(iter(loader()))
    flat = module.per_sample_loss((images, labels))
    assert flat.shape == labels.shape
    assert torch.equal(flat, module.per_sample_loss((images, labels[:, None].to(torch.uint8))))
    assert torch.equal(module.training_step((images, labels)), flat.mean())


@pytest.mark.parametrize("labels", [torch.zeros(2, 14, dtype=torch.long), torch.zeros(2)])
def test_other_labels_are_refused(labels):
    with pytest.raises(ValueError, match="one class number per image"):
        tiny().per_sample_loss((torch.zeros(2, 1, 32, 32), labels))


def test_integer_images_are_refused_with_the_hook_that_normalises():
    with pytest.raises(TypeError, match=r"torch\.uint8.*`on_after_batch_transfer`"):
        tiny()(torch.zeros(2, 1, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (1, 32, 32)])
def test_other_image_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(n, 1, height, width\).*`in_chans`"):
        tiny()(torch.zeros(shape))


def test_small_images_are_resized_once_said(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_fedstop.models.classifier.rank_zero_info", said.append)
    module = tiny()
    module.eval()
    images = torch.randn(2, 1, 28, 28)
    resized = torch.nn.functional.interpolate(images, (32, 32), mode="bilinear")
    assert torch.equal(module(images), module(resized))
    assert torch.equal(module(images), module.backbone(resized))
    module(torch.randn(1, 1, 40, 40))
    assert len(said) == 1
    assert "28 x 28 px are resized to 32 x 32" in said[0]


def test_image_size_resizes_every_image():
    module = tiny(image_size=48)
    seen = []
    module.backbone.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[2:])))
    for side in (28, 48, 100):
        module(torch.zeros(1, 1, side, side))
    assert seen == [(48, 48)] * 3


def test_too_small_image_size_is_refused_with_the_size_needed():
    with pytest.raises(ValueError, match=r"`image_size=28`: convnextv2_atto needs >= 32 px"):
        tiny(image_size=28)


def test_training_mode_and_buffers_survive_the_search_for_a_size():
    module = ImageClassifier("resnet18", num_classes=2, backbone_kwargs={"channels": [2, 2, 2, 2]})
    module.train()
    module.backbone.layer1.eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert module._size_for((28, 28)) == (28, 28)
    assert module.backbone.training
    assert not module.backbone.layer1.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"backbone": "convnextv2_natto"}, ValueError, "no model 'convnextv2_natto'; close names: convnextv2_"),
        ({"num_classes": None}, ValueError, "`num_classes` is missing"),
        ({"num_classes": 1}, ValueError, "`num_classes` must be an integer of at least 2"),
        ({"num_classes": True}, TypeError, "`num_classes`"),
        ({"in_chans": 0}, ValueError, "`in_chans`"),
        ({"image_size": 32.5}, TypeError, "`image_size`"),
        ({"lr": 0.0}, ValueError, "`lr` must be a finite number above 0"),
        ({"lr": float("inf")}, ValueError, "`lr`"),
        ({"momentum": 1.0}, ValueError, "`momentum`"),
        ({"weight_decay": -1.0}, ValueError, "`weight_decay`"),
        ({"lr_decay": 1.1}, ValueError, "`lr_decay`"),
        ({"backbone_kwargs": {"act_layer": torch.nn.GELU}}, TypeError, "`backbone_kwargs.act_layer`"),
        ({"backbone_kwargs": {"num_classes": 3}}, ValueError, "cannot hold num_classes"),
        ({"backbone_kwargs": {"drop_pth_rate": 0.1}}, TypeError, "drop_pth_rate"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        tiny(**arguments)


def test_checkpoint_loads_offline_without_reading_weights_again(tmp_path):
    weights = tmp_path / "weights.pth"
    seed_everything(0)
    torch.save(tiny().backbone.state_dict(), weights)
    module = tiny(pretrained=True, weights_path=weights)
    run = trainer(tmp_path)
    run.fit(module, loader())
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    weights.unlink()
    assert torch.load(path, weights_only=True)["hyper_parameters"]["weights_path"] is None
    loaded = ImageClassifier.load_from_checkpoint(path)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in module.state_dict().items())
    assert module.hparams_initial["weights_path"] == weights


def test_same_seed_gives_the_same_start():
    first, second = (seed_everything(1) and tiny() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
