"""Records of runs that never took place, with curves like those of real ones."""

import csv
import json
import math
import random

import yaml

COLUMNS = (
    "round", "distance", "growth_rate", "wait_count", "train_loss", "val_loss", "val_acc", "val_f1", "test_loss",
    "test_acc", "test_f1", "lr", "clients", "samples", "bytes_down", "bytes_up", "seconds_train", "seconds_eval",
    "seconds_criterion", "consensus/shift", "consensus/dispersion",
)  # fmt: skip
STOP = {"threshold": 0.01, "patience": 10, "observe_only": True}


def config(
    seed=0, c=0.1, method=None, skew="DirichletSkew", data_class="Digits", max_rounds=120, stop=STOP, **arguments
):
    degree = {"PathologicalSkew": "classes_per_client"}.get(skew, "concentration")
    skew_arguments = {} if c is None else {degree: c}
    callbacks = [{"class_path": "lightning_fedstop.TaskVectorEarlyStopping", "init_args": dict(stop)}] if stop else None
    return {
        "seed_everything": seed,
        "trainer": {
            "method": method and {"class_path": f"lightning_fedstop.{method}", "init_args": {}},
            "max_rounds": max_rounds,
            "clients_per_round": 5,
            "callbacks": callbacks,
            "default_root_dir": f"runs/{seed}",
        },
        "model": {"class_path": "lightning_fedstop.ImageClassifier", "init_args": {"lr": arguments.pop("lr", 0.001)}},
        "data": {
            "class_path": f"lightning_fedstop.{data_class}",
            "init_args": {
                "num_clients": 20,
                "skew": {"class_path": f"lightning_fedstop.{skew}", "init_args": skew_arguments},
                "seed": None,
                **arguments,
            },
        },
    }


def rows(rounds=120, seed=0, speed=0.35, best=0.8, validation=True, test=True, consensus=True):
    chance = random.Random(f"{seed}-{speed}-{best}")
    previous, made = None, []
    for r in range(1, rounds + 1):
        distance = 1.6 * r**speed * (1 + 0.004 * chance.uniform(-1, 1))
        growth = math.nan if previous is None else abs(distance - previous) / previous
        level = best * (1 - math.exp(-r / 25)) + 0.12 + chance.gauss(0, 0.04 * math.exp(-r / 60))
        row = dict.fromkeys(COLUMNS, "")
        row |= {"round": r, "distance": repr(distance), "growth_rate": repr(growth), "wait_count": 0}
        row |= {"train_loss": repr(1.2 * math.exp(-r / 30)), "lr": 0.001, "clients": 5, "samples": 600}
        row |= {
            "bytes_down": 1000000,
            "bytes_up": 900000,
            "seconds_train": 20.5,
            "seconds_eval": 3,
            "seconds_criterion": 0.02,
        }
        if validation:
            row |= {
                "val_loss": repr(2 - 1.5 * level + 0.1 * chance.random()),
                "val_acc": repr(level + chance.gauss(0, 0.02)),
            }
        if test:
            row |= {"test_loss": repr(2 - 1.5 * level), "test_acc": repr(level), "test_f1": repr(0.9 * level)}
        if consensus:
            row |= {"consensus/shift": repr(distance), "consensus/dispersion": repr(3 + 0.1 * chance.random())}
        made.append(row)
        previous = distance
    return made


def summary(stop_round=120, budget=120, test_acc=0.81, reason="The budget of 120 rounds is used up."):
    return {
        "stop_round": stop_round,
        "stop_reason": reason,
        "budget": budget,
        "share_used": stop_round / budget,
        "test": {} if test_acc is None else {"test_loss": 0.5, "test_acc": test_acc},
        "seconds": 2900.5,
        "peak_memory_bytes": {"resident": 1_930_000_000},
        "device": "cpu (x86_64, 1 threads)",
    }


def write_run(folder, made_rows=None, made_config=None, made_summary=None, **shape):
    """Write a version folder and return its path; ``shape`` goes to :func:`rows`."""
    folder.mkdir(parents=True)
    made_rows = rows(**shape) if made_rows is None else made_rows
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(made_rows)
    if made_config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(made_config))
    if made_summary is not None:
        (folder / "summary.json").write_text(json.dumps(made_summary))
    return folder
