"""What happens between training steps."""

import signal
import threading
from contextlib import contextmanager
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
        trainer.ema.to(dtype=torch.float32)  # in half precision an average soon takes no more part in what it is of
        if trainer.resumed_from is not None:
            trainer.load_ema(trainer.resumed_from)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.ema.step(self.trainer.trained_parameters())


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, saves a checkpoint after the step and ends the training, in all processes after the same step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.received = False

    @contextmanager
    def installed(self):
        """While open, SIGTERM is waited for; a signal handler needs the main thread."""
        self.received = self.trainer.was_stopped = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _receive(self, signum, frame):
        self.received = True

    def on_step_end(self, args, state, control, **kwargs):
        received = torch.tensor([float(self.received)], device=args.device)
        if not self.trainer.accelerator.gather(received).any():
            return
        logger.warning(f"SIGTERM: saving step {state.global_step} and stopping.")
        self.trainer.was_stopped = state.global_step < state.max_steps
        self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
        self._do_nothing_else(control)
        control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.trainer.was_stopped:  # whoever stops a process does not wait for an evaluation
            self._do_nothing_else(control)

    @staticmethod
    def _do_nothing_else(control):
        control.should_save = control.should_evaluate = False


class PlotLog(TrainerCallback):
    """Draws the log to `loss.png` in the output folder, after each evaluation and at the end of training."""

    def on_evaluate(self, args, state, control, **kwargs):
        self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            draw_training(state.log_history, Path(args.output_dir, "loss.png"))


class BeginRun(TrainerCallback):
    """Begins the figures of an attempt to train, and the order of rows of each epoch, also where training resumes."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.begin_figures()

    def on_epoch_begin(self, args, state, control, **kwargs):
        if self.trainer.row_order is not None:
            self.trainer.row_order.set_epoch(int(state.epoch or 0))
