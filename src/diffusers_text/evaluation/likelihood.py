"""The likelihood bound of a corpus."""

import hashlib
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.collators import DataCollatorForTextDiffusion
from ..losses import BoundTerms
from ..models.sparse_head import conditions_on_time, evaluation_mode, logits_at, max_sequence_length
from ..noising import NoisyRows, bound_terms
from ..resuming import fingerprint, new_part, read_parts
from ..schedulers.sampling import check_positive_int, is_number
from ..schedulers.scheduling_absorbing_state import AbsorbingStateScheduler
from .corpus import Corpus, encode_corpus
from .estimators import choose_estimator, corpus_error, draw_estimates

logger = logging.get_logger(__name__)

MAX_BLOCKS = 64  # of draws, to reach a standard error
SCHEDULE_SETTINGS = {
    "polynomial": ("power",),
    "geometric": ("sigma_min", "sigma_max"),
    "spindle": ("spindle_lambda", "spindle_information", "spindle_mean", "tilt"),
}


@dataclass
class LikelihoodBound:
    r"""
    An upper bound on the negative log-likelihood of a corpus, and all that it depends on.

    Args:
        nats_per_token, bits_per_token, perplexity_per_token (`float`):
            Over all tokens that can be noised: without the start of a row, with the terminators of texts.
        perplexity_per_word (`float`, *optional*):
            The same nats for each word between white space, as DiffusionBERT reports; None where token ids were given.
        standard_error (`float`): of `nats_per_token`, by the noise that was drawn; the corpus is taken as it is.
        tokens, rows (`int`), words, texts (`int`, *optional*): what the figures are over.
        split_texts, blank_texts (`int`): texts cut into several rows, and passed over.
        packing (`bool`, *optional*), fill_rows (`bool`), max_length (`int`): how texts were made rows.
        lower_case (`bool`): whether the tokenizer takes upper and lower case for the same.
        estimator (`str`), num_draws (`int`), time_epsilon (`float`): how it was estimated, see [`likelihood_bound`].
        num_inference_steps (`int`, *optional*): T of the bound in steps; None in continuous time.
        schedule (`str`), schedule_settings (`dict`): the noise, with the settings that this schedule has.
        corpus_name (`str`, *optional*): as it was passed.
    """

    nats_per_token: float
    bits_per_token: float
    perplexity_per_token: float
    perplexity_per_word: float | None
    standard_error: float
    tokens: int
    words: int | None
    rows: int
    texts: int | None
    split_texts: int
    blank_texts: int
    packing: bool | None
    fill_rows: bool
    max_length: int
    lower_case: bool
    estimator: str
    num_draws: int
    time_epsilon: float
    num_inference_steps: int | None
    schedule: str
    schedule_settings: dict
    corpus_name: str | None

    def to_dict(self) -> dict:
        """The fields by name, with None for a perplexity that no number holds: JSON has no infinity."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    def __str__(self):
        at_most = "" if self.time_epsilon else " at most"
        words = "" if self.perplexity_per_word is None else f", per word{at_most} {self.perplexity_per_word:.2f}"
        time = "continuous time" if self.num_inference_steps is None else f"{self.num_inference_steps} steps"
        if self.time_epsilon:
            time += f" from {self.time_epsilon}: no bound"
        rows = {True: "packed in rows of", False: "a text a row of up to", None: "in rows of up to"}[self.packing]
        case = ", lower case" if self.lower_case else ""
        return (
            f"{self.nats_per_token:.4f} +- {self.standard_error:.4f} nats per token, perplexity per token{at_most}"
            f" {self.perplexity_per_token:.2f}{words} ({self.schedule}, {time}, {self.tokens} tokens {rows}"
            f" {self.max_length}{case})"
        )


def likelihood_bound(
    pipe,
    dataset: Iterable[str] | Dataset,
    *,
    max_length: int | None = None,
    text_column: str = "text",
    packing: bool = True,
    long_texts: str = "split",
    fill_rows: bool = False,
    num_inference_steps: int | None = None,
    estimator: str | None = None,
    num_draws: int = 8,
    standard_error: float | None = None,
    time_epsilon: float = 0.0,
    batch_size: int = 32,
    corpus_name: str | None = None,
    resume_file: str | None = None,
) -> LikelihoodBound:
    r"""
    The variational bound on the negative log-likelihood of a corpus: MDLM's in continuous time (arXiv 2406.07524, eq.
    10), or that of T steps (D3PM, arXiv 2107.03006); for the spindle in the general form of MD4 (arXiv 2406.04329).

    The noise of a row depends on its tokens alone: the same corpus gives the same figure in any order, in batches of
    any size and on any number of processes of accelerate, up to rounding. Figures of two models on one corpus share
    their noise.

    Args:
        pipe ([`TextDiffusionPipeline`]): model, tokenizer and noise, an [`AbsorbingStateScheduler`]'s.
        dataset (iterable of `str` or `datasets.Dataset`): texts, or rows with `input_ids`, see [`prepare_pairs`].
        max_length (`int`, *optional*):
            Tokens of a row, by default those of the longest text that the model was trained on
            (`scheduler.config.gen_length` and two special tokens), and of given rows what the model takes.
        text_column (`str`, defaults to `"text"`): where a dataset has its texts.
        packing (`bool`, defaults to `True`): cut the joined texts into rows, or keep a text a row.
        long_texts (`str`, defaults to `"split"`):
            Without packing, whether a text over `max_length` is split into rows or is an error (`"error"`).
        fill_rows (`bool`, defaults to `False`):
            Fill rows up to `max_length` with end-of-text tokens, for a model that was trained on such rows. Their nats
            belong to the text, which ends there and nowhere else; its tokens are counted without them.
        num_inference_steps (`int`, *optional*): T of the bound in steps, continuous time by default.
        estimator (`str`, *optional*):
            `"count"` draws how many tokens of a row are masked, `"nonempty"` a time and noise that masks something,
            both in pairs of opposite draws and with earlier losses of a token as its control variate: the first is the
            default where the schedule treats all tokens alike, the second elsewhere. `"independent"` is MDLM's
            estimator: a time, and each token masked by itself.
        num_draws (`int`, defaults to 8): forward passes for each row, an even number of at least 4.
        standard_error (`float`, *optional*):
            Draw `num_draws` more until the standard error, in nats per token, is at most this.
        time_epsilon (`float`, defaults to 0): smallest time of `"independent"`; with one the figure is no bound.
        batch_size (`int`, defaults to 32): rows of a forward pass.
        corpus_name (`str`, *optional*): what the result calls the corpus.
        resume_file (`str`, *optional*):
            Finished batches are kept beside it, to go on after an interruption; [`~resuming.remove_parts`] removes
            them.

    Returns:
        [`LikelihoodBound`].

    Raises:
        ValueError: an argument out of range, or an empty corpus.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline, likelihood_bound

    >>> pipe = TextDiffusionPipeline(model, tokenizer, AbsorbingStateScheduler())
    >>> pipe.set_progress_bar_config(disable=True)
    >>> bound = likelihood_bound(pipe, ["We agree that no is no.", "Yes, we do agree."], max_length=8)
    >>> bound.words, bound.texts, bound.estimator
    (10, 2, 'count')
    ```
    """
    scheduler, limit = pipe.scheduler, max_sequence_length(pipe.model)
    if max_length is None:
        is_encoded = isinstance(dataset, Dataset) and "input_ids" in dataset.column_names
        max_length = limit if is_encoded else min(limit, scheduler.config.gen_length + 2)
    check_scheduler(scheduler)
    check_positive_int("max_length", max_length)
    if max_length > limit:
        raise ValueError(f"`max_length` is {max_length}, but the model takes at most {limit} tokens.")
    estimator = choose_estimator(scheduler, estimator, num_inference_steps)
    check_arguments(num_inference_steps, estimator, num_draws, standard_error, time_epsilon, batch_size)
    state = PartialState()
    progress_bar = pipe.progress_bar if state.is_main_process else partial(tqdm, disable=True)
    corpus = encode_corpus(dataset, pipe.tokenizer, max_length, text_column, packing, long_texts, progress_bar)
    if fill_rows:
        corpus = corpus.filled(max_length, pipe.tokenizer)
    settings = {"estimator": estimator, "num_steps": num_inference_steps, "time_epsilon": time_epsilon}
    nats = np.empty((len(corpus.rows), 0))
    while nats.shape[1] < num_draws * (1 if standard_error is None else MAX_BLOCKS):
        draws = range(nats.shape[1], nats.shape[1] + num_draws)
        new = row_nats(pipe, corpus, draws, settings, batch_size, progress_bar, resume_file)
        nats = np.concatenate([nats, new], axis=1)
        error = corpus_error(nats, corpus.tokens)
        if standard_error is not None and error <= standard_error:
            break
    if standard_error is not None and error > standard_error:
        logger.warning(f"The standard error is {error:.5f} after {nats.shape[1]} draws, over {standard_error}.")
    schedule = scheduler.config.schedule
    bound = math.fsum(nats.mean(axis=1)) / corpus.tokens  # exact sums know no order
    return LikelihoodBound(
        nats_per_token=bound,
        bits_per_token=bound / math.log(2),
        perplexity_per_token=safe_exp(bound),
        perplexity_per_word=safe_exp(bound * corpus.tokens / corpus.words) if corpus.words else None,
        standard_error=error,
        tokens=corpus.tokens,
        words=corpus.words,
        rows=len(corpus.rows),
        texts=corpus.texts,
        split_texts=corpus.split_texts,
        blank_texts=corpus.blank_texts,
        packing=corpus.packing,
        fill_rows=fill_rows,
        max_length=max_length,
        lower_case=is_lower_case(pipe.tokenizer),
        estimator=estimator,
        num_draws=nats.shape[1],
        time_epsilon=time_epsilon,
        num_inference_steps=num_inference_steps,
        schedule=schedule,
        schedule_settings={name: scheduler.config[name] for name in SCHEDULE_SETTINGS.get(schedule, ())},
        corpus_name=corpus_name,
    )


def row_nats(
    pipe, corpus: Corpus, draws: range, settings: dict, batch_size: int, progress_bar, resume_file: str | None
) -> np.ndarray:
    r"""
    The estimates of each row, `[rows, draws]` in nats, the work divided among accelerate's processes.

    Args:
        draws (`range`): numbers of the draws.
        settings (`dict`): those of [`draw_estimates`].
        progress_bar (`Callable`): makes one out of a total.
        resume_file (`str`, *optional*): where finished batches are kept.
    """
    state, keys, found = PartialState(), corpus.keys, {}
    all_settings = settings | {"block": len(draws), "rows": corpus_digest(corpus)}
    part = nullcontext(lambda line: None)
    if resume_file is not None:
        all_settings["pipeline"] = fingerprint(pipe)
        lines = read_parts(resume_file, all_settings)
        found = {row: values for line in lines if line["draw"] == draws[0] for row, values in line["nats"]}
        state.wait_for_everyone()  # from here on parts change: all must have seen the same
        part = new_part(resume_file, all_settings)
    # Rows of a length go together, with little padding; the longest first: if memory does not suffice, then now.
    left = [row for row in range(len(corpus.rows)) if row not in found]
    left.sort(key=lambda row: len(corpus.rows[row]["input_ids"]), reverse=True)
    batches = [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
    batches = batches[state.process_index :: state.num_processes]
    done = []
    with part as write, evaluation_mode(pipe.model), progress_bar(total=len(batches)) as bar:
        bar.set_description("Bound")
        for batch in batches:
            rows = [corpus.rows[row] for row in batch]
            values = batch_nats(pipe, rows, [keys[row] for row in batch], draws, settings)
            done += [[row, nats] for row, nats in zip(batch, values.tolist())]
            write({"draw": draws[0], "nats": done[-len(batch) :]})
            bar.update()
    found |= dict(gather_object(done))
    return np.array([found[row] for row in range(len(corpus.rows))])


def batch_nats(pipe, rows: list[dict], keys: list[tuple[int, ...]], draws: range, settings: dict) -> np.ndarray:
    r"""
    The estimates of a batch's rows, `[batch, draws]` in nats.

    Raises:
        FloatingPointError: a figure that is not finite.
    """
    inputs = {
        name: value.to(pipe.device) for name, value in DataCollatorForTextDiffusion(pipe.tokenizer)(rows).items()
    }
    sample, maskable = inputs.pop("input_ids"), inputs.pop("labels") != -100

    @torch.no_grad()
    def terms_of(noise: NoisyRows) -> BoundTerms:
        times = {"timesteps": noise.timesteps} if conditions_on_time(pipe.model) else {}
        logits = logits_at(pipe.model, noise.positions, input_ids=noise.noisy, **inputs, **times)
        return bound_terms(pipe.scheduler, logits, noise.positions, noise, overwrite_logits=True)

    estimates = draw_estimates(pipe.scheduler, sample, maskable, keys, draws, terms_of, **settings)
    nats = torch.stack([nats for _, _, nats in estimates], dim=1).cpu()
    for row, finite in zip(rows, nats.isfinite().all(dim=1)):
        if not finite:
            raise FloatingPointError(f"The bound of {pipe.tokenizer.decode(row['input_ids'])[:60]!r} is not finite.")
    return nats.numpy()


def check_scheduler(scheduler):
    """Raises a `ValueError` for a scheduler whose texts have no bound."""
    if type(scheduler) is not AbsorbingStateScheduler:  # the other strategies are made of it
        raise ValueError(
            f"`pipe.scheduler` is a {type(scheduler).__name__}, whose texts have no likelihood bound: evaluate with an"
            " AbsorbingStateScheduler, made of it with `from_config`."
        )


def check_arguments(num_inference_steps, estimator, num_draws, standard_error, time_epsilon, batch_size):
    """Raises a `ValueError` for the first of these arguments of [`likelihood_bound`] that is out of range."""
    check_positive_int("num_draws", num_draws)
    check_positive_int("batch_size", batch_size)
    if num_inference_steps is not None:
        check_positive_int("num_inference_steps", num_inference_steps)
    if num_draws < 4 or num_draws % 2:
        raise ValueError(f"`num_draws` must be an even number of at least 4, for a standard error, got {num_draws}.")
    if standard_error is not None and (not is_number(standard_error) or standard_error <= 0):
        raise ValueError(f"`standard_error` must be a number > 0, got {standard_error!r}.")
    if not is_number(time_epsilon) or not 0 <= time_epsilon < 1:
        raise ValueError(f"`time_epsilon` must lie in [0, 1), got {time_epsilon!r}.")
    if time_epsilon > 0 and (estimator != "independent" or num_inference_steps is not None):
        raise ValueError("`time_epsilon` goes with `estimator='independent'` in continuous time: others need no cut.")


def corpus_digest(corpus: Corpus) -> str:
    """A hash of a corpus's rows."""
    given = [(row.get("prompt_length", 0), list(row.get("token_type_ids", ()))) for row in corpus.rows]
    return hashlib.sha256(repr((corpus.keys, given)).encode()).hexdigest()[:16]


def safe_exp(nats: float) -> float:
    """`exp`, infinite where it is over what a float holds."""
    return math.exp(nats) if nats < 700 else math.inf


def is_lower_case(tokenizer) -> bool:
    """Whether the tokenizer takes upper and lower case for the same."""
    upper, lower = tokenizer(["Case", "case"], add_special_tokens=False)["input_ids"]
    return upper == lower and tokenizer.unk_token_id not in upper


__all__ = ["LikelihoodBound", "likelihood_bound"]
