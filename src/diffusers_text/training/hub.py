"""Uploads of a training run."""

from pathlib import Path

from huggingface_hub import upload_folder
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from ..layouts import REPLACED_BY_FLAT

IGNORED = ["_*", ".*", "checkpoint-*"]  # of the output folder


def upload_output(trainer, message: str, token: str | None, revision: str | None, blocking: bool):
    """Uploads the output folder but for checkpoints, in place of an older model."""
    return upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=trainer.args.output_dir,
        ignore_patterns=IGNORED,
        delete_patterns=REPLACED_BY_FLAT,
        commit_message=message,
        token=token,
        revision=revision,
        run_as_future=not blocking,
    )


def upload_checkpoint(trainer, folder: str):
    """Starts to upload the output folder, and the checkpoint where `hub_strategy` says so, in the background."""
    args, message = trainer.args, f"Training in progress, step {trainer.state.global_step}"
    jobs = [upload_output(trainer, message, args.hub_token, args.hub_revision, blocking=False)]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        is_last = args.hub_strategy == HubStrategy.CHECKPOINT
        jobs.append(
            upload_folder(
                repo_id=trainer.hub_model_id,
                folder_path=folder,
                path_in_repo="last-checkpoint" if is_last else Path(folder).name,
                commit_message=f"{message}, checkpoint",
                token=args.hub_token,
                revision=args.hub_revision,
                run_as_future=True,
            )
        )
    if trainer.push_in_progress is not None and not trainer.push_in_progress.is_done():
        jobs = [*trainer.push_in_progress.jobs, *jobs]
    trainer.push_in_progress = PushInProgress(jobs)
