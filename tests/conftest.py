import os
import sys
from pathlib import Path

# No test may depend on the network; the hub tests bring their own server.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Toys gain nothing from more threads, and beside another process threads wait for each other.
# What tests start inherits it.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)  # a plugin of pytest may have imported it before OMP_NUM_THREADS was set
sys.path.insert(0, str(Path(__file__).parent))

from transformers.utils import logging  # noqa: E402

logging.enable_propagation()  # so that caplog sees what transformers says
