"""What generated texts are like: against a corpus, against each other, and to another language model."""

import math
import re
import statistics
from collections.abc import Callable

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.sparse_head import evaluation_mode, max_sequence_length
from ..schedulers.sampling import check_positive_int
from .ngrams import Words, corpus_bleu, distinct, entropy, mean_bleu, repetition, self_bleu


def split_words(text: str) -> Words:
    """Words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


def generation_metrics(
    texts: list[str],
    references: list[str] | None = None,
    texts_per_prompt: int | None = None,
    split: Callable[[str], Words] = split_words,
) -> dict:
    r"""
    Measures of generated texts.

    Args:
        texts (`list[str]`): two at least; the papers take 1,000.
        references (`list[str]`, *optional*):
            A corpus that the texts should be like, as many of its texts for all figures that are compared, spelled as
            the model spells (see [`spelled_by`]).
        texts_per_prompt (`int`, *optional*): texts that stand side by side and have a prompt in common, for `div_4`.
        split (`Callable`, defaults to [`split_words`]): words of a text.

    Returns:
        `dict`: `bleu` (of a text against `references`) and `self_bleu` (against all other texts), BLEU-4 in [0, 1],
        the mean over texts as in DiffusionBERT's released code; `corpus_bleu` (of all texts at once); `distinct_1` to
        `distinct_4` (share of distinct n-grams in all texts); `div_4` (that of the texts of a prompt, the mean over
        prompts: DiffuSeq, arXiv 2210.08933); `repetition_4` (share of 4-grams that a text had before); `entropy` (of
        the words in a text, in nats); `unique` (share of distinct texts); `length_mean`, `length_std`, `length_min`,
        `length_max`; `num_texts`, `num_references`.

    Raises:
        ValueError: fewer than two texts, or a number of texts that `texts_per_prompt` does not divide.

    Example:

    ```python
    >>> from diffusers_text import generation_metrics

    >>> metrics = generation_metrics(["We do agree.", "We agree that no is no."], references=["Yes, we do agree."])
    >>> metrics["unique"], metrics["length_mean"]
    (1.0, 5.5)
    ```
    """
    if len(texts) < 2:
        raise ValueError(f"`texts` must be two at least, got {len(texts)}.")
    per_prompt = len(texts) if texts_per_prompt is None else texts_per_prompt
    check_positive_int("texts_per_prompt", per_prompt)
    if len(texts) % per_prompt:
        raise ValueError(f"`texts_per_prompt` {per_prompt} does not divide the number of texts, {len(texts)}.")
    words = [split(text) for text in texts]
    groups = [words[start : start + per_prompt] for start in range(0, len(words), per_prompt)]
    lengths = [len(text) for text in words]
    metrics = {}
    if references is not None:
        reference_words = [split(text) for text in references]
        metrics["bleu"] = mean_bleu(words, reference_words)
        metrics["corpus_bleu"] = corpus_bleu(words, reference_words)
    metrics["self_bleu"] = self_bleu(words)
    metrics |= {f"distinct_{n}": distinct(words, n) for n in (1, 2, 3, 4)}
    metrics["div_4"] = statistics.mean(distinct(group, 4) for group in groups)
    metrics["repetition_4"] = repetition(words, 4)
    metrics["entropy"] = entropy(words)
    metrics["unique"] = len(set(texts)) / len(texts)
    metrics["length_mean"], metrics["length_std"] = statistics.mean(lengths), statistics.stdev(lengths)
    metrics["length_min"], metrics["length_max"] = min(lengths), max(lengths)
    metrics["num_texts"] = len(texts)
    if references is not None:
        metrics["num_references"] = len(references)
    return metrics


def spelled_by(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[str]:
    """The texts as a model with this tokenizer would write them: lower-cased, say, and spaced as it decodes."""
    if not texts:
        return []
    ids = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def rouge_l(predictions: list[str], references: list[str], metric="rouge") -> float:
    r"""
    ROUGE-L of texts against one reference each, for conditional generation, by `evaluate`.

    Args:
        predictions, references (`list[str]`): texts, and what they should have been.
        metric (`str` or `evaluate.EvaluationModule`, defaults to `"rouge"`):
            `evaluate`'s ROUGE: its name, a folder with it, or what `evaluate.load` gave for them.

    Returns:
        `float`: the mean F-measure in [0, 1].
    """
    if isinstance(metric, str):
        import evaluate  # takes a second, and nothing else needs it

        metric = evaluate.load(metric)
    return float(metric.compute(predictions=predictions, references=references, rouge_types=["rougeL"])["rougeL"])


@torch.no_grad()
def generative_perplexity(
    texts: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 8,
    max_length: int | None = None,
    progress_bar: Callable | None = None,
) -> dict:
    r"""
    The perplexity of texts under a causal language model, with the entropy of their tokens beside it: texts that
    repeat themselves have a low perplexity, and a low entropy.

    Args:
        texts (`list[str]`): generated texts; those without a token to judge are counted.
        model ([`~transformers.PreTrainedModel`]): the judge, a causal language model.
        tokenizer: its tokenizer. A text begins with its begin-of-text token, or else its first token is not scored.
        batch_size (`int`, defaults to 8): texts of a forward pass.
        max_length (`int`, *optional*): tokens of a text that are looked at, the beginning among them; all by default.
        progress_bar (`Callable`, *optional*): makes a bar out of a total; there is none by default.

    Returns:
        `dict`: `perplexity` (per token of all texts), `nats_per_token`, `entropy` (of the judge's tokens within a
        text, in nats), `tokens`, and `empty_texts` (texts without a token that is scored).

    Raises:
        ValueError: texts without any token to score, or longer than the judge takes.
    """
    check_positive_int("batch_size", batch_size)
    if max_length is not None:
        check_positive_int("max_length", max_length)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    rows = [(start + ids)[:max_length] for ids in encoded]
    rows = sorted((row for row in rows if len(row) > 1), key=len, reverse=True)
    if not rows:
        raise ValueError(f"None of {len(texts)} texts has a token that the judge could score.")
    if len(rows[0]) > (limit := max_sequence_length(model)):
        raise ValueError(
            f"A text has {len(rows[0])} tokens, the judge takes {limit}: set `max_length` (`--judge-max-length`)."
        )
    nats, scored = [], 0
    bar_of = progress_bar or (lambda total: tqdm(total=total, disable=True))
    with evaluation_mode(model), bar_of(total=len(rows)) as bar:
        bar.set_description("Judging")
        for first in range(0, len(rows), batch_size):
            batch = rows[first : first + batch_size]
            width = len(batch[0])
            ids = torch.tensor([row + [0] * (width - len(row)) for row in batch], device=model.device)
            inside = torch.arange(width, device=ids.device) < ids.new_tensor([[len(row)] for row in batch])
            logits = model(input_ids=ids, attention_mask=inside.long()).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            nats += (losses * inside[:, 1:]).cpu().double().sum(dim=1).tolist()
            scored += int(inside[:, 1:].sum())
            bar.update(len(batch))
    mean = math.fsum(nats) / scored
    return {
        "perplexity": math.exp(mean),
        "nats_per_token": mean,
        "entropy": entropy([row[len(start) :] for row in rows]),
        "tokens": scored,
        "empty_texts": len(texts) - len(rows),
    }


__all__ = ["generation_metrics", "generative_perplexity", "rouge_l", "spelled_by", "split_words"]
