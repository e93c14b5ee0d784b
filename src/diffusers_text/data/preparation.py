"""Training rows out of datasets of texts: packed, a text a row, or pairs of which the second part is generated."""

from functools import partial

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .packing import pack_ids
from .special_tokens import start_id, terminator_id

logger = logging.get_logger(__name__)

FEATURES = {
    "input_ids": List(Value("int32")),
    "token_type_ids": List(Value("int8")),
    "prompt_length": Value("int32"),
    "length": Value("int32"),
}


def prepare_texts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    column: str = "text",
    packing: bool = True,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    r"""
    Rows of token ids out of texts.

    Packed, texts are joined with a terminator after each and cut into rows of `max_length` that begin with the start
    token, as MDLM does (arXiv 2406.07524); the last row of every 1,000 texts may be shorter, so that nothing is lost.
    Otherwise each text is a row of its own, as in DiffusionBERT (arXiv 2211.15029).

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): has a column of texts.
        tokenizer: the model's tokenizer.
        max_length (`int`): longest row in tokens, special tokens included.
        column (`str`, defaults to `"text"`): where the texts are.
        packing (`bool`, defaults to `True`): pack, or keep a text a row.
        num_proc (`int`, *optional*): processes that tokenize; a stream has one.

    Returns:
        The dataset with the columns `input_ids` and `length`, cached as `datasets` does. Rows without text are
        left out, and those longer than `max_length` unless packed; a warning says how many.

    Raises:
        ValueError: a missing column, something in it that is no text, or no row left; packed, fewer tokens than one
            row takes.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from diffusers_text import prepare_texts

    >>> dataset = Dataset.from_dict({"text": ["We agree.", "No.", "", "Yes."]})
    >>> tokenizer.batch_decode(prepare_texts(dataset, tokenizer, max_length=6)["input_ids"][:])
    ['[CLS] we agree. [SEP] no', '[CLS]. [SEP] yes. [SEP]']
    >>> tokenizer.batch_decode(prepare_texts(dataset, tokenizer, max_length=6, packing=False)["input_ids"][:])
    ['[CLS] we agree. [SEP]', '[CLS] no. [SEP]', '[CLS] yes. [SEP]']
    ```
    """
    if not packing:
        return _map(dataset, _tokenize, [column], "Tokenizing", tokenizer, max_length, num_proc)
    rows = _map(dataset, _pack, [column], "Tokenizing and packing", tokenizer, max_length, num_proc)
    is_stream = isinstance(rows, IterableDataset)
    # Of a stream the first texts are looked at, without a word on what is left out: they come again.
    first = _map(dataset, _pack, [column], "", tokenizer, max_length, None, silent=True) if is_stream else rows
    start, total = int(start_id(tokenizer) is not None), 0
    for length in (row["length"] for row in first) if is_stream else _column(rows, "length").tolist():
        total += length - start
        if total >= max_length - start:
            return rows
    raise ValueError(f"The corpus has {total} tokens, too few for one row of `max_length` {max_length}.")


