"""Datasets from files and from the Hub."""

import json
from collections.abc import Container, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError

# Readers of `datasets` by the ending of a file.
READERS = {
    ".txt": ("text", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}


def load_splits(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | list[str] | None = None,
    validation_file: str | list[str] | None = None,
    validation_split_percentage: int = 5,
    streaming: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset]:
    r"""
    Training and validation data, from the Hub or from files.

    Args:
        dataset_name (`str`, *optional*), dataset_config_name (`str`, *optional*): id on the Hub or folder.
        train_file, validation_file (`str` or `list[str]`, *optional*):
            .txt (a text a line), .json, .jsonl, .csv, .tsv or .parquet files, or patterns with `*`.
        validation_split_percentage (`int`, defaults to 5):
            Where there is no validation data, this share of the training data from its beginning, as in transformers'
            scripts; of a stream its first 1,000 rows, of which training sees no copy either.
        streaming (`bool`, defaults to `False`): read while training, without a copy on the disk.

    Raises:
        ValueError: neither or both of `dataset_name` and `train_file`, files of several or unknown kinds, or a share
            that leaves no rows.

    Example:

    ```python
    >>> from pathlib import Path
    >>> from diffusers_text import load_splits

    >>> _ = Path("texts.txt").write_text("one\n" * 40)
    >>> train, validation = load_splits(train_file="texts.txt")
    >>> len(train), len(validation)
    (38, 2)
    ```
    """
    if (dataset_name is None) == (not train_file):
        raise ValueError(f"Pass one of `dataset_name` and `train_file`, got {dataset_name!r} and {train_file!r}.")
    if dataset_name is not None and validation_file is not None:
        raise ValueError("`validation_file` goes with `train_file`; a dataset brings its own 'validation' split.")
    if not 0 < validation_split_percentage < 100:
        raise ValueError(
            f"`validation_split_percentage` must lie between 0 and 100, got {validation_split_percentage!r}."
        )
    if dataset_name is not None:
        splits = load_dataset(dataset_name, dataset_config_name, streaming=streaming)
    else:
        files = {"train": _as_list(train_file)}
        if validation_file is not None:
            files["validation"] = _as_list(validation_file)
        reader = _reader([path for paths in files.values() for path in paths])
        splits = load_dataset(reader[0], data_files=files, streaming=streaming, **reader[1])
    if "train" not in splits:
        raise ValueError(f"{dataset_name!r} has the splits {sorted(splits)}, and no 'train'.")
    train = splits["train"]
    if "validation" in splits:
        return train, splits["validation"]
    if streaming:
        # Not `skip`: workers and processes, of which each reads some of the files, would each skip a part of the rows.
        held_out = [*islice(train, 1000)]
        others = train.filter(_is_none_of, fn_kwargs={"rows": {_key(row) for row in held_out}})
        if next(iter(others), None) is None:
            raise ValueError("The stream has only the 1,000 rows that are held out: pass validation data.")
        return others, Dataset.from_list(held_out, features=train.features)
    held_out = len(train) * validation_split_percentage // 100
    if held_out == 0:
        raise ValueError(
            f"`validation_split_percentage` {validation_split_percentage} of {len(train)} rows leaves none: raise it,"
            " or pass a `validation_file`."
        )
    return train.select(range(held_out, len(train))), train.select(range(held_out))


def _key(row: dict) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def _is_none_of(row: dict, rows: Container[str]) -> bool:
    return _key(row) not in rows


def load_rows(
    dataset: str, config_name: str | None = None, split: str = "test", columns: Sequence[str] = ()
) -> Dataset:
    r"""
    The rows of a file or of a dataset on the Hub.

    Args:
        dataset (`str`): a .txt (a text a line), .json, .jsonl, .csv, .tsv or .parquet file; or an id on the Hub.
        config_name (`str`, *optional*), split (`str`, defaults to `"test"`): of a dataset on the Hub.
        columns (`Sequence[str]`, *optional*): what it must have.

    Raises:
        ValueError: a file that does not exist or cannot be read, or that lacks a column.
    """
    path, reader = Path(dataset), READERS.get(Path(dataset).suffix)
    if reader is not None and not path.is_file():
        raise ValueError(f"`dataset` {dataset!r} is no file.")
    try:
        if reader is None:
            rows = load_dataset(dataset, config_name, split=split)
        else:
            rows = load_dataset(reader[0], data_files=[str(path)], split="train", **reader[1])
    except DatasetGenerationError as error:  # what is wrong stands in its cause
        raise ValueError(f"`dataset` {dataset!r} cannot be read: {error.__cause__ or error}") from error
    for column in columns:
        if column not in rows.column_names:
            raise ValueError(f"`dataset` {dataset!r} has no column {column!r}, it has {sorted(rows.column_names)}.")
    return rows


def load_texts(
    dataset: str, config_name: str | None = None, split: str = "test", text_column: str = "text"
) -> list[str]:
    """The texts of a file or of a dataset on the Hub, those of one column; see [`load_rows`]."""
    return load_rows(dataset, config_name, split, [text_column])[text_column][:]


def _as_list(files) -> list[str]:
    return [str(files)] if isinstance(files, (str, PathLike)) else [str(file) for file in files]


def _reader(files: list[str]) -> tuple[str, dict]:
    """The reader of `datasets` for all `files`, and its settings."""
    endings = sorted({Path(path).suffix for path in files})
    readers = [READERS.get(ending) for ending in endings]
    if None in readers or any(reader != readers[0] for reader in readers):
        raise ValueError(f"Files must be of one kind, of {sorted(READERS)}, got {endings}.")
    return readers[0]


__all__ = ["load_rows", "load_splits", "load_texts"]
