"""What training begins with: rows of token ids, and the noise."""

from datasets import Dataset, IterableDataset

from ..data.preparation import prepare_completions, prepare_pairs, prepare_texts
from ..data.special_tokens import token_settings
from ..data.token_counts import count_tokens
from ..schedulers.scheduling_absorbing_state import AbsorbingStateScheduler

NOISE_SETTINGS = ("schedule", "spindle_lambda", "spindle_information", "spindle_mean")


def prepare_dataset(dataset, tokenizer, args):
    r"""
    Tokenizes a dataset with a column of texts, pairs, or prompts and completions, in the first process, so that the
    others find it cached; one with `input_ids` stays as it is.

    Raises:
        ValueError: columns that `args` do not name.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset
    columns = set(dataset.column_names or next(iter(dataset), {}))
    if "input_ids" in columns:
        return dataset
    with args.main_process_first(desc="tokenizing"):
        for prepare, first, second in (
            (prepare_pairs, args.source_column, args.target_column),
            (prepare_completions, args.prompt_column, args.completion_column),
        ):
            if {first, second} <= columns:
                return prepare(dataset, tokenizer, args.max_length, first, second, args.dataset_num_proc)
        if args.text_column in columns:
            return prepare_texts(
                dataset, tokenizer, args.max_length, args.text_column, args.packing, args.dataset_num_proc
            )
    raise ValueError(
        f"The dataset has the columns {sorted(columns)}: name its texts with `text_column` (now {args.text_column!r}),"
        " its pairs with `source_column` and `target_column`, or its continuations with `prompt_column` and"
        " `completion_column`."
    )


def prepare_evaluation(dataset, tokenizer, args):
    """
    [`prepare_dataset`] of one evaluation dataset or a dictionary of them. A stream is read whole: every row has to
    count once, however many processes there are.
    """
    if isinstance(dataset, dict):
        return {name: prepare_evaluation(one, tokenizer, args) for name, one in dataset.items()}
    dataset = prepare_dataset(dataset, tokenizer, args)
    return Dataset.from_list(list(dataset)) if isinstance(dataset, IterableDataset) else dataset


def _generated_ids(dataset):
    """The token ids of rows, without those that are given."""
    return (row["input_ids"][row.get("prompt_length", 0) :] for row in dataset)


def resumed_scheduler(checkpoint: str, settings) -> AbsorbingStateScheduler:
    """The scheduler that a checkpoint holds; raises where `settings` ask for another noise."""
    scheduler = AbsorbingStateScheduler.from_pretrained(checkpoint)
    for name in NOISE_SETTINGS:
        if scheduler.config[name] != settings[name]:
            raise ValueError(
                f"{checkpoint} was trained with {name}={scheduler.config[name]!r}, not with {settings[name]!r}: resume"
                " with the arguments it began with."
            )
    return scheduler


def create_scheduler(args, tokenizer, train_dataset, checkpoint: str | None) -> AbsorbingStateScheduler:
    r"""
    The noise that `args` describe, with the token counts of the training data for the spindle, or those of the
    checkpoint that training resumes from.

    Raises:
        ValueError: a checkpoint of another noise, or nothing to count on.
    """
    settings = {name: getattr(args, name) for name in NOISE_SETTINGS}
    if checkpoint is not None:
        return resumed_scheduler(checkpoint, settings)
    settings |= {**token_settings(tokenizer), "gen_length": args.max_length - 2, "corpus": args.corpus_name}
    if args.schedule == "spindle":
        if train_dataset is None:
            raise ValueError("`schedule='spindle'` needs a `train_dataset` to count tokens on, or a `scheduler`.")
        settings["token_counts"] = count_tokens(_generated_ids(train_dataset), tokenizer)
    return AbsorbingStateScheduler(**settings)
