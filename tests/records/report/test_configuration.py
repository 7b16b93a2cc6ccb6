import pytest

from lightning_fedstop.records.report import configuration
from tests.records.report.made import config


def test_what_a_configuration_says():
    made = config(seed=3, c=0.5, method="FedDyn")
    assert configuration.method(made) == "FedDyn"
    assert configuration.data_set(made) == "Digits"
    assert configuration.skew(made) == ("Dirichlet", 0.5)
    assert configuration.skew_text(made) == "Dirichlet, c\xa0=\xa00.5"
    assert configuration.seed(made) == 3
    assert [str(rule) for rule in configuration.rules(made)] == ["task vector (τ\xa0=\xa00.01, ρ\xa0=\xa010)"]
    assert configuration.rules(made)[0].observes


def test_no_method_is_fedavg_and_no_configuration_is_nothing():
    assert configuration.method(config()) == "FedAvg"
    assert configuration.method({}) is None
    assert configuration.data_set({}) is None
    assert configuration.skew({}) is None
    assert configuration.seed({}) is None
    assert configuration.rules({}) == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"dataset": "bloodmnist"}, "bloodmnist"), ({"path": "/data/blood_28.npz"}, "blood_28")],
)
def test_the_name_of_a_data_set(arguments, name):
    assert configuration.data_set(config(data_class="Other", **arguments)) == name


def test_the_skews():
    assert configuration.skew_text(config(c=2, skew="PathologicalSkew")) == "pathological, c\xa0=\xa02"
    assert configuration.skew_text(config(c=None, skew="Iid")) == "IID"
    assert configuration.skew_text({"data": {"init_args": {"skew": None}}}) == "IID"
    assert configuration.skew_text(config(c=0.5, skew="mine.Skew")) == "Skew, c\xa0=\xa00.5"


def test_rules_of_every_kind():
    callbacks = [
        {
            "class_path": "ValidationEarlyStopping",
            "init_args": {"monitor": "val_acc", "threshold": 0.01, "patience": 3},
        },
        {"class_path": "a.ConsensusEarlyStopping"},
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "x", "min_delta": 0.1}},
        {"class_path": "Other"},
        "text",
    ]
    rules = configuration.rules({"trainer": {"callbacks": callbacks}})
    assert [str(rule) for rule in rules] == [
        "validation accuracy (τ\xa0=\xa00.01, ρ\xa0=\xa03)",
        "consensus",
        "EarlyStopping on x (τ\xa0=\xa00.1)",
    ]
    assert configuration.rules({"trainer": {"callbacks": callbacks[1]}})[0].name == "consensus"


def test_seeds_and_observers_do_not_change_the_training():
    same = configuration.training(config(seed=0))
    assert configuration.training(config(seed=1, stop=None)) == same
    assert configuration.training(config(method="FedAvg")) == same
    assert configuration.training(config(lr=0.01)) != same
    assert configuration.training(config(c=1.0)) != same
    assert configuration.without_degree(configuration.training(config(c=1.0))) == configuration.without_degree(same)


def test_secrets_are_not_shown():
    flat = configuration.flat({"a": {"api_key": "x", "token": "y", "tokens_per_batch": 4, "password": None}})
    assert flat == {"a.api_key": "(hidden)", "a.token": "(hidden)", "a.tokens_per_batch": 4, "a.password": None}


def test_the_released_code_is_told_apart():
    assert configuration.class_name("released_code.FedLESAM") == "FedLESAM (released code)"
    assert configuration.class_name("FedLESAM") == "FedLESAM"
