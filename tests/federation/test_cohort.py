import pytest
import torch

from lightning_fedstop.federation.cohort import ScheduledCohort, UniformCohort, assign_clients, cohort_size


def sample(cohort, round, num_clients, size):
    return cohort.sample(round, num_clients, size, torch.Generator().manual_seed(round))


def test_uniform_cohorts_are_distinct_ascending_and_reach_every_client_alike():
    counts = torch.zeros(10)
    for round in range(1, 1001):
        clients = sample(UniformCohort(), round, 10, 3)
        assert clients == sorted(set(clients))
        assert len(clients) == 3
        counts[clients] += 1
    # Binomial(1000, .3) has a standard deviation of 14.5.
    assert (counts - 300).abs().max() < 60


def test_uniform_cohort_depends_on_the_generator_alone():
    assert sample(UniformCohort(), 5, 100, 10) == sample(UniformCohort(), 5, 100, 10)
    assert sample(UniformCohort(), 5, 100, 10) != sample(UniformCohort(), 6, 100, 10)
    assert sample(UniformCohort(), 1, 4, 4) == [0, 1, 2, 3]


def test_schedule_repeats_and_cannot_be_changed_from_outside():
    cohort = ScheduledCohort([[1, 0], [2]])
    assert [sample(cohort, round, 3, 1) for round in (1, 2, 3, 4)] == [[0, 1], [2], [0, 1], [2]]
    sample(cohort, 1, 3, 1).append(9)
    assert sample(cohort, 1, 3, 1) == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "at least one round, got none"),
        ([[0], []], "Round 2 of `schedule` must name at least one client"),
        ([[1, 1]], r"each once, got \[1, 1\]"),
    ],
)
def test_bad_schedules_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        ScheduledCohort(schedule)


@pytest.mark.parametrize("client", [-1, 3])
def test_a_schedule_of_clients_that_do_not_exist_is_refused(client):
    with pytest.raises(ValueError, match=r"Round 2 .* the clients are 0 to 2"):
        ScheduledCohort([[0], [client]]).check(3, 1)
    ScheduledCohort([[0], [2]]).check(3, 1)


@pytest.mark.parametrize(
    ("clients_per_round", "num_clients", "size"),
    [(1, 1, 1), (3, 3, 3), (0.1, 5, 1), (0.1, 100, 10), (0.29, 100, 29), (1.0, 7, 7), (0.5, 3, 2), (1e-9, 10, 1)],
)
def test_cohort_size(clients_per_round, num_clients, size):
    assert cohort_size(clients_per_round, num_clients) == size


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, 2.0, True, "all", None, float("nan")])
def test_other_sizes_are_refused(value):
    with pytest.raises(ValueError, match="`clients_per_round` must be an integer of at least 1"):
        cohort_size(value, 10)


def test_more_clients_than_there_are_are_refused():
    with pytest.raises(ValueError, match="at most the number of clients, 3, got 5"):
        cohort_size(5, 3)


@pytest.mark.parametrize(
    ("clients", "work", "ranks", "assignment"),
    [
        ([0, 1, 2], [10, 90, 70], 1, [[1, 2, 0]]),
        ([0, 1, 2], [10, 90, 70], 2, [[1], [2, 0]]),
        ([0], [5], 3, [[0], [], []]),
        ([], [5], 2, [[], []]),
        ([0, 1, 2, 3], [5, 5, 5, 5], 2, [[0, 2], [1, 3]]),
    ],
)
def test_clients_are_assigned_longest_first(clients, work, ranks, assignment):
    assert assign_clients(clients, work, ranks) == assignment


def test_deal_is_balanced_and_loses_nobody():
    work = [(7 * i) % 50 + 1 for i in range(40)]
    assignment = assign_clients(range(40), work, 4)
    assert sorted(client for hand in assignment for client in hand) == list(range(40))
    loads = [sum(work[client] for client in hand) for hand in assignment]
    assert max(loads) - min(loads) <= max(work)