def prepare_pairs(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    source_column: str = "source",
    target_column: str = "target",
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    r"""
    Rows out of pairs of texts, `[CLS] source [SEP] target [SEP]` with the tokenizer's token types: the source is
    given, the target generated. Arguments, warnings and errors as in [`prepare_texts`].

    Returns:
        The dataset with `input_ids`, `prompt_length` (tokens before the target), `length`, and `token_type_ids` where
        the model has them.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from diffusers_text import prepare_pairs

    >>> dataset = Dataset.from_dict({"source": ["Thou art."], "target": ["You are."]})
    >>> row = prepare_pairs(dataset, tokenizer, max_length=16)[0]
    >>> row["prompt_length"], row["token_type_ids"]
    (5, [0, 0, 0, 0, 0, 1, 1, 1, 1])
    ```
    """
    columns = [source_column, target_column]
    has_types = "token_type_ids" in tokenizer.model_input_names
    extra = ["token_type_ids", "prompt_length"] if has_types else ["prompt_length"]
    return _map(dataset, _tokenize_pairs, columns, "Tokenizing pairs", tokenizer, max_length, num_proc, extra)


def prepare_completions(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    r"""
    Rows out of texts in two parts, `[CLS] prompt completion [SEP]`: the prompt is given, the completion generated, as
    [`TextDiffusionPipeline`] continues a prompt. Arguments, warnings and errors as in [`prepare_texts`].

    Returns:
        The dataset with `input_ids`, `prompt_length` (tokens before the completion) and `length`.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from diffusers_text import prepare_completions

    >>> dataset = Dataset.from_dict({"prompt": ["Once upon"], "completion": [" a time"]})
    >>> row = prepare_completions(dataset, tokenizer, max_length=16)[0]
    >>> row["prompt_length"], tokenizer.decode(row["input_ids"][:])
    (3, '[CLS] once upon a time [SEP]')
    ```
    """
    columns = [prompt_column, completion_column]
    return _map(
        dataset, _tokenize_completions, columns, "Tokenizing", tokenizer, max_length, num_proc, ["prompt_length"]
    )


def _map(dataset, function, columns, description, tokenizer, max_length, num_proc, extra=(), silent=False):
    """`function` over batches of the dataset's texts, with a word on what it left out."""
    if type(max_length) is not int or max_length < 3:
        raise ValueError(f"`max_length` must be an integer >= 3, got {max_length!r}.")
    names = dataset.column_names
    if names is None:  # a stream that does not say
        names = list(next(iter(dataset), {}))
    for column in columns:
        if column not in names:
            raise ValueError(f"The dataset has no column {column!r}, it has {sorted(names)}.")
    features = {name: FEATURES[name] for name in ("input_ids", *extra, "length")}
    settings = {"with_indices": True, "batched": True, "remove_columns": names}
    function = partial(_on_texts, function=function, columns=columns, tokenizer=tokenizer, max_length=max_length)
    if isinstance(dataset, IterableDataset):
        function = partial(function, features=[*features], report=None if silent else _SkippedRows(max_length))
        return dataset.map(function, features=Features(features), **settings)
    if not len(dataset):
        raise ValueError("The dataset has no rows.")
    features["texts"] = Value("int32")
    function = partial(function, features=[*features])
    rows = dataset.map(function, features=Features(features), num_proc=num_proc, desc=description, **settings)
    skipped = len(dataset) - int(_column(rows, "texts").sum())
    if skipped:
        logger.warning(_skipped_message(skipped, len(dataset), max_length))
    if not len(rows):
        raise ValueError(f"No row of {len(dataset)} is left: they have no text, or over {max_length} tokens.")
    return rows.remove_columns("texts")


def _column(rows: Dataset, name: str) -> np.ndarray:
    return np.asarray(rows.with_format("numpy")[name][:])


def _skipped_message(skipped, seen, max_length):
    return f"Left out {skipped} of {seen} rows: without text, or longer than the `max_length` of {max_length} tokens."


class _SkippedRows:
    """Counts what a stream leaves out, and says so at 1, 10, 100, ..."""

    def __init__(self, max_length):
        self.max_length = max_length
        self.skipped, self.seen, self.next_report = 0, 0, 1

    def __call__(self, skipped, indices):
        if indices[-1] < self.seen:  # the stream has begun anew
            return
        self.skipped, self.seen = self.skipped + skipped, indices[-1] + 1
        if self.skipped >= self.next_report:
            logger.warning(_skipped_message(self.skipped, self.seen, self.max_length))
            self.next_report = 10 ** len(str(self.skipped))


def _on_texts(batch, indices, function, columns, tokenizer, max_length, features, report=None):
    """
    The columns `features` of `function(texts of each column) -> (rows, texts among them)` for the texts of a batch
    that are there. `texts` stands in the batch's first row.
    """
    texts = [batch[column] for column in columns]
    for column, values in zip(columns, texts):
        for index, value in zip(indices, values):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"Column {column!r} holds no text in row {index}, but {value!r:.60}.")
    kept = [parts for parts in zip(*texts) if all(part is not None and part.strip() for part in parts)]
    rows, used = function(*zip(*kept), tokenizer=tokenizer, max_length=max_length) if kept else ([], 0)
    if report is not None:
        report(len(indices) - used, indices)
    for i, row in enumerate(rows):
        row["length"], row["texts"] = len(row["input_ids"]), used if i == 0 else 0
    return {name: [row[name] for row in rows] for name in features}


def _ids(ids):
    return np.array(ids, dtype=np.int32)


def _pack(texts, tokenizer, max_length):
    id_lists = tokenizer([*texts], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return [{"input_ids": row.astype(np.int32)} for row in pack_ids(id_lists, tokenizer, max_length)], len(texts)


def _tokenize(texts, tokenizer, max_length):
    rows = tokenizer([*texts], truncation=False, verbose=False)["input_ids"]
    kept = [{"input_ids": _ids(ids)} for ids in rows if len(ids) <= max_length]
    return kept, len(kept)


def _tokenize_pairs(sources, targets, tokenizer, max_length):
    encoded = tokenizer([*sources], [*targets], truncation=False, verbose=False)
    kept = []
    for i, ids in enumerate(encoded["input_ids"]):
        parts = encoded.sequence_ids(i)
        if len(ids) > max_length or 1 not in parts:
            continue
        kept.append({"input_ids": _ids(ids), "prompt_length": parts.index(1)})
        if "token_type_ids" in encoded:
            kept[-1]["token_type_ids"] = np.array(encoded["token_type_ids"][i], dtype=np.int8)
    return kept, len(kept)


def _tokenize_completions(prompts, completions, tokenizer, max_length):
    # Apart, as the pipeline sees a prompt without what follows.
    ids = [
        tokenizer([*texts], add_special_tokens=False, verbose=False)["input_ids"] for texts in (prompts, completions)
    ]
    start, end = (
        [i for i in [special] if i is not None] for special in (start_id(tokenizer), terminator_id(tokenizer))
    )
    rows = [
        {"input_ids": _ids([*start, *prompt, *completion, *end]), "prompt_length": len(start) + len(prompt)}
        for prompt, completion in zip(*ids)
    ]
    kept = [row for row in rows if len(row["input_ids"]) <= max_length]
    return kept, len(kept)


__all__ = ["prepare_completions", "prepare_pairs", "prepare_texts"]
