"""Checkpoints that are whole or not there."""

import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..layouts import check_can_be_flat

logger = logging.get_logger(__name__)

STAGING_NAME = ".saving"  # where a folder is filled before it gets its name


def find_checkpoint(output_dir: str, resume_from_checkpoint: str | bool | None) -> str | None:
    r"""
    The checkpoint to resume from.

    Args:
        output_dir (`str`): where the training saves.
        resume_from_checkpoint (`str` or `bool`, *optional*):
            A checkpoint's folder; True (or `"True"`, as from a command line) for the last whole one of `output_dir`.

    Raises:
        ValueError: there is none, or the folder is not a whole checkpoint.
    """
    if resume_from_checkpoint in (None, False, "", "False", "false"):
        return None
    if resume_from_checkpoint not in (True, "True", "true"):
        if not is_whole(Path(resume_from_checkpoint)):
            raise ValueError(
                f"`resume_from_checkpoint` {str(resume_from_checkpoint)!r} is no whole checkpoint: it has no"
                f" {TRAINER_STATE_NAME} that can be read."
            )
        return str(resume_from_checkpoint)
    whole = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdigit() and is_whole(folder):
            whole.append((int(step), str(folder)))
    if not whole:
        raise ValueError(f"`resume_from_checkpoint` is True, but {str(output_dir)!r} has no whole checkpoint.")
    return max(whole)[1]


def is_whole(folder: Path) -> bool:
    """Whether `folder` has the file that the Trainer writes last, unharmed."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def check_folder(folder: str):
    """
    Raises, before any work is done, an `OSError` where no file can be written, and a `ValueError` where a pipeline
    could be saved and not be loaded.
    """
    check_can_be_flat("output_dir", folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"`output_dir` {str(folder)!r} cannot be written to: {error.strerror}.") from error


@contextmanager
def explained_failure(what: str, folder: str):
    """
    While open, what goes wrong with writing names what is lost and what is not, and its leftovers are removed.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        shutil.rmtree(Path(folder, STAGING_NAME), ignore_errors=True)
        raise OSError(
            f"{what} could not be saved in {str(folder)!r}: {error}. Older files there are whole."
        ) from error
