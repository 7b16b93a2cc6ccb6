"""Cohorts, and the assignment of clients to processes."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Cohort(ABC):
    """Chooses the clients of each round.

    A cohort keeps no state: what it returns depends on its arguments alone, so that a resumed run continues the same
    schedule.
    """

    @abstractmethod
    def sample(self, round: int, num_clients: int, size: int, generator: torch.Generator) -> list[int]:
        """Draw the clients of one round.

        Args:
            round: the round's number, from 1.
            num_clients: how many clients there are, N.
            size: how many should take part, M.
            generator: the round's own random stream.

        Returns:
            Distinct indices in ``[0, num_clients)``, in ascending order.
        """

    def check(self, num_clients: int, size: int) -> None:  # noqa: B027 - by default every federation is served
        """Refuse a federation this cohort cannot serve, before any training.

        Raises:
            ValueError: if it cannot.
        """


class UniformCohort(Cohort):
    """M of the N clients, uniformly at random without replacement (McMahan et al. 2017).

    >>> UniformCohort().sample(1, num_clients=4, size=4, generator=torch.Generator())
    [0, 1, 2, 3]
    """

    def sample(self, round: int, num_clients: int, size: int, generator: torch.Generator) -> list[int]:
        """See :meth:`Cohort.sample`."""
        return sorted(torch.randperm(num_clients, generator=generator)[:size].tolist())


class ScheduledCohort(Cohort):
    """Fixed schedule of clients, which repeats.

    Args:
        schedule: the clients of round 1, 2, ...; ``clients_per_round`` has no effect.

    Raises:
        ValueError: if the schedule or one of its rounds is empty, or a round names a client twice.

    >>> ScheduledCohort([[0, 1], [2, 3]]).sample(3, num_clients=4, size=2, generator=torch.Generator())
    [0, 1]
    """

    def __init__(self, schedule: Sequence[Sequence[int]]) -> None:
        self.schedule = [sorted(clients) for clients in schedule]
        if not self.schedule:
            raise ValueError("`schedule` of ScheduledCohort must name the clients of at least one round, got none.")
        for number, clients in enumerate(self.schedule, start=1):
            if not clients or len(set(clients)) < len(clients):
                raise ValueError(
                    f"Round {number} of `schedule` must name at least one client, and each once, got {clients}."
                )

    def sample(self, round: int, num_clients: int, size: int, generator: torch.Generator) -> list[int]:
        """See :meth:`Cohort.sample`."""
        return list(self.schedule[(round - 1) % len(self.schedule)])

    def check(self, num_clients: int, size: int) -> None:
        """Refuse clients that do not exist."""
        for number, clients in enumerate(self.schedule, start=1):
            if clients[0] < 0 or clients[-1] >= num_clients:
                raise ValueError(
                    f"Round {number} of `schedule` names {clients}, but the clients are 0 to {num_clients - 1}."
                )


def check_clients_per_round(clients_per_round: int | float) -> None:
    """Refuse a ``clients_per_round`` that no federation could serve.

    Raises:
        ValueError: unless it is an integer of at least 1 or a fraction in (0, 1].
    """
    allowed = "an integer of at least 1 (clients) or a float in (0, 1] (fraction of all clients)"
    if isinstance(clients_per_round, bool) or not isinstance(clients_per_round, int | float):
        raise ValueError(f"`clients_per_round` must be {allowed}, got {clients_per_round!r}.")
    if not (clients_per_round >= 1 if isinstance(clients_per_round, int) else 0 < clients_per_round <= 1):
        raise ValueError(f"`clients_per_round` must be {allowed}, got {clients_per_round!r}.")


def cohort_size(clients_per_round: int | float, num_clients: int) -> int:
    """M, the number of clients in a round: an integer as it is, a fraction of N rounded, but at least 1.

    Raises:
        ValueError: if more clients are asked for than there are.

    >>> cohort_size(0.29, 100), cohort_size(0.1, 5), cohort_size(3, 10)
    (29, 1, 3)
    """
    check_clients_per_round(clients_per_round)
    if isinstance(clients_per_round, float):
        return max(1, round(clients_per_round * num_clients))
    if clients_per_round > num_clients:
        raise ValueError(
            f"`clients_per_round` must be at most the number of clients, {num_clients}, got {clients_per_round}."
        )
    return clients_per_round


def assign_clients(clients: Sequence[int], work: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal clients to processes by work, longest first, each to the process that has least.

    Args:
        clients: who trains this round.
        work: samples per client, for all clients of the federation.
        num_ranks: processes.

    Returns:
        One list of clients for each process, some maybe empty.

    >>> assign_clients([0, 1, 2], work=[10, 90, 70], num_ranks=2)
    [[1], [2, 0]]
    """
    assignment: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for client in sorted(clients, key=lambda client: (-work[client], client)):
        load, rank = heapq.heappop(loads)
        assignment[rank].append(client)
        heapq.heappush(loads, (load + work[client], rank))
    return assignment
