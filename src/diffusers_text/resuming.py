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
            differing = [name for name in settings if found.get(name) != settings[name]]
            values = ", ".join(f"`{name}` ({found.get(name)!r}, now {settings[name]!r})" for name in differing)
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
    """A hash of the weights and the scheduler's settings, which another model under the same name does not have."""
    digest = hashlib.sha256(pipe.scheduler.to_json_string().encode())
    for parameter in pipe.model.parameters():
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
