"""The likelihood of single texts, to rank them."""

from dataclasses import dataclass

import torch

from ..data.collators import DataCollatorForTextDiffusion
from ..data.special_tokens import literal_ids, maskable_tokens, start_id, terminator_id
from ..models.sparse_head import conditions_on_time, evaluation_mode, logits_at, max_sequence_length
from ..noising import row_key
from .estimators import choose_estimator, pair_variance
from .likelihood import batch_nats, check_arguments, check_scheduler

METHODS = ["bound", "pseudo"]


@dataclass
class TextScores:
    r"""
    Log-likelihoods of texts.

    Args:
        log_likelihoods (`list[float]`):
            In nats, of each text: a lower bound on it (`"bound"`), or the pseudo-log-likelihood (`"pseudo"`).
        standard_errors (`list[float]`): of the bounds, by the noise; 0 for pseudo-log-likelihoods, which are exact.
        tokens (`list[int]`): scored tokens of each text, for comparisons by length.
    """

    log_likelihoods: list[float]
    standard_errors: list[float]
    tokens: list[int]


def score(
    pipe,
    texts: list[str],
    prompts: list[str] | None = None,
    *,
    method: str = "bound",
    num_draws: int = 16,
    with_terminator: bool = True,
    batch_size: int = 32,
) -> TextScores:
    r"""
    Scores texts, for ranking: higher is likelier.

    Args:
        pipe ([`TextDiffusionPipeline`]): model, tokenizer and noise, an [`AbsorbingStateScheduler`]'s.
        texts (`list[str]`): what is scored. The noise of a text depends on its tokens alone.
        prompts (`list[str]`, *optional*): beginnings that are given, one for each text, `""` for none.
        method (`str`, defaults to `"bound"`):
            `"bound"` is the negative of [`likelihood_bound`]'s nats; `"pseudo"` the sum of the log-probabilities of
            each token given all others (Salazar et al., arXiv 1910.14659), which takes a forward pass for each token
            and is no likelihood.
        num_draws (`int`, defaults to 16): forward passes for each text, an even number of at least 4; of the bound.
        with_terminator (`bool`, defaults to `True`): whether the text ends there, or may go on.
        batch_size (`int`, defaults to 32): rows of a forward pass.

    Returns:
        [`TextScores`].

    Raises:
        ValueError: an argument out of range, a text without tokens, or one that is longer than the model takes.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline, score

    >>> pipe = TextDiffusionPipeline(model, tokenizer, AbsorbingStateScheduler())
    >>> score(pipe, ["we agree", "we do agree"], method="pseudo").tokens  # with [SEP]
    [3, 4]
    ```
    """
    for name, value in (("texts", texts), ("prompts", prompts)):
        if isinstance(value, str):
            raise ValueError(f"`{name}` must be a list of texts, got one text, {value[:60]!r}.")
        for number, text in enumerate(value or []):
            if not isinstance(text, str):
                raise ValueError(f"`{name}` must be a list of texts, got {text!r:.60} at {number}.")
    if prompts is not None and len(prompts) != len(texts):
        raise ValueError(f"`prompts` must be one for each text, got {len(prompts)} for {len(texts)}.")
    rows = encode_pairs(pipe.tokenizer, texts, prompts or [""] * len(texts), with_terminator)
    return score_rows(pipe, rows, method, num_draws, batch_size)


def encode_pairs(tokenizer, texts: list[str], prompts: list[str], with_terminator: bool) -> list[dict]:
    """Rows `[CLS] prompt text [SEP]`, the terminator only where it is asked for, and not after an empty text."""
    start = [i for i in [start_id(tokenizer)] if i is not None]
    end = [i for i in [terminator_id(tokenizer)] if i is not None and with_terminator]
    ids, given = (literal_ids(tokenizer, [*part]) for part in (texts, prompts))
    return [
        {"input_ids": [*start, *before, *text, *(end if text else [])], "prompt_length": len(start) + len(before)}
        for before, text in zip(given, ids)
    ]


def score_rows(pipe, rows: list[dict], method: str, num_draws: int, batch_size: int) -> TextScores:
    """[`score`] of rows with `input_ids` and `prompt_length`."""
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {METHODS}, got {method!r}.")
    check_scheduler(pipe.scheduler)
    estimator = choose_estimator(pipe.scheduler, None, None)
    check_arguments(None, estimator, num_draws, None, 0.0, batch_size)
    tokens, limit = [], max_sequence_length(pipe.model)
    for number, row in enumerate(rows):
        scored = maskable_tokens(torch.as_tensor(row["input_ids"]), pipe.tokenizer)[row["prompt_length"] :]
        tokens.append(int(scored.sum()))
        if len(row["input_ids"]) > limit:
            raise ValueError(f"Text {number} has {len(row['input_ids'])} tokens, the model takes at most {limit}.")
        if not tokens[-1]:
            raise ValueError(f"Text {number} has no tokens to score.")
    if method == "pseudo":
        return TextScores([pseudo_log_likelihood(pipe, row, batch_size) for row in rows], [0.0] * len(rows), tokens)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]), reverse=True)
    values, errors = [0.0] * len(rows), [0.0] * len(rows)
    with evaluation_mode(pipe.model):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            keys = [(row_key(rows[i]["input_ids"]), 0) for i in batch]
            nats = batch_nats(pipe, [rows[i] for i in batch], keys, range(num_draws), {"estimator": estimator})
            for i, mean, variance in zip(batch, nats.mean(axis=1), pair_variance(nats)):
                values[i], errors[i] = -float(mean), float(variance) ** 0.5
    return TextScores(values, errors, tokens)


@torch.no_grad()
def pseudo_log_likelihood(pipe, row: dict, batch_size: int) -> float:
    r"""
    The sum of the log-probabilities of a row's tokens, each given all others, in nats. A time-conditioned model is
    told the time at which one token of the row is masked on average.

    Args:
        row (`dict`): `input_ids` and `prompt_length`.
        batch_size (`int`): rows of a forward pass.
    """
    batch = DataCollatorForTextDiffusion(pipe.tokenizer)([row])
    sample, labels = batch["input_ids"].to(pipe.device), batch["labels"][0]
    places = (labels != -100).nonzero().flatten().to(pipe.device)
    total = torch.zeros((), dtype=torch.float64)
    with evaluation_mode(pipe.model):
        for start in range(0, len(places), batch_size):
            part = places[start : start + batch_size]
            noisy = sample.repeat(len(part), 1)
            noisy[torch.arange(len(part)), part] = pipe.scheduler.mask_token_id
            positions = torch.arange(len(part), device=noisy.device) * noisy.shape[1] + part
            told = {}
            if conditions_on_time(pipe.model):
                told["timesteps"] = torch.full((len(part),), 1 / len(places), device=noisy.device)
            logits = logits_at(pipe.model, positions, input_ids=noisy, **told).float()
            logits[:, pipe.scheduler.mask_token_id] = -torch.inf
            log_p = logits.log_softmax(dim=-1).gather(1, sample[0, part][:, None])
            total += log_p.cpu().double().sum()
    return total.item()


__all__ = ["TextScores", "score"]
