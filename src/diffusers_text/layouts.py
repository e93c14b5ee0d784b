"""
The two layouts of a saved pipeline: diffusers', a folder for each part, and the Trainer's, all side by side ("flat").
Where a folder has both, the parts' folders are loaded.
"""

from pathlib import Path

from diffusers.schedulers.scheduling_utils import SCHEDULER_CONFIG_NAME

PARTS = ["model", "scheduler", "tokenizer"]
# What a flat pipeline takes the place of: diffusers' layout, and weights in another number of files.
REPLACED_BY_FLAT = [
    "model/config.json",
    "model/generation_config.json",
    "model/model*.safetensors*",
    "scheduler/scheduler_config.json",
    "tokenizer/*.json",
    "tokenizer/*.jinja",
    "tokenizer/*.model",
    "tokenizer/merges.txt",
    "tokenizer/vocab.txt",
    "model.safetensors*",
    "model-*-of-*.safetensors",
]
FLAT_MARK = SCHEDULER_CONFIG_NAME  # at the top of no other layout


def replaced_by_parts(variant: str | None) -> list[str]:
    """What weights of `variant` in diffusers' layout take the place of: one file, or shards with their index."""
    name, index = (f"model.{variant}", f"index.{variant}") if variant else ("model", "index")
    return [
        f"model/{name}.safetensors",
        f"model/{name}-*-of-*.safetensors",
        f"model/model.safetensors.{index}.json",
    ]


def check_not_flat(name: str, place: str, is_flat: bool):
    """Raises where diffusers' layout would hide a flat pipeline, whose model transformers would still load."""
    if is_flat:
        raise ValueError(
            f"`{name}` {place!r} has a pipeline as the Trainer saves it, without folders for its parts: choose"
            " another."
        )


def check_can_be_flat(name: str, folder: str | Path):
    """Raises where something else has the name of a part's folder: a flat pipeline would be looked for in there."""
    known = {path for pattern in REPLACED_BY_FLAT for path in Path(folder).glob(pattern)}
    for part in [Path(folder, part) for part in PARTS]:
        if part.exists() and not (part.is_dir() and any(part.iterdir()) and known.issuperset(part.iterdir())):
            raise ValueError(
                f"`{name}` {str(folder)!r} has {part.name!r}, which is not a pipeline's: choose another folder."
            )
