"""Compiled steps: the same numbers and names, and a number of compilations that does not grow."""

import copy
import pickle
import shutil

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch._dynamo.utils import counters

from lightning_fedstop.data import Digits, DirichletSkew
from lightning_fedstop.methods import FedSAM
from lightning_fedstop.models import ImageClassifier, _compiled
from lightning_fedstop.models._compiled import CompiledForward, compile_blocks
from lightning_fedstop.models._matmul import CompiledDepthwise, CompiledPointwise
from tests.helpers import make_loop

# Two blocks of one shape, so that there is one graph to take.
TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32}
CONVNEXT = {"backbone": "convnextv2_atto", "backbone_kwargs": {"depths": [1, 2, 1, 1], "dims": [4, 4, 8, 8]}}


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Graphs are taken and counted, and run without being compiled further."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(_compiled, "BACKEND", "eager")
    monkeypatch.setattr(_compiled, "_functions", {})


def graphs():
    return counters["stats"]["unique_graphs"]


def tiny(**arguments):
    seed_everything(0, verbose=False)
    given = {"backbone": "vit_tiny_patch16_224", "num_classes": 10, "in_chans": 1, "backbone_kwargs": TINY}
    return ImageClassifier(**given | {"image_size": 32, "lr": 0.1} | arguments)


def gradients(module, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 32, 32, generator=generator)
    module.zero_grad()
    module.per_sample_loss((images, torch.arange(count) % 10)).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def test_batches_of_all_sizes_share_one_graph_a_shape_of_block():
    module, plain = tiny(compile=True), tiny()
    for count in (32, 17, 24, 40, 5, 2, 1, 32):
        assert torch.allclose(gradients(module, count), gradients(plain, count), atol=1e-6)
        assert graphs() == 1
    with torch.no_grad():
        module(torch.randn(20, 1, 32, 32))
    module.eval()
    module(torch.randn(20, 1, 32, 32))
    assert graphs() == 1


def test_small_batches_are_compiled_where_there_are_no_larger_ones():
    module = tiny(compile=True)
    for count in (6, 4, 8):
        gradients(module, count)
    assert graphs() == 1


def test_a_federation_of_unequal_clients_and_two_gradients_a_step_compiles_once(tmp_path):
    data = Digits(num_clients=12, skew=DirichletSkew(0.3), batch_size=64)
    runs = []
    for compiled in (True, False):
        module = tiny(compile=compiled)
        loop = make_loop(tmp_path, method=FedSAM(), max_rounds=2, clients_per_round=6, local_epochs=1, seed=1)
        loop.fit(module, data)
        runs.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert len({size % 64 for size in data.client_sizes}) > 3
    assert 0 < graphs() <= 2
    assert torch.allclose(*runs, atol=1e-5)


