"""Arguments of [`TextDiffusionTrainer`]."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..schedulers.noise_schedules import NOISE_SCHEDULES
from ..schedulers.sampling import check_positive_int, is_number

OBJECTIVES = ["continuous", "discrete", "mlm"]
MASK_SAMPLINGS = ["count", "independent"]
CHOSEN_ARGUMENTS = (
    "time_conditioning",
    "schedule",
    "spindle_information",
    "spindle_mean",
    "objective",
    "mask_sampling",
)


@dataclass
class TextDiffusionTrainingArguments(TrainingArguments):
    r"""
    Everything of [`~transformers.TrainingArguments`], and what masked diffusion needs beside it.

    `remove_unused_columns` and `logging_nan_inf_filter` are off: the collator picks its columns, and a loss that is
    not finite stops the training.

    Args:
        time_conditioning (`str`, *optional*):
            How the denoiser is told the time: `"none"`, `"layerwise"` or `"prefix"`, see [`DiffusionBertConfig`]; by
            default as the model is.
        schedule (`str`, defaults to `"linear"`): noise schedule, see [`AbsorbingStateScheduler`].
        spindle_lambda (`float`, defaults to 0.3), spindle_information (`str`, defaults to `"surprisal"`), spindle_mean
            (`str`, defaults to `"corpus"`): of the schedule `"spindle"`.
        objective (`str`, defaults to `"mlm"`):
            `"continuous"` is the bound in continuous time (MDLM, arXiv 2406.07524), `"discrete"` that of
            `num_diffusion_steps` steps with a cross-entropy term (D3PM, arXiv 2107.03006, and DiffusionBERT, arXiv
            2211.15029), `"mlm"` the cross-entropy of masked tokens without weights. All are least for the same
            predictions; the last has the gradients of least variance, and in equal steps leads to the lowest bound.
        num_diffusion_steps (`int`, defaults to 2048): T of the objective `"discrete"`.
        cross_entropy_weight (`float`, defaults to 0.01):
            Weight of the cross-entropy against one step's divergence in the objective `"discrete"`.
        mask_sampling (`str`, *optional*):
            `"count"` draws how many tokens of a row are masked, then which; `"independent"` draws a time, then masks
            each token by itself. By default `"count"`, which has the same expectation and less variance, where time is
            continuous and the schedule treats all tokens alike.
        time_power (`float`, *optional*):
            Times, or shares of masked tokens, are `u ** time_power` of uniform numbers u, and rows are weighted to
            match: the expectation is that of uniform ones. By default 2, which draws few masked tokens more often, so
            that gradients have less variance and steps take less time; 1 for the objectives whose weights do not grow
            towards small times, `"mlm"` and `"discrete"` with a cross-entropy term.
        time_epsilon (`float`, defaults to 1e-3):
            Smallest time that `"independent"` trains on (MDLM's cut). Evaluation has none.
        max_length (`int`, defaults to 128): longest row in tokens, special tokens included.
        packing (`bool`, defaults to `True`): join texts and cut them into rows, or keep a text a row.
        fill_rows (`bool`, defaults to `False`):
            Fill rows up to `max_length` with end-of-text tokens, which are trained like text: a model of rows that are
            not packed needs that to learn where a text ends within a longer canvas (LLaDA, arXiv 2502.09992). The
            bound then counts them, `end_of_text_share` says how many they are.
        text_column, source_column, target_column, prompt_column, completion_column (`str`):
            Where a dataset's texts are, or its pairs, of which the second part is generated.
        dataset_num_proc (`int`, *optional*): processes that tokenize.
        corpus_name (`str`, *optional*): name of the training data, for the scheduler's config and the model card.
        ema_decay (`float`, defaults to 0.9999):
            Decay of the moving average of the weights, which evaluation, samples and the final model use. It is lower
            in the beginning, `(1 + step) / (10 + step)`. 0 keeps no average.
        head_chunk_size (`int`, *optional*):
            Masked tokens whose logits are in memory at once; all by default. Less memory, somewhat more time.
        eval_draws (`int`, defaults to 4):
            Noisy versions of each row that an evaluation takes, an even number of at least 4.
        eval_samples (`int`, defaults to 4): texts that are written at each evaluation.

    Example:

    ```python
    >>> from diffusers_text import TextDiffusionTrainingArguments

    >>> args = TextDiffusionTrainingArguments(output_dir="outputs/run", schedule="cosine", max_length=64)
    >>> args.objective
    'mlm'
    ```
    """

    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Whether to drop columns that the model's forward does not take."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether to hide losses that are not finite; here they stop the training."}
    )
    time_conditioning: str | None = field(
        default=None,
        metadata={
            "help": "How the denoiser is told the time, by default as it was before.",
            "choices": ["none", "layerwise", "prefix"],
        },
    )
    schedule: str = field(default="linear", metadata={"help": "Noise schedule.", "choices": [*NOISE_SCHEDULES]})
    spindle_lambda: float = field(default=0.3, metadata={"help": "Strength of the spindle in [0, 1]."})
    spindle_information: str = field(
        default="surprisal",
        metadata={
            "help": "The spindle's h, the paper's or the released code's.",
            "choices": ["surprisal", "log_count"],
        },
    )
    spindle_mean: str = field(
        default="corpus",
        metadata={"help": "What the spindle's mean information is taken over.", "choices": ["corpus", "sentence"]},
    )
    objective: str = field(
        default="mlm",
        metadata={
            "help": "The cross-entropy of masked tokens without weights ('mlm'), the bound in continuous time, or that"
            " in --num_diffusion_steps steps with a cross-entropy term.",
            "choices": OBJECTIVES,
        },
    )
    num_diffusion_steps: int = field(default=2048, metadata={"help": "Steps T of the objective 'discrete'."})
    cross_entropy_weight: float = field(
        default=0.01,
        metadata={"help": "Weight of the cross-entropy against one step's divergence in the objective 'discrete'."},
    )
    mask_sampling: str | None = field(
        default=None,
        metadata={
            "help": "Draw how many tokens of a row are masked ('count'), or a time and each token by itself"
            " ('independent'). By default 'count' where it is possible.",
            "choices": MASK_SAMPLINGS,
        },
    )
    time_power: float | None = field(
        default=None,
        metadata={
            "help": "Times are this power of uniform numbers, and rows are weighted to match. By default 2, which"
            " draws few masked tokens more often, or 1 for objectives without weights."
        },
    )
    time_epsilon: float = field(default=1e-3, metadata={"help": "Smallest time that 'independent' trains on."})
    max_length: int = field(default=128, metadata={"help": "Longest row in tokens, special tokens included."})
    packing: bool = field(default=True, metadata={"help": "Join texts and cut them into rows, or keep a text a row."})
    fill_rows: bool = field(
        default=False,
        metadata={"help": "Fill rows up to --max_length with end-of-text tokens, which are trained like text."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of texts."})
    source_column: str = field(default="source", metadata={"help": "Column of texts that are given."})
    target_column: str = field(default="target", metadata={"help": "Column of texts to generate from a source."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column of beginnings that are given."})
    completion_column: str = field(
        default="completion", metadata={"help": "Column of what to continue a prompt with."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    corpus_name: str | None = field(default=None, metadata={"help": "Name of the training data, for the model card."})
    ema_decay: float = field(
        default=0.9999, metadata={"help": "Decay of the moving average of the weights; 0 keeps none."}
    )
    head_chunk_size: int | None = field(
        default=None, metadata={"help": "Masked tokens whose logits are in memory at once; all by default."}
    )
    eval_draws: int = field(default=4, metadata={"help": "Noisy versions of each row that an evaluation takes."})
    eval_samples: int = field(default=4, metadata={"help": "Texts that are written at each evaluation."})

    def __post_init__(self):
        self._check()
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = self.metric_for_best_model.endswith("accuracy")
        super().__post_init__()
        if self.accelerator_config.split_batches or self.accelerator_config.dispatch_batches:
            raise ValueError("`accelerator_config` must have neither `split_batches` nor `dispatch_batches`.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # there is nothing to pin for, and torch would warn
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # all are used, also in a batch that nothing is masked in
        self.accelerator_config.dispatch_batches = False  # rows of unequal length cannot be put together and split

    def _check(self):
        check_positive_int("num_diffusion_steps", self.num_diffusion_steps)
        if type(self.max_length) is not int or self.max_length < 3:
            raise ValueError(f"`max_length` must be an integer >= 3, got {self.max_length!r}.")
        for name in ("head_chunk_size", "dataset_num_proc"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in CHOSEN_ARGUMENTS:
            described = self.__dataclass_fields__[name]
            allowed = ([None] if described.default is None else []) + described.metadata["choices"]
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}.")
        for name in ("ema_decay", "time_epsilon"):
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie in [0, 1), got {getattr(self, name)!r}.")
        if self.time_power is not None and (not is_number(self.time_power) or not 1 <= self.time_power <= 4):
            raise ValueError(f"`time_power` must lie in [1, 4], got {self.time_power!r}.")
        if not is_number(self.cross_entropy_weight) or self.cross_entropy_weight < 0:
            raise ValueError(f"`cross_entropy_weight` must be a number >= 0, got {self.cross_entropy_weight!r}.")
        if type(self.eval_draws) is not int or self.eval_draws < 4 or self.eval_draws % 2:
            raise ValueError(
                f"`eval_draws` must be an even number of at least 4, for a standard error, got {self.eval_draws!r}."
            )
        if not isinstance(self.eval_samples, int) or self.eval_samples < 0:
            raise ValueError(f"`eval_samples` must be an integer >= 0, got {self.eval_samples!r}.")
        # What would lose rows or columns, or count tokens otherwise than the loss that is logged.
        for name, wanted, why in (
            ("average_tokens_across_devices", True, "the loss is a mean over all tokens"),
            ("remove_unused_columns", False, "the collator needs columns that the model does not take"),
            ("dataloader_drop_last", False, "the last rows count like all others"),
            ("eval_do_concat_batches", True, "figures are of all rows"),
            ("label_smoothing_factor", 0.0, "a bound has none"),
        ):
            if getattr(self, name) != wanted:
                raise ValueError(f"`{name}` must be {wanted}: {why}.")
        if self.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
            raise ValueError(
                "`train_sampling_strategy` must be 'random', 'sequential' or 'group_by_length', got"
                f" {self.train_sampling_strategy!r}."
            )


__all__ = ["TextDiffusionTrainingArguments"]
