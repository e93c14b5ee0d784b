"""Results that are kept as they come, so that an interrupted run goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from uuid import uuid4

import torch


def part_files(path: str) -> list[Path]:
    """What all processes of all runs have left next to `path`."""
    path = Path(path)
    return sorted(path.parent.glob(escape(path.name) + ".part-*"))


def read_parts(path: str, settings: dict) -> list[dict]:
    r"""
    The finished lines of all parts of `path`.

    Args:
        path (`str`): the file that the parts stand beside.
        settings (`dict`): all that the lines depend on.

    Raises:
        ValueError: a part of other settings.
    """
    finished = []
    for part in part_files(path):
        lines = part.read_bytes().split(b"\n")[:-1]  # a line without its end is torn
        if not lines:
            continue
        found = json.loads(lines[0])
        if found != settings:
            differing = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
            values = ", ".join(f"`{name}` ({found.get(name)!r}, now {settings.get(name)!r})" for name in differing)
            raise ValueError(
                f"{str(path)!r} has unfinished parts of a command with other {values}. Finish that one first, choose"
                f" another file, or delete {path}.part-*"
            )
        finished += [json.loads(line) for line in lines[1:]]
    return finished


@contextmanager
def new_part(path: str, settings: dict) -> Iterator[Callable[[dict], None]]:
    """A function that writes a line to a part of `path` of this process alone."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.part-{uuid4().hex}", "x", encoding="utf-8", newline="\n") as file:

        def write(row: dict):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        write(settings)
        yield write


def remove_parts(path: str):
    """Removes all parts of `path`."""
    for part in part_files(path):
        part.unlink(missing_ok=True)


def fingerprint(pipe) -> str:
    """A hash of all that a pipeline's texts and figures depend on, which another under the same name does not have."""
    model, tokenizer = pipe.model, pipe.tokenizer
    config = {name: value for name, value in model.config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    words = [type(model).__name__, config, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    digest = hashlib.sha256(pipe.scheduler.to_json_string().encode())
    digest.update(json.dumps(words, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
