"""The callback that stops a federation by the consensus of its clients' local task vectors."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fedstop.core.parameters import norm
from lightning_fedstop.stopping.callbacks.base import CriterionCallback, is_dry_run, is_federated
from lightning_fedstop.stopping.callbacks.federated_trainer import FederatedTrainer, has_trained
from lightning_fedstop.stopping.criteria.consensus import ConsensusCriterion, ConsensusDecision, Shift
from lightning_fedstop.stopping.criteria.decision import StoppingReason


class ConsensusEarlyStopping(CriterionCallback):
    """Stop a federation when the consensus of its clients' local task vectors hardly changes.

    A second data-free rule, by the authors of the first: after every round, from the local models v_m = theta_m -
    theta_0 before they are aggregated, how far they went together and how far apart they are
    (:class:`ConsensusCriterion` gives the rule). Only a ``FederatedLoop`` has local models.

    It logs ``consensus/shift``, ``consensus/mean_norm``, ``consensus/dispersion``, ``consensus/change`` (NaN at the
    first round) and ``consensus/wait_count``. During a round the local task vectors of the cohort are kept, M vectors
    of d numbers, and nothing between rounds.

    Args:
        threshold: tau, above 0; the authors' default is 0.1.
        patience: rho: rounds in a row under the threshold, and the window of the smoothing. At least 1.
        shift: ``"mean_vector"``, the norm of the mean task vector, as the authors describe it, or ``"mean_norm"``, the
            mean of the norms, as their code computes it.
        min_rounds: No stop before this round.
        check_finite: Stop at once when a local model is not finite and was not left out.
        verbose: Print a line at every round, not only at the stop.
        log_rank_zero_only: Print on the first process only.
        observe_only: Record when the run would be stopped, and let it go on.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.
        MisconfigurationException: When a fit starts in a ``Trainer``.

    >>> ConsensusEarlyStopping(threshold=0.1, patience=5).stopped
    False
    """

    log_prefix = "consensus"
    criterion: ConsensusCriterion

    def __init__(
        self,
        threshold: float = 0.1,
        patience: int = 10,
        shift: Shift = "mean_vector",
        min_rounds: int = 0,
        check_finite: bool = True,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
        observe_only: bool = False,
    ) -> None:
        criterion = ConsensusCriterion(threshold, patience, min_rounds, check_finite, shift)
        super().__init__(criterion, None, verbose, log_rank_zero_only, observe_only)

    @property
    def threshold(self) -> float:
        """Tau."""
        return self.criterion.threshold

    @property
    def patience(self) -> int:
        """Rho."""
        return self.criterion.patience

    @property
    def shift(self) -> Shift:
        """The shift that is looked at."""
        return self.criterion.shift

    @property
    def min_rounds(self) -> int:
        """The first check that may stop the fit."""
        return self.criterion.min_rounds

    @property
    def check_finite(self) -> bool:
        """True if divergence stops the fit at once."""
        return self.criterion.check_finite

    def _reset(self) -> None:
        super()._reset()
        self._local: list[Tensor] = []

    @property
    def state_key(self) -> str:
        """Name of the state: the arguments that a decision depends on."""
        return self._generate_state_key(
            threshold=self.criterion.threshold,
            patience=self.criterion.patience,
            shift=self.shift,
            min_rounds=self.criterion.min_rounds,
            check_finite=self.criterion.check_finite,
            observe_only=self.observe_only,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start clean for a fit, and refuse a trainer without clients."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not is_federated(trainer):
            raise MisconfigurationException(
                "`ConsensusEarlyStopping` looks at the local models of clients, which only a FederatedLoop has; "
                "use TaskVectorEarlyStopping in a Trainer."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count on from the checkpoint."""
        super().on_train_start(trainer, pl_module)
        if is_dry_run(trainer):
            return
        self._stay_stopped(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a round."""
        self._local = []

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client: int) -> None:
        """Keep the local task vector, unless its update is left out."""
        assert isinstance(trainer, FederatedTrainer)
        if is_dry_run(trainer) or not trainer.takes_update or trainer.start_weights is None:
            return
        with self._timed():
            vector = _flat(pl_module)
            self._local.append(vector.sub_(trainer.start_weights.to(vector.device)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide on the round's shift and dispersion; a round without a client decides nothing."""
        if is_dry_run(trainer) or not has_trained(trainer) or not self._is_due(trainer.current_epoch):
            return
        with self._timed():
            figures = _figures(self._local, _flat(pl_module), trainer)
            self._local = []
            if figures is None:
                return
            shift = figures["shift" if self.shift == "mean_vector" else "mean_norm"]
            decision = self.criterion.update((shift, figures["dispersion"]))
            self._act(trainer, trainer.current_epoch, decision, self._explain(decision))
        self._log(
            pl_module,
            {
                **figures,
                "change": math.nan if decision.change is None else decision.change,
                "wait_count": decision.count,
            },
        )

    def _explain(self, decision: ConsensusDecision) -> str:
        if decision.reason is StoppingReason.DIVERGED:
            return "A local model is not finite."
        if decision.should_stop:
            bound = self._in_a_row(self.criterion.threshold, decision.count)
            return (
                f"The consensus of the local task vectors ({decision.smoothed:.4g}) has changed by less than {bound}."
            )
        change = "" if decision.change is None else f", change {decision.change:.4g}"
        return f"consensus {decision.smoothed:.4g}{change}, steady {decision.count} of {self.criterion.patience}."


def _flat(module: pl.LightningModule) -> Tensor:
    """The trainable parameters as one new vector, shape ``(d,)``."""
    parameters = [parameter.detach().flatten() for parameter in module.parameters() if parameter.requires_grad]
    vector = torch.cat(parameters)
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def _figures(vectors: list[Tensor], like: Tensor, trainer: Any) -> dict[str, float] | None:
    """Measure shift, mean norm and dispersion over all processes; None without a client."""
    reduce = trainer.server.reduce
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    total = torch.zeros_like(like, dtype=wide)
    for vector in vectors:
        total += vector
    number = reduce(torch.tensor(float(len(vectors)), dtype=wide, device=like.device), "sum")
    if not number:
        return None
    mean = reduce(total, "sum") / number
    norms = [(norm(vector), norm(vector - mean)) for vector in vectors]
    sums = torch.stack([torch.stack(pair) for pair in norms]).sum(0) if norms else torch.zeros(2).to(total)
    mean_norm, dispersion = (reduce(sums, "sum") / number).tolist()
    return {"shift": float(norm(mean)), "mean_norm": mean_norm, "dispersion": dispersion}
