"""Fits in forked processes, for the kill test: ``python -m tests.kill_script``.

Reads lines with a root, a number of rounds and where states are kept from standard input. Each starts one fit in a
child of its own, resumed from the last checkpoint under the root where there is one, and is answered with the child's
process id, then with its exit code. What is imported is imported once.
"""

import os
import sys

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.loop.checkpoint_file import find_last
from lightning_fedstop.methods import SCAFFOLD
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, make_loop


def fit(root, rounds, storage):
    """A run that has something to lose: stateful method, rules in mid-count, evaluation in each round."""
    rules = [
        TaskVectorEarlyStopping(0.02, 3, observe_only=True, average="saturation"),
        ConsensusEarlyStopping(0.05, 3, observe_only=True),
    ]
    try:
        ckpt_path = find_last(root)
    except FileNotFoundError:
        ckpt_path = None
    states = ClientStates(storage)
    loop = make_loop(
        root, *rules, method=SCAFFOLD(), max_rounds=int(rounds), check_test_every_n_round=1, client_states=states
    )
    loop.fit(Deep(), ToyData(), ckpt_path=ckpt_path)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the answers alone are read
            try:
                fit(*line.split())
                code = 0
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
