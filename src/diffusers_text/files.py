"""Folders that are written whole."""

import os
from pathlib import Path


def move_files(source: Path, target: Path, stale_patterns: list[str]):
    r"""
    Moves all files below `source` into `target`, each replaced at once.

    Args:
        source, target (`Path`): folders on one file system.
        stale_patterns (`list[str]`): what is removed from `target` where it was not just written: weights in another
            number of files, which would be loaded in place of the new ones or by nobody. Folders that this leaves
            empty are removed as well.
    """
    moved = set()
    for new in [path for path in source.rglob("*") if path.is_file()]:
        place = target / new.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, place)
        moved.add(place)
    if not moved:
        return
    for pattern in stale_patterns:
        for old in set(target.glob(pattern)) - moved:
            if old.is_file():
                old.unlink()
                if old.parent != target and not any(old.parent.iterdir()):
                    old.parent.rmdir()


def write_text(path: str | Path, text: str):
    """Writes a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
