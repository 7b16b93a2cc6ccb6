"""How a training set is dealt to clients: equations (2) to (4) of the paper, and the authors' released draws.

A partition depends on the labels, the skew, the number of clients and the seed, and on nothing else.
"""

import reprlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from lightning_fedstop.data.classes import IntArray, class_numbers, unlabelled
from lightning_fedstop.utilities.validate import whole_number

Variant = Literal["paper", "released_code"]
# A skew of one's own may hold a value for each sample.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class Skew(ABC):
    """Base of the ways in which samples are dealt to clients.

    A skew of your own implements :meth:`partition`, and sets ``needs_labels = False`` if it only reads ``len(labels)``.

    Attributes:
        needs_labels: whether the class numbers decide who gets what.
        min_samples: samples each client gets at least.
    """

    needs_labels: ClassVar[bool] = True
    min_samples: int = 1

    @abstractmethod
    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples.

        Args:
            labels: shape ``(n,)`` (or ``(n, 1)``); the class of each sample. A skew of this package takes any whole
                numbers or strings, one of your own gets whole numbers.
            num_clients: the number of clients N.
            seed: decides every draw.

        Returns:
            N int64 arrays: the sample numbers of each client.

        Raises:
            ValueError: at once, if there are too few samples for ``num_clients`` times ``min_samples``, or samples
                without a class, which -1 marks, where classes decide.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def as_config(self) -> dict[str, Any]:
        """The skew in plain types, as a configuration file names it (attributes are named as the arguments are).

        >>> from lightning_fedstop.data import Iid
        >>> Iid().as_config()["class_path"]
        'lightning_fedstop.data.partitions.iid.Iid'
        """
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": dict(vars(self))}

    def _checked(self, labels: Any, num_clients: int, seed: int) -> IntArray:
        vector = class_numbers(labels)[0] if self.needs_labels else np.zeros(len(labels), np.int64)
        whole_number("num_clients", num_clients, 1)
        whole_number("seed", seed, 0)
        if len(vector) == 0 or len(vector) < num_clients * self.min_samples:
            raise ValueError(
                f"{type(self).__name__} cannot deal {len(vector)} samples to {num_clients} clients with at least "
                f"{self.min_samples} each, which no number of tries would change (0 tries of {self!r}): lower "
                f"`num_clients` or `min_samples`."
            )
        if self.needs_labels and (marked := unlabelled(labels)):
            raise ValueError(
                f"{type(self).__name__} deals by class, and {marked} of {len(vector)} labels are -1, which marks "
                f"samples without one: leave them out with a torch `Subset`, or use `Iid` or `QuantitySkew`."
            )
        return vector
