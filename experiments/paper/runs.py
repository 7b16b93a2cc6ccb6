"""One run of the paper's experiments: what tells it from the others, and its name."""

from dataclasses import dataclass
from typing import Literal

Form = Literal["published", "released_code"]
Scale = Literal["full", "small", "tiny"]

FORMS: tuple[Form, ...] = ("published", "released_code")
SCALES: tuple[Scale, ...] = ("full", "small", "tiny")
DATASETS = ("dermamnist", "bloodmnist", "pathmnist")
COEFFICIENTS: dict[str, tuple[float, ...]] = {
    "dirichlet": (0.01, 0.1, 1.0),
    "pathological": (1, 2, 3),
    "quantity": (0.01, 0.1, 1.0),
}
"""c of each skew: a concentration, or the classes of a client."""
PHI: dict[str, str | None] = {
    "FedAvg": None,
    "FedProx": "mu",
    "FedDyn": "alpha",
    "SCAFFOLD": None,
    "FedSAM": "rho",
    "FedSpeed": "rho",
    "FedSMOO": "rho",
    "FedGamma": "rho",
    "FedLESAM": "rho",
    "FedWMSAM": "rho",
}
"""The methods in the paper's order, and which argument of each is Phi."""
LOG_PHIS = (-1, -2, -3)
LOG_LRS = (-1, -2, -3)
SEEDS = (0, 1, 2)
ROUNDS: dict[Scale, int] = {"full": 500, "small": 100, "tiny": 12}
"""R, as in ``experiments/paper/configs``."""


@dataclass(frozen=True)
class Run:
    """A run of the paper's experiments.

    Args:
        dataset: one of ``DATASETS``.
        method: one of ``PHI``.
        skew: one of ``COEFFICIENTS``.
        c: the skew's coefficient.
        log_phi: log10 of Phi, the method's own hyperparameter; ``None`` for the methods that have none.
        log_lr: log10 of eta, the local learning rate.
        seed: of everything.
        form: ``"published"`` for the published methods, ``"released_code"`` for what the authors' code does.
        scale: ``"full"`` for the paper's size, ``"small"`` for a laptop's, ``"tiny"`` for a test's.

    Raises:
        ValueError: if a value is none of these.

    >>> Run("bloodmnist", "FedProx", "dirichlet", 0.1, -2).name
    'published-bloodmnist-dirichlet-0.1-FedProx-phi-0.01-lr-0.001-seed-0'
    >>> Run("pathmnist", "SCAFFOLD", "pathological", 2, log_lr=-1, seed=1, scale="small").name
    'small-published-pathmnist-pathological-2-SCAFFOLD-lr-0.1-seed-1'
    """

    dataset: str
    method: str
    skew: str
    c: float
    log_phi: int | None = None
    log_lr: int = -3
    seed: int = 0
    form: Form = "published"
    scale: Scale = "full"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dataset", DATASETS),
            ("method", tuple(PHI)),
            ("skew", tuple(COEFFICIENTS)),
            ("form", FORMS),
            ("scale", SCALES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")
        if (self.log_phi is None) != (PHI[self.method] is None):
            wanted = "None: the method has no Phi" if PHI[self.method] is None else "a number: the method has a Phi"
            raise ValueError(f"`log_phi` of {self.method} must be {wanted}, got {self.log_phi!r}.")
        if not self.c > 0 or (self.skew == "pathological" and self.c != int(self.c)):
            kind = "a whole number of classes" if self.skew == "pathological" else "a number above 0"
            raise ValueError(f"`c` of the {self.skew} skew must be {kind}, got {self.c!r}.")

    @property
    def name(self) -> str:
        """The run's folder under the root; it says all that the run depends on, and nothing else."""
        scale = [] if self.scale == "full" else [self.scale]
        phi = [] if self.log_phi is None else [f"phi-{power(self.log_phi)}"]
        what = [self.form, self.dataset, self.skew, f"{self.c:g}", self.method]
        return "-".join([*scale, *what, *phi, f"lr-{power(self.log_lr)}", f"seed-{self.seed}"])


def power(exponent: int) -> str:
    """10 to a power, as it is written in names and commands.

    >>> power(-3), power(0)
    ('0.001', '1')
    """
    return f"{10.0**exponent:g}"
