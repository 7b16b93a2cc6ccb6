"""Attributes of a ``Trainer`` that callbacks, loggers and modules read.

:class:`~lightning_fedstop.loop.FederatedLoop` inherits it, so that Lightning's own callbacks and a user's run in the
loop unmodified. One round is one training epoch; one server update is one global step.
"""

import math
import os
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import ParallelStrategy, Strategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedstop.core.parameters import norm
from lightning_fedstop.federation.local_training import local_progress
from lightning_fedstop.module.evaluator import given_loaders
from lightning_fedstop.module.optimizer import LocalSolver


class StrategyInterface:
    """A Fabric strategy with the few methods a ``Trainer``'s has beside them."""

    def __init__(self, strategy: Strategy, loop: "TrainerInterface") -> None:
        self._strategy = strategy
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @property
    def is_global_zero(self) -> bool:
        return self._loop.is_global_zero

    @property
    def lightning_module(self) -> LightningModule | None:
        return self._loop.lightning_module

    @property
    def _lightning_optimizers(self) -> list[Optimizer]:
        return self._loop.optimizers

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return self._strategy.all_reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        total = self._strategy.all_reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return int(total) >= (self._loop.world_size if all else 1)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        if self.is_global_zero:
            self._strategy.checkpoint_io.remove_checkpoint(str(filepath))


