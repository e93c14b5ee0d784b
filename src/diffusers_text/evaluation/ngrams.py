"""BLEU, self-BLEU and other counts of n-grams, with the references counted once."""

import math
import statistics
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

ORDERS = (1, 2, 3, 4)

Words = list[str]


def ngrams(words: Words, n: int) -> Iterator[tuple[str, ...]]:
    """The n-grams of a text, in order."""
    return zip(*(words[i:] for i in range(n)))


def corpus_bleu(hypotheses: list[Words], references: list[Words]) -> float:
    r"""
    BLEU-4 (Papineni et al., 2002) of hypotheses that all have the same references: the value of nltk's `corpus_bleu`
    without smoothing, in a time that does not grow with the product of their numbers.

    Args:
        hypotheses, references (`list[list[str]]`): texts as words.

    Raises:
        ValueError: no hypothesis, or no reference.

    Example:

    ```python
    >>> from diffusers_text.evaluation.ngrams import corpus_bleu

    >>> round(corpus_bleu(["we do agree that".split()], ["yes we do agree that".split()]), 4)  # exp(1 - 5 / 4)
    0.7788
    ```
    """
    return _bleu(*(sum(counts) for counts in zip(*_counts(hypotheses, references))))


def mean_bleu(hypotheses: list[Words], references: list[Words]) -> float:
    r"""
    The mean of the hypotheses' own BLEU-4, as DiffusionBERT's released code computes it: a text without any 4-gram of
    the references counts for nothing, however many it shares otherwise.

    Args, errors: those of [`corpus_bleu`].
    """
    return statistics.fmean(_bleu(*counts) for counts in _counts(hypotheses, references))


def self_bleu(texts: list[Words]) -> float:
    r"""
    How alike texts are: the BLEU-4 of each against all others (Texygen, arXiv 1802.01886), the mean over texts.

    Args:
        texts (`list[list[str]]`): two texts at least, as words.

    Raises:
        ValueError: fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"Self-BLEU needs two texts at least, got {len(texts)}.")
    return statistics.fmean(_bleu(*counts) for counts in _counts(texts))


def distinct(texts: list[Words], n: int) -> float:
    """The share of distinct ones among all n-grams of all texts (Li et al., arXiv 1510.03055)."""
    counts = Counter(gram for words in texts for gram in ngrams(words, n))
    return len(counts) / max(1, counts.total())


def repetition(texts: list[Words], n: int) -> float:
    """The share of n-grams that the text had before, the mean over texts (seq-rep-n, arXiv 1908.04319)."""
    shares = []
    for words in texts:
        counts = Counter(ngrams(words, n))
        shares.append(1 - len(counts) / max(1, counts.total()) if counts else 0.0)
    return sum(shares) / max(1, len(shares))


def entropy(texts: list[Words]) -> float:
    """The entropy of the words within a text, in nats, the mean over texts that have words."""
    values = []
    for words in texts:
        shares = [count / len(words) for count in Counter(words).values()]
        values += [-sum(share * math.log(share) for share in shares)] if words else []
    return sum(values) / max(1, len(values))


def _counts(hypotheses: list[Words], references: list[Words] | None = None) -> list[tuple[int, ...]]:
    """
    What BLEU is made of, for each hypothesis: n-grams of each order that are in the references, n-grams, the length of
    the nearest reference and its own. Without `references` all other hypotheses are.
    """
    if not hypotheses or references == []:
        raise ValueError("`hypotheses` and `references` must hold a text each at least.")
    others_only = references is None
    most = _most_counts(hypotheses if others_only else references)
    lengths = sorted(map(len, hypotheses if others_only else references))
    # Only the text that has an n-gram most can have more of it than the second.
    rank = 1 if others_only else 0
    counts = []
    for words in hypotheses:
        matches, totals = [], []
        for n in ORDERS:
            found = Counter(ngrams(words, n))
            matches.append(sum(min(count, most.get(gram, (0, 0))[rank]) for gram, count in found.items()))
            totals.append(max(1, found.total()))
        if others_only:
            lengths.remove(len(words))
        closest = _closest(lengths, len(words))
        if others_only:
            insort(lengths, len(words))
        counts.append((*matches, *totals, closest, len(words)))
    return counts


def _most_counts(texts):
    """For each n-gram how often the two texts have it that have it most."""
    most = {}
    for words in texts:
        for gram, count in Counter(gram for n in ORDERS for gram in ngrams(words, n)).items():
            largest, second = most.get(gram, (0, 0))
            most[gram] = (count, largest) if count > largest else (largest, max(second, count))
    return most


def _closest(sorted_lengths, length):
    """The length nearest to `length`, of two the shorter."""
    place = bisect_left(sorted_lengths, length)
    return min(sorted_lengths[max(0, place - 1) : place + 1], key=lambda other: (abs(other - length), other))


def _bleu(*counts: int) -> float:
    """The geometric mean of the precisions, times the penalty for brevity, of what [`_counts`] gives."""
    *matches_and_totals, closest, length = counts
    matches, totals = matches_and_totals[: len(ORDERS)], matches_and_totals[len(ORDERS) :]
    if matches[0] == 0:
        return 0.0
    # nltk's way where no n-gram of an order is found: the smallest number that there is.
    precisions = [found / total or sys.float_info.min for found, total in zip(matches, totals)]
    brevity = min(1.0, math.exp(1 - closest / length))
    return brevity * math.exp(math.fsum(math.log(precision) / len(ORDERS) for precision in precisions))


__all__ = ["corpus_bleu", "distinct", "entropy", "mean_bleu", "ngrams", "repetition", "self_bleu"]
