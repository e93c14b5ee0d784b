"""What training begins with: rows of token ids, and the noise."""

import copy
from dataclasses import fields

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset

from ..data.collators import filled, without_padding
from ..data.preparation import prepare_completions, prepare_pairs, prepare_texts
from ..data.special_tokens import terminator_id, token_settings
from ..data.token_counts import count_tokens
from ..evaluation.corpus import numbered_keys
from ..models.sparse_head import has_adapter, is_compiled, max_sequence_length, unwrap_model
from ..schedulers.scheduling_absorbing_state import AbsorbingStateScheduler

ROW_COLUMNS = ("input_ids", "attention_mask", "prompt_length", "token_type_ids")
NOISE_ARGUMENTS = ("schedule", "spindle_lambda", "spindle_information", "spindle_mean")
NOISE_SETTINGS = (*NOISE_ARGUMENTS, "power", "sigma_min", "sigma_max", "tilt")


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
    if not columns:
        raise ValueError("The dataset has no rows.")
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
    count once, however many processes there are. Rows that are the same are numbered, for noise of their own.
    """
    if isinstance(dataset, dict):
        return {name: prepare_evaluation(one, tokenizer, args) for name, one in dataset.items()}
    dataset = prepare_dataset(dataset, tokenizer, args)
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(dataset))
    if not isinstance(dataset, Dataset) or "copy_number" in dataset.column_names:
        return dataset
    plain = dataset.with_format(None).select_columns([name for name in ROW_COLUMNS if name in dataset.column_names])
    numbers = [number for _, number in numbered_keys(map(without_padding, plain))]
    return dataset.add_column("copy_number", numbers)


def _noised_ids(dataset, tokenizer, args):
    """The token ids of rows as the collator makes them, without those that are given."""
    rows = (without_padding(row) for row in dataset)
    if args.fill_rows:
        rows = (filled(row, args.max_length, terminator_id(tokenizer)) for row in rows)
    return (row["input_ids"][row.get("prompt_length", 0) :] for row in rows)


def check_components(model, tokenizer, scheduler, args):
    """Raises a `ValueError` for components that do not go together, before any work is done."""
    token_settings(tokenizer)  # raises without a mask token
    conditioning = model.config.to_dict().get("time_conditioning", "none")
    if args.time_conditioning not in (None, conditioning):
        raise ValueError(
            f"`time_conditioning` is {args.time_conditioning!r} in `args`, but {conditioning!r} in `model`: load the"
            " model with `load_denoiser`."
        )
    if args.max_length > (limit := max_sequence_length(model)):
        raise ValueError(f"`max_length` is {args.max_length}, but the model takes at most {limit} tokens.")
    if args.fill_rows and terminator_id(tokenizer) is None:
        raise ValueError("`fill_rows` needs a tokenizer with an end-of-text or separator token.")
    if has_adapter(model) and unwrap_model(model) is model:  # no PeftModel around it
        raise ValueError("`model` has an adapter that cannot be merged: make it with `peft.get_peft_model`.")
    if args.head_chunk_size is not None and (args.torch_compile or is_compiled(model)):
        raise ValueError("`head_chunk_size` does not go with `torch_compile`: compiled code sees no hook.")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process: start one for each with `accelerate launch`, or set"
            " CUDA_VISIBLE_DEVICES=0."
        )
    if scheduler is not None:
        if type(scheduler) is not AbsorbingStateScheduler:
            raise ValueError(
                f"`scheduler` is a {type(scheduler).__name__}: train with an AbsorbingStateScheduler, and make the"
                " other one of it with `from_config` to sample."
            )
        defaults = {field.name: field.default for field in fields(args)}
        asked = {name: getattr(args, name) for name in NOISE_ARGUMENTS if getattr(args, name) != defaults[name]}
        _check_same_noise("`scheduler`", scheduler.config, asked)


def with_choices(args, scheduler: AbsorbingStateScheduler):
    """
    A copy of `args` with what they leave open: `mask_sampling`, by default by count where that is possible, and
    `time_power`. Raises where counts are asked for and are not possible, or a smallest time where none is drawn.
    """
    is_possible = args.objective != "discrete" and not scheduler.noise.token_dependent
    if args.mask_sampling == "count" and not is_possible:
        raise ValueError(
            "`mask_sampling='count'` needs continuous time and a schedule that treats all tokens alike, got the"
            f" objective {args.objective!r} and {scheduler.config.schedule!r}."
        )
    args = copy.copy(args)
    args.mask_sampling = args.mask_sampling or ("count" if is_possible else "independent")
    draws_times = args.mask_sampling == "independent" and args.objective != "discrete"
    if args.time_epsilon != type(args).time_epsilon and not draws_times:
        raise ValueError(
            "`time_epsilon` goes with `mask_sampling='independent'` in continuous time, got the mask sampling"
            f" {args.mask_sampling!r} and the objective {args.objective!r}."
        )
    if args.time_power is None:
        has_cross_entropy = args.objective == "discrete" and args.cross_entropy_weight > 0
        args.time_power = 1.0 if args.objective == "mlm" or has_cross_entropy else 2.0
    return args


def create_scheduler(args, tokenizer, train_dataset, checkpoint: str | None) -> AbsorbingStateScheduler:
    r"""
    The noise that `args` describe, with the token counts of the training data for the spindle, or those of the
    checkpoint that training resumes from.

    Raises:
        ValueError: a checkpoint of another noise, or nothing to count on.
    """
    settings = {name: getattr(args, name) for name in NOISE_ARGUMENTS}
    settings |= {
        **token_settings(tokenizer),
        "corpus": args.corpus_name,
        "gen_length": _gen_length(train_dataset, args),
    }
    if args.schedule == "spindle":
        if checkpoint is not None:
            saved = AbsorbingStateScheduler.from_pretrained(checkpoint).config
            _check_same_noise(checkpoint, saved, settings)
            counts = saved.token_counts
        elif train_dataset is None:
            raise ValueError("`schedule='spindle'` needs a `train_dataset` to count tokens on, or a `scheduler`.")
        else:
            ids = _noised_ids(train_dataset, tokenizer, args)
            (counts,) = broadcast_object_list([count_tokens(ids, tokenizer) if args.process_index == 0 else None])
        settings["token_counts"] = counts
    return AbsorbingStateScheduler(**settings)


def resumed_scheduler(scheduler: AbsorbingStateScheduler, checkpoint: str) -> AbsorbingStateScheduler:
    """`scheduler` with the token counts of the checkpoint; raises where that has another noise."""
    saved = AbsorbingStateScheduler.from_pretrained(checkpoint).config
    _check_same_noise(checkpoint, saved, {name: scheduler.config[name] for name in NOISE_SETTINGS})
    return AbsorbingStateScheduler.from_config(scheduler.config, token_counts=saved.token_counts)


def _check_same_noise(whose: str, config, settings: dict):
    for name in NOISE_SETTINGS:
        if name in settings and config[name] != settings[name]:
            raise ValueError(f"{whose} has {name}={config[name]!r}, not {settings[name]!r}: both must agree.")


def _gen_length(train_dataset, args) -> int:
    """Tokens that a text has at most: a row without its start and its terminator, or the longest that is generated."""
    whole = args.max_length - 2
    if not isinstance(train_dataset, Dataset) or "prompt_length" not in train_dataset.column_names:
        return whole
    columns = train_dataset.with_format("numpy")
    if "length" not in train_dataset.column_names:
        return whole
    return max(1, int((columns["length"][:] - columns["prompt_length"][:]).max()) - 1)
