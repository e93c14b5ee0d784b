"""Counts of n-grams: the values of nltk, and of slow transcriptions that look at every text again."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.translate import bleu_score
from scipy.stats import entropy as scipy_entropy

from diffusers_text.evaluation.ngrams import corpus_bleu, distinct, entropy, mean_bleu, ngrams, repetition, self_bleu

# nltk warns where it finds no n-gram of an order, which is what is compared here.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*The hypothesis contains 0 counts")

TEXT = st.lists(st.sampled_from("ab"), max_size=9)
LONG_TEXT = st.lists(st.sampled_from("abc"), min_size=4, max_size=9)  # with n-grams of all orders
# Empty texts, texts shorter than any n-gram, and many that are alike: ties of all kinds are common.
TEXTS = st.one_of(st.lists(TEXT, min_size=2, max_size=6), st.lists(LONG_TEXT, min_size=2, max_size=6))
ORDER = st.integers(1, 5)
EXAMPLES = settings(max_examples=250, deadline=None)


def agrees(found, expected):
    """To nine digits also where nltk's value is 1e-78, as without any 4-gram in common."""
    return found == pytest.approx(expected, rel=1e-9, abs=0)


def written_by_chance(number, seed):
    """Texts of 5 to 40 words, some of which are far more common than others."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, 13)
    words = np.array([f"w{i}" for i in range(12)])
    lengths = random.integers(5, 41, number)
    return [random.choice(words, length, p=shares / shares.sum()).tolist() for length in lengths]


def slices(words, n):
    """The n-grams of a text one by one."""
    return [tuple(words[i : i + n]) for i in range(len(words)) if i + n <= len(words)]


@EXAMPLES
@given(hypotheses=TEXTS, references=TEXTS)
def test_bleu_is_that_of_nltk_whatever_the_texts(hypotheses, references):
    expected = bleu_score.corpus_bleu([references] * len(hypotheses), hypotheses)
    assert agrees(corpus_bleu(hypotheses, references), expected)
    of_each = [bleu_score.corpus_bleu([references], [text]) for text in hypotheses]
    assert agrees(mean_bleu(hypotheses, references), np.mean(of_each))


@EXAMPLES
@given(texts=TEXTS)
def test_self_bleu_is_that_of_nltk_with_all_other_texts_as_references(texts):
    of_each = [bleu_score.corpus_bleu([texts[:i] + texts[i + 1 :]], [texts[i]]) for i in range(len(texts))]
    assert agrees(self_bleu(texts), np.mean(of_each))


def test_both_are_those_of_nltk_for_texts_of_natural_length():
    texts, references = written_by_chance(25, seed=0), written_by_chance(20, seed=1)
    bleu, of_each, of_selves = corpus_bleu(texts, references), mean_bleu(texts, references), self_bleu(texts)
    assert agrees(bleu, bleu_score.corpus_bleu([references] * 25, texts))
    assert agrees(of_each, np.mean([bleu_score.corpus_bleu([references], [text]) for text in texts]))
    others = [texts[:i] + texts[i + 1 :] for i in range(len(texts))]
    assert agrees(of_selves, np.mean([bleu_score.corpus_bleu([rest], [text]) for rest, text in zip(others, texts)]))
    for value in (bleu, of_each, of_selves):
        assert 0.05 < value < 0.95


def test_bleu_by_hand():
    """All n-grams are found, but a word is missing; and of a word that the reference has twice, two count."""
    assert agrees(corpus_bleu([list("abcd")], [list("zabcd")]), math.exp(1 - 5 / 4))
    found = corpus_bleu([list("aaaaa")], [list("aabbb"), list("aaa")])
    # 3 of 5, 2 of 4, 1 of 3, none of 2, for which nltk has the smallest number; as long as a reference.
    assert agrees(found, (3 / 5 * 2 / 4 * 1 / 3 * np.finfo(float).tiny) ** 0.25)


def test_of_two_references_equally_near_in_length_the_shorter_counts():
    text, far = list("abcde"), list("abcdefg")
    assert corpus_bleu([text], [far, list("abc")]) == 1
    assert agrees(corpus_bleu([text], [far, list("ab")]), math.exp(1 - 7 / 5))


def test_copies_have_a_self_bleu_of_one_and_texts_with_nothing_in_common_of_none():
    assert agrees(self_bleu([list("abcde")] * 3), 1)
    assert self_bleu([list("abcd"), list("efgh"), []]) == 0
    # A text alone would be its own copy: it must not be among its own references.
    assert self_bleu([list("abcd"), list("abcd"), list("efgh")]) < 0.7


def test_texts_without_a_word_have_no_bleu():
    assert corpus_bleu([[], []], [["a"]]) == corpus_bleu([["a"]], [[]]) == corpus_bleu([[]], [[]]) == 0
    assert self_bleu([[], []]) == 0


@EXAMPLES
@given(texts=TEXTS, n=ORDER)
def test_ngrams_are_the_runs_of_n_words_in_order(texts, n):
    for words in texts:
        assert list(ngrams(words, n)) == slices(words, n)


@EXAMPLES
@given(texts=TEXTS, n=ORDER)
def test_distinct_is_the_share_of_ngrams_that_no_text_had_before(texts, n):
    seen = []
    for words in texts:
        seen += slices(words, n)
    new = [gram for i, gram in enumerate(seen) if gram not in seen[:i]]
    assert distinct(texts, n) == pytest.approx(len(new) / len(seen) if seen else 0)


@EXAMPLES
@given(texts=TEXTS, n=ORDER)
def test_repetition_is_the_mean_share_of_ngrams_that_the_same_text_had_before(texts, n):
    shares = []
    for words in texts:
        grams = slices(words, n)
        again = [gram for i, gram in enumerate(grams) if gram in grams[:i]]
        shares.append(len(again) / len(grams) if grams else 0)
    assert repetition(texts, n) == pytest.approx(np.mean(shares))


@EXAMPLES
@given(texts=TEXTS)
def test_entropy_is_the_mean_over_texts_with_words(texts):
    values = [scipy_entropy(np.unique(words, return_counts=True)[1]) for words in texts if words]
    assert entropy(texts) == pytest.approx(np.mean(values) if values else 0)


def test_diversity_by_hand():
    texts = [list("ababab"), list("abc"), [], ["a"]]
    assert distinct(texts, 1) == 3 / 10
    assert distinct(texts, 2) == 3 / 7
    assert distinct(texts, 4) == 2 / 3
    assert distinct(texts, 7) == 0
    assert repetition(texts, 2) == pytest.approx(3 / 5 / 4)  # the mean over all four, also those without any
    assert repetition(texts, 1) == pytest.approx(4 / 6 / 4)
    assert entropy(texts) == pytest.approx((math.log(2) + math.log(3) + 0) / 3)
    assert distinct([], 1) == repetition([], 1) == entropy([]) == 0


def test_what_has_no_value_is_an_error():
    for hypotheses, references in (([], [["a"]]), ([["a"]], []), ([], [])):
        with pytest.raises(ValueError, match="`hypotheses` and `references` must hold a text each at least"):
            corpus_bleu(hypotheses, references)
    for texts in ([], [["a", "b"]]):
        with pytest.raises(ValueError, match=f"Self-BLEU needs two texts at least, got {len(texts)}"):
            self_bleu(texts)
