import os
import sys
from pathlib import Path

# No test may depend on the network; the hub tests bring their own server.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)  # toys gain nothing from more, and beside another process threads wait for each other
sys.path.insert(0, str(Path(__file__).parent))

from transformers.utils import logging  # noqa: E402

logging.enable_propagation()  # so that caplog sees what transformers says