def test_a_checkpoint_is_the_same_with_and_without(tmp_path):
    module, plain = tiny(compile=True), tiny()
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict())
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    batch = (torch.randn(20, 1, 32, 32), torch.arange(20) % 10)
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=20))
    assert graphs() == 1
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.hparams["compile"]
    assert isinstance(loaded.backbone.blocks[0].forward, CompiledForward)
    assert not ImageClassifier.load_from_checkpoint(tmp_path / "x.ckpt", compile=False).hparams["compile"]
    assert torch.equal(gradients(loaded, 20), gradients(module, 20))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_trains_its_own_weights_compiled(copied):
    module = tiny(compile=True)
    wanted = gradients(module, 20)
    other = copied(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(gradients(other, 20), wanted)
    assert other.backbone.blocks[0].forward.module is other.backbone.blocks[0]


def test_layers_as_matrix_products_are_compiled_in_one_piece():
    module, plain = (tiny(compile=c, matmul_layers=True, **CONVNEXT) for c in (True, False))
    assert torch.allclose(gradients(module, 20), gradients(plain, 20), atol=1e-6)
    gradients(module, 33)
    assert graphs() == 4
    assert not counters["graph_break"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_compiled_in_channels_last_order(tmp_path, precision):
    module = tiny(compile=True, channels_last=True)
    start = torch.cat([p.detach().flatten() for p in module.parameters()]).float()
    loop = make_loop(tmp_path, precision=precision, max_rounds=1, clients_per_round=2, local_epochs=1)
    loop.fit(module, Digits(num_clients=20, batch_size=64))
    moved = torch.cat([p.detach().flatten() for p in module.parameters()]).float() - start
    assert torch.isfinite(moved).all()
    assert moved.norm() > 0
    assert 0 < graphs() <= 2


def test_a_convnext_has_no_convolution_of_torchs_where_it_is_compiled_and_only_there():
    module, plain = (tiny(compile=c, **CONVNEXT) for c in (True, False))
    assert {type(layer) for layer in module.backbone.stages[0].blocks[0].modules()} > {
        CompiledDepthwise,
        CompiledPointwise,
    }
    kinds = _kinds_of_calls(module, 20)
    assert not any(kind.startswith("conv2d") for kind in kinds), kinds
    assert any(kind.startswith("linear ") for kind in kinds)
    assert any("lightning_fedstop" in kind for kind in kinds)
    assert torch.allclose(gradients(module, 20), gradients(plain, 20), atol=1e-6)
    module.load_state_dict(plain.state_dict())
    images = torch.randn(20, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(module(images), plain(images))


def _kinds_of_calls(module, count):
    """What the graphs of a step call."""
    called = set()

    def backend(graph, _):
        called.update(f"{getattr(node.target, '__name__', '')} {node.target}" for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    _compiled._functions.clear()
    before, _compiled.BACKEND = _compiled.BACKEND, backend
    gradients(module, count)
    _compiled.BACKEND = before
    return called


def test_channels_last_reaches_the_backbone_and_changes_nothing():
    module, plain = (tiny(channels_last=last, in_chans=3, **CONVNEXT) for last in (True, False))
    seen = []
    module.backbone.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    images = torch.randn(4, 3, 32, 32)
    assert torch.allclose(module(images), plain(images), atol=1e-6)
    assert seen[-1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("switch", ["compile", "channels_last"])
def test_clients_can_be_stacked(tmp_path, switch, recwarn):
    runs = []
    for backend in ("stacked", "sequential"):
        module = tiny(**{switch: True})
        loop = make_loop(tmp_path, client_backend=backend, max_rounds=1, clients_per_round=3, local_epochs=1, seed=1)
        loop.fit(module, Digits(num_clients=60, batch_size=32))
        runs.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(*runs, atol=1e-5)
    assert not any("one after the other" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize(("backbone", "count"), [("resnet10t", 4), ("test_efficientnet", 5), ("densenet121", 1)])
def test_rows_of_blocks_are_compiled_or_else_the_whole(backbone, count):
    assert compile_blocks(ImageClassifier(backbone, num_classes=2).backbone) == count


def test_no_compiler_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(_compiled, "BACKEND", "inductor")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _no_compiler)
    loop = make_loop(tmp_path, max_rounds=1, clients_per_round=1)
    with pytest.raises(RuntimeError, match=r"`compile=True` needs a C\+\+ compiler to train on a CPU, and none"):
        loop.fit(tiny(compile=True), Digits(num_clients=20, batch_size=32))


def _no_compiler():
    raise RuntimeError("none")


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler g++")
def test_inductor_gives_the_same_gradients_for_two_batch_sizes(monkeypatch):
    monkeypatch.setattr(_compiled, "BACKEND", "inductor")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    plain = copy.deepcopy(module)
    assert compile_blocks(module) == 1
    for count in (20, 33):
        images = torch.randn(count, 3)
        for one in (module, plain):
            one.zero_grad()
            one(images).square().mean().backward()
        assert torch.allclose(module[0].weight.grad, plain[0].weight.grad, atol=1e-6)
    assert graphs() == 1
