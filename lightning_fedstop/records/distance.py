"""What fills the record's distance where no stopping rule does."""

from lightning_fedstop.stopping.early_stopping import TaskVectorEarlyStopping


class DistanceRecorder(TaskVectorEarlyStopping):
    """Records the distance from the start in a run that is not watched by a :class:`TaskVectorEarlyStopping`.

    A ``FederatedLoop`` adds it by itself, so that the record of any run answers for any threshold and patience. It
    neither stops the run nor prints.
    """

    def __init__(self) -> None:
        super().__init__(observe_only=True, check_finite=False)

    def _print(self, trainer: object, message: str) -> None:
        pass
