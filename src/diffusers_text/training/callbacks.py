"""What happens between training steps."""

import signal
import threading
from pathlib import Path

import torch
from diffusers.training_utils import EMAModel
from transformers import TrainerCallback
from transformers.utils import logging

from .plots import draw_training

logger = logging.get_logger(__name__)

EMA_NAME = "ema.pt"


class WeightAverage(TrainerCallback):
    """
    Keeps the moving average of the trained weights in `trainer.ema`, from the checkpoint's on when training resumes.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        trainer.ema = EMAModel(trainer.trained_parameters(), decay=args.ema_decay, foreach=True)
        if trainer.resumed_from is not None:
            trainer.load_ema(trainer.resumed_from)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.ema.step(self.trainer.trained_parameters())


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, saves a checkpoint after the step and ends the training, in all processes after the same step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.received = False
        self.previous = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.received, self.trainer.was_stopped = False, False
        if threading.current_thread() is threading.main_thread():  # the only one that signals reach
            self.previous = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum, frame):
        self.received = True

    def on_step_end(self, args, state, control, **kwargs):
        received = torch.tensor([float(self.received)], device=args.device)
        if self.trainer.accelerator.gather(received).any():
            logger.warning(f"SIGTERM: saving step {state.global_step} and stopping.")
            self.trainer.was_stopped = True
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        if self.previous is not None:
            signal.signal(signal.SIGTERM, self.previous)


class PlotAtEnd(TrainerCallback):
    """Draws the log to `loss.png` in the output folder."""

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            draw_training(state.log_history, Path(args.output_dir, "loss.png"))


class OrderOfEpoch(TrainerCallback):
    """Tells the order of rows which epoch begins, also one that training resumes in."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        if self.trainer.row_order is not None:
            self.trainer.row_order.set_epoch(int(state.epoch or 0))