class PrecisionInterface:
    """A Fabric precision with the clip that a module's own ``configure_gradient_clipping`` asks of a ``Trainer``'s."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        elif clip_val > 0 and (grads := [p.grad for p in parameters if p.grad is not None]):
            # As `clip_grad_norm_`, whose norm of a long tensor is short on a CPU.
            length = norm(torch.stack([norm(grad.reshape(-1)) for grad in grads]))
            scale = (clip_val / (length + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(scale)


class TrainerInterface:
    """Attributes of a ``Trainer`` that callbacks read; its documentation describes each."""

    def __init__(
        self,
        fabric: Fabric,
        callbacks: list[Callback],
        loggers: list[Logger],
        default_root_dir: str,
        max_rounds: int,
        min_rounds: int,
        gradient_clip_val: float | None,
        check_val_every_n_round: int | None,
        fast_dev_run: bool | int,
    ) -> None:
        self.fabric = fabric
        self.callbacks = callbacks
        self.loggers = loggers
        self.default_root_dir = default_root_dir
        self.max_rounds = max_rounds
        self.min_rounds = min_rounds
        self.gradient_clip_val = gradient_clip_val
        self.check_val_every_n_round = check_val_every_n_round
        self.fast_dev_run = fast_dev_run
        self.state = TrainerState()
        self.lightning_module: LightningModule | None = None
        self.datamodule: Any = None
        self.solver: LocalSolver | None = None
        self.should_stop = False
        self.current_epoch = 0
        self.global_step = 0
        self.num_training_batches: int | float = math.inf
        self.num_val_batches: list[int | float] = []
        self.num_test_batches: list[int | float] = []
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.ckpt_path: str | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self._train_dataloader: Any = None
        self.strategy = StrategyInterface(self.fabric.strategy, self)

    # What a Trainer has and a federated loop fixes: one evaluation at most per round, after it.
    barebones = False
    val_check_interval = 1.0
    accumulate_grad_batches = 1
    gradient_clip_algorithm = None
    min_steps = None
    max_steps = -1
    max_time = None
    log_every_n_steps = 1
    reload_dataloaders_every_n_epochs = 0
    num_sanity_val_steps = 0
    overfit_batches = 0.0
    predict_dataloaders = None
    profiler = None
    _results = None  # what Lightning's own `log` asks for where nothing may be logged
    _logger_connector = SimpleNamespace(should_update_logs=False, _current_fx=None)

    @property
    def optimizers(self) -> list[Optimizer]:
        # Whoever asks may look at an optimizer's state or change its rates, so it takes the steps itself from now on.
        return [] if self.solver is None else [self.solver.expose()]

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        config = None if self.solver is None else self.solver.scheduler_config
        return [] if config is None else [config]

    @property
    def train_dataloader(self) -> Any:
        """The loader of the client in training; otherwise the data module's."""
        if (progress := local_progress.get()) is not None:
            return getattr(progress.batches, "given", progress.batches)
        if self.state.fn == TrainerFn.FITTING and self._train_dataloader is None:
            self._train_dataloader = given_loaders("train_dataloader", self.datamodule, self.lightning_module)
        return self._train_dataloader

    @property
    def max_epochs(self) -> int:
        return self.max_rounds

    @property
    def min_epochs(self) -> int:
        return self.min_rounds

    @property
    def check_val_every_n_epoch(self) -> int | None:
        return self.check_val_every_n_round

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_rounds

    @property
    def current_round(self) -> int:
        """Number of rounds finished: the federated name of ``current_epoch``."""
        return self.current_epoch

    @property
    def fit_loop(self) -> SimpleNamespace:
        progress = local_progress.get()
        epoch_loop = SimpleNamespace(
            batch_idx=-1 if progress is None else progress.batch_idx,
            batch_progress=SimpleNamespace(is_last_batch=self.is_last_batch),
            val_loop=SimpleNamespace(_has_run=bool(self.num_val_batches)),
            _batches_that_stepped=self.global_step,
            global_step=self.global_step,
        )
        return SimpleNamespace(max_epochs=self.max_rounds, min_epochs=self.min_rounds, epoch_loop=epoch_loop)

    @property
    def is_last_batch(self) -> bool:
        progress = local_progress.get()
        return progress is not None and progress.is_last_batch

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        return [0] * len(self.num_val_batches)

    @property
    def num_predict_batches(self) -> list[int | float]:
        return []

    @property
    def enable_validation(self) -> bool:
        return bool(self.num_val_batches)

    @property
    def model(self) -> LightningModule | None:
        return self.lightning_module

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @property
    def precision_plugin(self) -> PrecisionInterface:
        return PrecisionInterface(self.fabric.strategy.precision)

    @property
    def scaler(self) -> Any:
        return getattr(self.fabric.strategy.precision, "scaler", None)

    @property
    def precision(self) -> Any:
        return self.fabric.strategy.precision.precision

    @property
    def accelerator(self) -> Any:
        return self.fabric.accelerator

    @property
    def world_size(self) -> int:
        return self.fabric.world_size

    @property
    def num_devices(self) -> int:
        return max(1, self.world_size // self.num_nodes)

    @property
    def device_ids(self) -> list[int]:
        strategy = self.fabric.strategy
        devices = strategy.parallel_devices if isinstance(strategy, ParallelStrategy) else [strategy.root_device]
        return [device.index or number for number, device in enumerate(devices or [])]

    @property
    def num_nodes(self) -> int:
        return int(getattr(self.fabric.strategy, "num_nodes", 1))

    @property
    def global_rank(self) -> int:
        return self.fabric.global_rank

    @property
    def local_rank(self) -> int:
        return self.fabric.local_rank

    @property
    def node_rank(self) -> int:
        return self.fabric.node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.fabric.is_global_zero

    @property
    def received_sigterm(self) -> bool:
        return False

    @property
    def training(self) -> bool:
        return self.state.stage == RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        return False

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing

    @property
    def sanity_checking(self) -> bool:
        return False

    @property
    def interrupted(self) -> bool:
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to predict, which a ``Trainer`` does.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            f"{type(self).__name__} does not predict: use `lightning.pytorch.Trainer().predict(model, ...)`, for which"
            " the module is an ordinary one after `fit`."
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process only."""
        self.fabric.print(*args, **kwargs)

    def enter(self, fn: TrainerFn, stage: RunningStage | None) -> None:
        """Note the function and the stage that is running."""
        self.state.fn = fn
        self.state.stage = stage
        self.state.status = TrainerStatus.RUNNING
