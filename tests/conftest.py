"""Settings for all tests."""

import os

import torch

# The steps of the tests are small: a second thread costs more than it gives, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
