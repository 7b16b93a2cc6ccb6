import functools

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping

from .walkers import Regression, trainer

RULE = {"threshold": 0.05, "patience": 3}


class SaveFirst(Callback):
    """A user's own saving, listed before the callback: at its turn the epoch is over, but not yet checked."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"user-{trainer.current_epoch}.ckpt")


SAVING = {
    "at the end of the training epoch": {"save_on_train_epoch_end": True},
    "at the end of validation": {"save_on_train_epoch_end": False},
    "within and at the end of an epoch": {"every_n_train_steps": 2},
    "at the last step of an epoch": {"every_n_train_steps": 4},
    "before the check": None,
}


def outcome(callback, ran, module):
    return {
        "epochs": ran.current_epoch,
        "stopped_epoch": callback.stopped_epoch,
        "stop_round": callback.stop_round,
        "reason": callback.stopping_reason,
        "wait_count": callback.wait_count,
        "round": callback.criterion.round,
        "distance": callback.criterion.distance,
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]).tolist(),
        "start": torch.cat([p.flatten() for p in callback.criterion.theta_0]).tolist(),
    }


def fit(callback, *others, module=None, ckpt_path=None, **arguments):
    module = Regression() if module is None else module
    ran = trainer(*others, callback, **{"max_epochs": 30} | arguments)
    ran.fit(module, ckpt_path=ckpt_path)
    return outcome(callback, ran, module)


@functools.cache
def uninterrupted():
    return fit(TaskVectorEarlyStopping(**RULE))


def saved_by(folder, saving, **arguments):
    others = [SaveFirst(folder)]
    if SAVING[saving] is not None:
        others = [ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **SAVING[saving])]
    fit(TaskVectorEarlyStopping(**RULE), *others, **arguments)
    return sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def test_the_run_to_be_interrupted_counts_and_stops():
    whole = uninterrupted()
    assert 5 < whole["epochs"] < 30
    assert whole["reason"] is StoppingReason.SATURATED


@pytest.mark.parametrize("validation", [True, False], ids=["validation", "no validation"])
@pytest.mark.parametrize("saving", SAVING)
def test_resumed_run_stops_where_the_whole_one_does(tmp_path, saving, validation):
    if saving == "at the end of validation" and not validation:
        pytest.skip("there is none")
    limit = {} if validation else {"limit_val_batches": 0}
    paths = saved_by(tmp_path, saving, **limit)
    whole = uninterrupted()
    assert len(paths) >= whole["epochs"]
    # From the first, from one amid the count, and from the last: it holds the epoch that stops the run.
    for path in (paths[0], paths[-3], paths[-1]):
        assert fit(TaskVectorEarlyStopping(**RULE), ckpt_path=path, **limit) == whole, path.name


def test_resumed_with_the_same_object(tmp_path):
    callback = TaskVectorEarlyStopping(**RULE)
    fit(callback, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    assert fit(callback, ckpt_path=tmp_path / "epoch=2.ckpt") == uninterrupted()


def test_a_learning_rate_finder_restores_the_start_of_the_fit(recwarn):
    callback = TaskVectorEarlyStopping(**RULE)
    for _ in range(2):
        module = Regression()
        module.lr = 0.1
        finder = LearningRateFinder(num_training_steps=3, update_attr=False)
        assert fit(callback, finder, module=module) == uninterrupted()
    assert not any("holds no weights" in str(warning.message) for warning in recwarn)


def test_the_first_epoch_of_a_later_fit_is_counted_once(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "amid.ckpt")

    callback = TaskVectorEarlyStopping(1e-9)
    ran, module = trainer(callback, Save(), max_epochs=2), Regression()
    ran.fit(module)
    ran.fit_loop.max_epochs = 4
    ran.fit(module)
    assert callback.criterion.round == 2
    assert fit(TaskVectorEarlyStopping(1e-9), ckpt_path=tmp_path / "amid.ckpt", max_epochs=4)["round"] == 2


def test_interrupted_by_an_exception(tmp_path):
    class Crash(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == uninterrupted()["epochs"] - 2:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fit(TaskVectorEarlyStopping(**RULE), Crash(), ModelCheckpoint(tmp_path, "last"))
    assert fit(TaskVectorEarlyStopping(**RULE), ckpt_path=tmp_path / "last.ckpt") == uninterrupted()


@pytest.mark.parametrize("saving", ["at the end of the training epoch", "at the end of validation", "before the check"])
def test_an_epoch_is_counted_once_under_max_steps(tmp_path, saving):
    # Limited by steps, a resumed Trainer runs the end of the saved epoch a second time.
    paths = saved_by(tmp_path, saving)
    resumed = fit(TaskVectorEarlyStopping(**RULE), ckpt_path=paths[3], max_epochs=-1, max_steps=200)
    assert resumed == uninterrupted()


def test_check_every_second_epoch(tmp_path):
    rule = RULE | {"check_every_n_epochs": 2}
    whole = fit(TaskVectorEarlyStopping(**rule), SaveFirst(tmp_path))
    for epoch in (0, 1, 2, 5):
        assert fit(TaskVectorEarlyStopping(**rule), ckpt_path=tmp_path / f"user-{epoch}.ckpt") == whole, epoch


def test_a_stopped_run_trains_nothing_more(tmp_path):
    path = saved_by(tmp_path, "at the end of the training epoch")[-1]
    with pytest.warns(UserWarning, match="already stopped in epoch .* so nothing more is trained"):
        assert fit(TaskVectorEarlyStopping(**RULE), ckpt_path=path) == uninterrupted()


def test_a_stopped_run_goes_on_when_only_observed(tmp_path):
    rule = RULE | {"observe_only": True}
    whole = fit(TaskVectorEarlyStopping(**rule), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_epochs=14)
    stopped = whole["stopped_epoch"]
    assert stopped < 12
    path = tmp_path / f"epoch={stopped + 1}.ckpt"
    assert fit(TaskVectorEarlyStopping(**rule), ckpt_path=path, max_epochs=14) == whole


def test_two_resume_side_by_side(tmp_path):
    slow = {"threshold": 0.01, "patience": 5}
    first, second = TaskVectorEarlyStopping(**RULE, observe_only=True), TaskVectorEarlyStopping(**slow)
    whole = fit(first, second, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    assert second.stopped_epoch > first.stopped_epoch > 0
    again, other = TaskVectorEarlyStopping(**RULE, observe_only=True), TaskVectorEarlyStopping(**slow)
    assert fit(again, other, ckpt_path=tmp_path / f"epoch={first.stopped_epoch - 1}.ckpt") == whole
    assert (other.wait_count, other.stopped_epoch) == (second.wait_count, second.stopped_epoch)


def test_a_checkpoint_without_the_start_is_said(tmp_path):
    trainer(ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_epochs=3).fit(Regression())
    callback = TaskVectorEarlyStopping(0.5, 2)
    with pytest.warns(UserWarning, match=r"epoch=2.ckpt holds no weights that the run began with: distances are meas"):
        fit(callback, ckpt_path=tmp_path / "epoch=2.ckpt", max_epochs=4)
    assert callback.criterion.round == 1


OTHERS = {
    "threshold": {"threshold": 0.02},
    "patience": {"patience": 5},
    "variant": {"variant": "released_code"},
    "min_rounds": {"min_rounds": 12},
    "check_finite": {"check_finite": False},
    "every second epoch": {"check_every_n_epochs": 2},
    "observe_only": {"observe_only": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_with_other_arguments_it_measures_from_the_same_start_and_counts_from_there(tmp_path, other, caplog):
    rule = RULE | OTHERS[other]
    path = saved_by(tmp_path, "at the end of the training epoch", max_epochs=8)[3]
    whole = fit(TaskVectorEarlyStopping(1e-9), max_epochs=6)
    with caplog.at_level("INFO"):
        resumed = fit(TaskVectorEarlyStopping(**rule), ckpt_path=path, max_epochs=6)
    assert "TaskVectorEarlyStopping counts from here on" in caplog.text
    assert "`fedstop replay`" in caplog.text
    checks = 1 if other == "every second epoch" else 2
    assert (resumed["round"], resumed["start"], resumed["distance"]) == (checks, whole["start"], whole["distance"])


def test_the_state_loads_with_weights_only(tmp_path):
    path = saved_by(tmp_path, "at the end of the training epoch")[2]
    state = torch.load(path, weights_only=True)["callbacks"][TaskVectorEarlyStopping(**RULE).state_key]
    assert state["parameter_names"] == [name for name, _ in Regression().named_parameters()]
    assert [tuple(theta.shape) for theta in state["criterion"]["start"]] == [
        tuple(p.shape) for p in Regression().parameters()
    ]


def test_evaluating_a_checkpoint_leaves_the_record_alone(tmp_path):
    path = saved_by(tmp_path, "at the end of the training epoch")[2]
    callback, module = TaskVectorEarlyStopping(**RULE), Regression()
    ran = trainer(callback, max_epochs=30)
    ran.fit(module)
    before = outcome(callback, ran, module)
    ran.validate(module, ckpt_path=path, verbose=False)
    assert outcome(callback, ran, module)["stop_round"] == before["stop_round"]
    assert callback.wait_count == before["wait_count"]
    callback.load_state_dict(torch.load(path)["callbacks"][callback.state_key])
    assert callback.criterion.round == 3


def test_states_can_be_loaded_by_hand_after_a_failed_evaluation(tmp_path):
    class Fails(Callback):
        def on_validation_start(self, trainer, pl_module):
            raise RuntimeError("no data")

    callback = TaskVectorEarlyStopping(**RULE)
    with pytest.raises(RuntimeError, match="no data"):
        trainer(callback, Fails()).validate(Regression(), verbose=False)
    path = saved_by(tmp_path, "at the end of the training epoch")[2]
    callback.load_state_dict(torch.load(path)["callbacks"][callback.state_key])
    assert callback.criterion.round == 3


def test_unfrozen_parameters_keep_their_start(tmp_path):
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                pl_module.net[0].weight.requires_grad = True

    def module():
        module = Regression()
        module.net[0].weight.requires_grad = False
        return module

    rule = {"threshold": 1e-9}
    save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = fit(TaskVectorEarlyStopping(**rule), Unfreeze(), save, module=module(), max_epochs=5)
    assert len(whole["start"]) == len(whole["weights"])
    for epoch in (1, 3):
        path = tmp_path / f"epoch={epoch}.ckpt"
        resumed = fit(TaskVectorEarlyStopping(**rule), Unfreeze(), module=module(), ckpt_path=path, max_epochs=5)
        if epoch == 1:  # after epoch 2 nobody unfreezes the weight again, so it trains no further
            assert resumed == whole
        assert resumed["start"] == whole["start"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    class Renamed(Regression):
        strict_loading = False

        def __init__(self):
            super().__init__()
            self.network = self.net
            del self.net

        def configure_optimizers(self):
            self.__dict__["net"] = self.network
            return super().configure_optimizers()

    path = saved_by(tmp_path, "at the end of the training epoch")[2]
    with pytest.raises(MisconfigurationException, match=r"measures net.0.weight, .* but Renamed has no such parameter"):
        fit(TaskVectorEarlyStopping(**RULE), module=Renamed(), ckpt_path=path)
