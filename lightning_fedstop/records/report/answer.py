"""The short answer at the top: what stopped when and why, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fedstop.records.report import configuration
from lightning_fedstop.records.report.markup import Content, tag
from lightning_fedstop.records.report.numbers import is_value, mean, mean_and_spread, percent
from lightning_fedstop.records.report.numbers import rounds as mean_rounds
from lightning_fedstop.records.report.runs import RULE_NAMES, Group
from lightning_fedstop.records.report.sweeps import accuracy_of, share_of
from lightning_fedstop.records.report.tables import differences, in_points, rounds_text

_MOST_SENTENCES = 4


def answer(groups: Sequence[Group], threshold: float, patience: int) -> list[Content]:
    """A sentence or two a configuration, for a single one the key figures, for many their averages."""
    if len(groups) == 1:
        group = groups[0]
        sentences = [how_it_ended(group), " ", what_rules_say(group, threshold, patience)]
        return [tag("p", sentences, class_="answer"), _tiles(group, threshold, patience)]
    parts: list[Content] = [tag("p", _on_average(groups, threshold, patience), class_="answer")]
    if len(groups) <= _MOST_SENTENCES:
        items = [
            tag(
                "li",
                tag("strong", group.label),
                ": ",
                how_it_ended(group),
                " ",
                what_rules_say(group, threshold, patience),
            )
            for group in groups
        ]
        parts.append(tag("ul", items, class_="answer"))
    return parts


def _on_average(groups: Sequence[Group], threshold: float, patience: int) -> str:
    """The task-vector rule over all runs, and against the other rules run by run."""
    runs = [run for group in groups for run in group.runs]
    text = f"{len(runs)} runs of {len(groups)} configurations"
    over = sum(run.is_over for run in runs)
    text += "." if over == len(runs) else f", {over} of them over."
    stops = [stop for group in groups for stop in group.stops("task_vector", threshold, patience)]
    shares = [share for run in runs if (share := share_of(run, "task_vector", threshold, patience)) is not None]
    stopping = sum(stop.stop_round is not None for stop in stops)
    if not shares:
        return f"{text} In none of them does the task-vector rule stop with {_rule(threshold, patience)}, so far."
    text += (
        f" With {_rule(threshold, patience)} the task-vector rule stops {stopping} of them, with "
        f"{percent(mean(shares))} of the budget used on average ({percent(min(shares))} to {percent(max(shares))})."
    )
    against = []
    for rule in ("val_loss", "val_acc", "consensus"):
        rounds, points = differences(runs, rule, threshold, patience)
        if rounds:
            later, higher = mean(rounds) or 0.0, mean(points)
            points_text = f", {in_points(higher)} test accuracy" if higher is not None else ""
            against.append(
                f"{abs(later):.1f} rounds {'later' if later >= 0 else 'earlier'} than {RULE_NAMES[rule].lower()} "
                f"({len(rounds)} runs{points_text})"
            )
    return f"{text} On average it stops {_joined(against)}." if against else text


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _rule(threshold: float, patience: int) -> str:
    return f"{is_value('τ', threshold)} and {is_value('ρ', patience)}"


def how_it_ended(group: Group) -> str:
    """How the runs themselves ended."""
    runs = group.runs
    over = [run for run in runs if run.is_over]
    if len(runs) > 1:
        seeds = [configuration.seed(run.config) for run in runs]
        named = f" (seeds {', '.join(map(str, seeds))})" if None not in seeds and len(seeds) <= 10 else ""
        rounds = mean_rounds([run.stop_round for run in runs])
        accuracy = mean_and_spread([run.test_accuracy for run in runs], unit="%")
        text = f"{len(runs)} runs{named}"
        if not over:
            return (
                f"{text} have come to round {rounds} of {runs[0].record.budget} and are not over, or were interrupted."
            )
        text += f" ended in round {rounds} of {runs[0].record.budget}"
        text += f", with a test accuracy of {accuracy}" if accuracy else ""
        rest = len(runs) - len(over)
        return text + (f"; {rest} of them {'is' if rest == 1 else 'are'} not over, or interrupted." if rest else ".")
    run = runs[0]
    if not over:
        return (
            f"The run has come to round {run.last_round} of {run.record.budget}; without a summary, it is still going "
            "on or was interrupted."
        )
    accuracy = f" with a test accuracy of {percent(run.test_accuracy)}" if run.test_accuracy is not None else ""
    if run.stop_round >= run.record.budget:
        return f"The run used its whole budget of {run.record.budget} rounds and ended{accuracy or ' there'}."
    reason = run.reason if run.reason.endswith((".", "!", "?", "")) else f"{run.reason}."
    return (
        f"The run stopped in round {run.stop_round} of {run.record.budget}, {percent(run.share_used)} of its budget,"
        f"{accuracy or ' without a test'}. {reason}"
    )


def what_rules_say(group: Group, threshold: float, patience: int) -> str:
    """Where the rules stop these runs, by their records."""
    rules = group.rules()
    if not rules:
        return "No rule can be replayed on what was recorded."
    told = []
    for rule in rules:
        stops = group.stops(rule, threshold, patience)
        words = rounds_text(stops, max(run.last_round for run in group.runs))
        accuracy = mean_and_spread([accuracy_of(run, rule, threshold, patience) for run in group.runs], unit="%")
        stopping = any(stop.stop_round is not None for stop in stops)
        name = RULE_NAMES[rule].lower()
        told.append(
            f"{name} {'in round ' if stopping else ''}{words}" + (f" ({accuracy})" if accuracy and stopping else "")
        )
    return f"By the record, with {_rule(threshold, patience)}, the rules stop: {_joined(told)}."


def _tiles(group: Group, threshold: float, patience: int) -> Content:
    rule = "task_vector"
    if rule not in group.rules():
        return None
    stops = group.stops(rule, threshold, patience)
    share = [share_of(run, rule, threshold, patience) for run in group.runs]
    accuracy = [accuracy_of(run, rule, threshold, patience) for run in group.runs]
    saved = mean([100 - value for value in share if value is not None])
    budget = group.runs[0].record.budget
    tiles = [
        ("Task vector stops in round", rounds_text(stops, max(run.last_round for run in group.runs)), f"of {budget}"),
        ("Budget used", mean_and_spread(share, unit="%"), f"saves {percent(saved)}" if saved is not None else ""),
        ("Test accuracy there", mean_and_spread(accuracy, unit="%"), ""),
    ]
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value, " ", tag("small", more) if more else None))
            for name, value, more in tiles
            if value is not None
        ],
        class_="tiles",
    )
