"""Sentences at the top of a report: the stops of the runs and their reasons."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fedstop.records.report import configuration, numbers
from lightning_fedstop.records.report.numbers import finite, is_value, mean, mean_and_spread, percent
from lightning_fedstop.records.report.runs import RULE_NAMES, Group
from lightning_fedstop.records.report.tables import differences, in_points


def on_one(group: Group, threshold: float, patience: int) -> str:
    """Tell how the runs of one configuration ended, and where rules stop them."""
    return f"{_how_it_ended(group)} {_what_rules_say(group, threshold, patience)}"


def on_average(groups: Sequence[Group], threshold: float, patience: int) -> str:
    """Compare the task-vector rule with the other rules over all runs."""
    runs = [run for group in groups for run in group.runs]
    over = sum(run.is_over for run in runs)
    text = f"{len(runs)} runs of {len(groups)} configurations{'' if over == len(runs) else f', {over} of them over'}."
    stops = [stop for group in groups for stop in group.stops("task_vector", threshold, patience)]
    shares = finite([run.share_of("task_vector", threshold, patience) for run in runs])
    if not shares:
        return f"{text} In none of them does the task-vector rule stop with {_settings(threshold, patience)}, so far."
    stopping = sum(stop.stop_round is not None for stop in stops)
    text += (
        f" With {_settings(threshold, patience)} the task-vector rule stops {stopping} of them, with "
        f"{percent(mean(shares))} of the budget used on average ({percent(min(shares))} to {percent(max(shares))})."
    )
    against = []
    for rule in ("val_loss", "val_acc", "consensus"):
        rounds, points = differences(runs, rule, threshold, patience)
        later, higher = mean(rounds), in_points(mean(points))
        if later is not None:
            accuracy = f", {higher} test accuracy" if higher is not None else ""
            against.append(
                f"{abs(later):.1f} rounds {'later' if later >= 0 else 'earlier'} than {RULE_NAMES[rule].lower()} "
                f"({len(rounds)} runs{accuracy})"
            )
    return f"{text} On average it stops {_joined(against)}." if against else text


def tiles(group: Group, threshold: float, patience: int) -> list[tuple[str, str, str]]:
    """List key figures of the task-vector rule: name, value, and a word beside it."""
    rule = "task_vector"
    stop = group.rounds_text(rule, threshold, patience)
    if stop is None:
        return []
    shares = [run.share_of(rule, threshold, patience) for run in group.runs]
    saved = mean([100 - share for share in finite(shares)])
    found = [
        ("Task vector stops in round", stop, f"of {group.runs[0].record.budget}"),
        ("Budget used", mean_and_spread(shares, unit="%"), "" if saved is None else f"saves {percent(saved)}"),
        (
            "Test accuracy there",
            mean_and_spread([run.accuracy_of(rule, threshold, patience) for run in group.runs], unit="%"),
            "",
        ),
    ]
    return [(name, value, more) for name, value, more in found if value is not None]


def _how_it_ended(group: Group) -> str:
    runs, budget = group.runs, group.runs[0].record.budget
    over = sum(run.is_over for run in runs)
    if len(runs) > 1:
        seeds = [configuration.seed(run.config) for run in runs]
        named = f" (seeds {', '.join(map(str, seeds))})" if None not in seeds and len(seeds) <= 10 else ""
        where = f"{numbers.rounds([run.stop_round for run in runs])} of {budget}"
        if not over:
            return f"{len(runs)} runs{named} have come to round {where} and are not over, or were interrupted."
        accuracy = mean_and_spread([run.test_accuracy for run in runs], unit="%")
        text = f"{len(runs)} runs{named} ended in round {where}"
        text += f", with a test accuracy of {accuracy}" if accuracy else ""
        rest = len(runs) - over
        return text + (f"; {rest} of them {'is' if rest == 1 else 'are'} not over, or interrupted." if rest else ".")
    run = runs[0]
    if not over:
        return (
            f"The run has come to round {run.last_round} of {budget}; without a summary, it is still going on or was "
            "interrupted."
        )
    accuracy = f" with a test accuracy of {percent(run.test_accuracy)}" if run.test_accuracy is not None else ""
    if run.stop_round >= budget:
        return f"The run used its whole budget of {budget} rounds and ended{accuracy or ' there'}."
    reason = run.reason if run.reason.endswith((".", "!", "?", "")) else f"{run.reason}."
    return (
        f"The run stopped in round {run.stop_round} of {budget}, {percent(run.share_used)} of its budget,"
        f"{accuracy or ' without a test'}. {reason}"
    )


def _what_rules_say(group: Group, threshold: float, patience: int) -> str:
    said = []
    for rule in group.rules():
        rounds = group.rounds_text(rule, threshold, patience)
        stops = any(stop.stop_round is not None for stop in group.stops(rule, threshold, patience))
        accuracy = mean_and_spread([run.accuracy_of(rule, threshold, patience) for run in group.runs], unit="%")
        there = f" ({accuracy})" if accuracy and stops else ""
        said.append(f"{RULE_NAMES[rule].lower()} {'in round ' if stops else ''}{rounds}{there}")
    if not said:
        return "No rule can be replayed on what was recorded."
    return f"By the record, with {_settings(threshold, patience)}, the rules stop: {_joined(said)}."


def _settings(threshold: float, patience: int) -> str:
    return f"{is_value('τ', threshold)} and {is_value('ρ', patience)}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
