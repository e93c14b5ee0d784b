"""Scores of single texts: against a law that is known, against slow loops, and against the bound of a corpus."""

import itertools
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from toys import CLS, COUNTS, EMITTED, MASK, SEP, toy_model, toy_tokenizer
from writing import family_model, raw_logits

from diffusers_text import (
    AbsorbingStateScheduler,
    ConfidenceUnmaskingScheduler,
    TextDiffusionPipeline,
    likelihood_bound,
    score,
)

IDS = {"a": 5, "b": 6, "c": 7}
TEXTS = ["a b", "c", "b b a c", "c a", "a", "c c c c c c", "a b c"]
PROMPTS = ["c", "", "a b", "b", "c c c c", "", "b"]
METHODS = ["bound", "pseudo"]


def pipe_of(model=None, schedule="linear", **kwargs):
    counts = {"token_counts": COUNTS} if schedule == "spindle" else {}
    scheduler = AbsorbingStateScheduler(schedule=schedule, **counts, **kwargs)
    pipe = TextDiffusionPipeline(model or toy_model(), toy_tokenizer(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe():
    return pipe_of()


def row_of(text, prompt="", with_terminator=True):
    """The ids of a row, and how many of them are given."""
    given = [CLS, *(IDS[word] for word in prompt.split())]
    return [*given, *(IDS[word] for word in text.split()), *([SEP] if with_terminator else [])], len(given)


def log_probabilities(model, canvas, t=None):
    """[seq, vocab] of a model on a row, by softmax over all ids but the mask, which no text holds."""
    logits = raw_logits(model, canvas, t)
    logits[:, MASK] = -np.inf
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def pseudo_by_hand(model, row, given, t=None):
    total = 0.0
    for i in range(given, len(row)):
        total += log_probabilities(model, [*row[:i], MASK, *row[i + 1 :]], t)[i, row[i]]
    return total


def any_order_by_hand(model, row, given):
    """
    The bound in continuous time of a model that knows no time: the mean over all orders in which the tokens can be
    written of the sum of their log-probabilities, each given those before it (arXiv 2110.02037).
    """
    sums = []
    for order in itertools.permutations(range(given, len(row))):
        canvas, total = [*row[:given], *[MASK] * (len(row) - given)], 0.0
        for i in order:
            total += log_probabilities(model, canvas)[i, row[i]]
            canvas[i] = row[i]
        sums.append(total)
    return np.mean(sums)


# --- What the scores are ---


def unigram_model(shares):
    """A model that knows no context: its prediction is the shares of the words, everywhere."""
    model = toy_model(spread=0.0)
    bias = torch.full((8,), -torch.inf)
    bias[EMITTED] = torch.tensor(shares).log()
    bias[MASK] = 3.0  # which nobody writes, whatever the model says
    model.get_output_embeddings().bias.data.copy_(bias)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_of_independent_words_the_score_is_the_log_probability_and_ranks_by_it(method):
    """The bound is tight where words do not depend on each other: only which of them are masked is left to chance."""
    shares = dict(zip(EMITTED, [0.1, 0.05, 0.15, 0.7]))
    texts = ["c", "b", "a", "c c", "c a", "a a", "c c c c c", "b c c", "a b", "c b a"]
    scores = score(pipe_of(unigram_model([*shares.values()])), texts, method=method, num_draws=200)
    law = np.array([sum(math.log(shares[token]) for token in row_of(text)[0][1:]) for text in texts])
    assert (np.abs(scores.log_likelihoods - law) < 4 * np.array(scores.standard_errors) + 1e-4).all()
    assert max(scores.standard_errors) < (0.03 if method == "bound" else 1e-9)
    assert np.argsort(scores.log_likelihoods).tolist() == np.argsort(law).tolist()
    assert scores.tokens == [len(text.split()) + 1 for text in texts]


@pytest.mark.parametrize("with_terminator", [True, False])
@pytest.mark.parametrize("family", ["none", "layerwise", "prefix", "bert"])
def test_pseudo_log_likelihoods_are_those_of_one_masked_token_after_another(family, with_terminator):
    """A model that is told the time is told that at which one of the text's tokens is masked on average."""
    model = family_model(family)
    kwargs = {"method": "pseudo", "with_terminator": with_terminator}
    found = score(pipe_of(model), TEXTS, PROMPTS, **kwargs)
    for i, (text, prompt) in enumerate(zip(TEXTS, PROMPTS)):
        row, given = row_of(text, prompt, with_terminator)
        t = 1 / (len(row) - given) if family in ("layerwise", "prefix") else None
        assert found.log_likelihoods[i] == pytest.approx(pseudo_by_hand(model, row, given, t), rel=1e-4)
        assert found.tokens[i] == len(row) - given
    assert found.standard_errors == [0] * len(TEXTS)


@pytest.mark.parametrize("with_terminator", [True, False])
def test_the_bound_is_the_mean_over_all_orders_of_writing(with_terminator):
    model, texts, prompts = toy_model(), ["a b c", "c", "b a", "c c b a"], ["", "a", "c b", ""]
    found = score(pipe_of(model), texts, prompts, num_draws=400, with_terminator=with_terminator)
    for text, prompt, value, error, tokens in zip(
        texts, prompts, found.log_likelihoods, found.standard_errors, found.tokens
    ):
        exact = any_order_by_hand(model, *row_of(text, prompt, with_terminator))
        assert abs(value - exact) < 4 * error + 1e-4
        assert error < abs(exact) / 40
        if tokens > 2:
            assert error > 1e-4
        if tokens == 1:  # there is one order, and both are the log-probability
            row, given = row_of(text, prompt, with_terminator)
            assert value == pytest.approx(pseudo_by_hand(model, row, given), rel=1e-4)


def test_what_reads_like_a_special_token_is_scored_as_in_a_corpus(pipe):
    texts = ["a [MASK] b", "[SEP] c"]
    bounds = [likelihood_bound(pipe, [text], packing=False, max_length=32) for text in texts]
    assert score(pipe, texts).tokens == [bound.tokens for bound in bounds]


def test_likelier_texts_score_higher_than_unlikely_ones_of_their_length(pipe):
    """All texts of two words, by the mean over the orders of writing them: ranked alike, errors apart."""
    texts = [" ".join(words) for words in itertools.product("abc", repeat=2)]
    exact = np.array([any_order_by_hand(pipe.model, *row_of(text)) for text in texts])
    found = score(pipe, texts, num_draws=200)
    values, errors = np.array(found.log_likelihoods), np.array(found.standard_errors)
    clear = np.abs(exact[:, None] - exact) > 4 * np.hypot(errors[:, None], errors)
    assert clear.mean() > 0.5
    assert ((values[:, None] > values) == (exact[:, None] > exact))[clear].all()


# --- What they agree with ---


@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
@pytest.mark.parametrize("family", ["none", "layerwise"])
def test_the_bound_of_a_text_is_that_of_a_corpus_of_it_alone(family, schedule):
    """With the same noise: not as near as the errors allow, but the same."""
    pipe = pipe_of(family_model(family), schedule)
    found = score(pipe, TEXTS, num_draws=6)
    for text, value, error, tokens in zip(TEXTS, found.log_likelihoods, found.standard_errors, found.tokens):
        bound = likelihood_bound(pipe, [text], packing=False, num_draws=6, max_length=32)
        assert value == pytest.approx(-bound.nats_per_token * bound.tokens, rel=1e-5)
        assert error == pytest.approx(bound.standard_error * bound.tokens, rel=1e-4)
        assert tokens == bound.tokens


@pytest.mark.parametrize("with_terminator", [True, False])
def test_the_bounds_of_texts_with_beginnings_sum_to_that_of_their_rows(pipe, with_terminator):
    found = score(pipe, TEXTS, PROMPTS, num_draws=4, with_terminator=with_terminator)
    ids, lengths = zip(*(row_of(*pair, with_terminator) for pair in zip(TEXTS, PROMPTS)))
    rows = Dataset.from_dict({"input_ids": [*ids], "prompt_length": [*lengths]})
    bound = likelihood_bound(pipe, rows, num_draws=4, max_length=32)
    assert sum(found.log_likelihoods) == pytest.approx(-bound.nats_per_token * bound.tokens, rel=1e-5)
    assert np.linalg.norm(found.standard_errors) == pytest.approx(bound.standard_error * bound.tokens, rel=1e-4)
    assert sum(found.tokens) == bound.tokens


@pytest.mark.parametrize("method", METHODS)
def test_scores_depend_on_the_text_alone(pipe, method):
    """Not on the others, their order, or how many go through the model at once; copies have the same."""
    texts, prompts = [*TEXTS, *TEXTS], [*PROMPTS, *[""] * len(TEXTS)]
    found = score(pipe, texts, prompts, method=method, num_draws=4)
    alone = [score(pipe, [text], [prompt], method=method, num_draws=4) for text, prompt in zip(texts, prompts)]
    order = np.random.default_rng(0).permutation(len(texts))
    for batch_size in (1, 3, 100):
        shuffled = score(
            pipe,
            [texts[i] for i in order],
            [prompts[i] for i in order],
            method=method,
            num_draws=4,
            batch_size=batch_size,
        )
        for name in ("log_likelihoods", "standard_errors", "tokens"):
            expected = np.array(getattr(found, name))
            np.testing.assert_allclose(getattr(shuffled, name), expected[order], rtol=1e-4, atol=1e-5)
            singly = [getattr(one, name)[0] for one in alone]
            np.testing.assert_allclose(singly, expected, rtol=1e-4, atol=1e-5)
    copies = score(pipe, ["a b c"] * 5, method=method, num_draws=4, batch_size=2).log_likelihoods
    np.testing.assert_allclose(copies, copies[0], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_without_dropout_and_without_leaving_the_training_mode(method):
    model = toy_model(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    pipe = pipe_of(model)
    expected = score(pipe, TEXTS, method=method, num_draws=4).log_likelihoods
    model.train()
    np.testing.assert_allclose(score(pipe, TEXTS, method=method, num_draws=4).log_likelihoods, expected, rtol=1e-5)
    assert model.training


# --- Beginnings and ends ---


@pytest.mark.parametrize("method", METHODS)
def test_a_beginning_is_given_and_not_scored(pipe, method):
    """What follows depends on it; by the chain rule, of writing in any order, it costs nothing itself."""
    alone = score(pipe, ["a", "a b"], method=method, num_draws=64)
    behind = score(pipe, ["a", "a b"], ["c c", "b"], method=method, num_draws=64)
    assert behind.tokens == alone.tokens == [2, 3]
    assert all(abs(x - y) > 1e-3 for x, y in zip(behind.log_likelihoods, alone.log_likelihoods))
    for prompts in (None, ["", ""]):
        same = score(pipe, ["a", "a b"], prompts, method=method, num_draws=64)
        assert same == alone
    # An unlikely beginning takes nothing off: words that know nothing of each other score as without it.
    unigrams = pipe_of(unigram_model([0.1, 0.001, 0.15, 0.749]))
    values = score(unigrams, ["c b", "c b"], ["a a a", "c"], method=method, num_draws=400).log_likelihoods
    law = math.log(0.749) + math.log(0.15) + math.log(0.1)
    np.testing.assert_allclose(values, law, atol=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_the_terminator_is_scored_where_the_text_ends(pipe, method):
    """The model sees a row with or without it; where it is almost never written, an end costs that much more."""
    ends, goes_on = (score(pipe, TEXTS, method=method, num_draws=4, with_terminator=end) for end in (True, False))
    assert [x - y for x, y in zip(ends.tokens, goes_on.tokens)] == [1] * len(TEXTS)
    unigrams = pipe_of(unigram_model([1e-6, 0.2, 0.3, 0.499999]))
    ends, goes_on = (
        score(unigrams, TEXTS, method=method, num_draws=200, with_terminator=end) for end in (True, False)
    )
    differences = np.subtract(goes_on.log_likelihoods, ends.log_likelihoods)
    errors = np.hypot(goes_on.standard_errors, ends.standard_errors)
    assert (np.abs(differences + math.log(1e-6)) < 4 * errors + 1e-3).all()
    assert errors.max() < 1


def test_a_tokenizer_without_a_terminator_ends_texts_in_no_way():
    tokenizer = toy_tokenizer()
    tokenizer.sep_token = None
    pipe = TextDiffusionPipeline(toy_model(), tokenizer, AbsorbingStateScheduler())
    ends, goes_on = (score(pipe, TEXTS, num_draws=4, with_terminator=end) for end in (True, False))
    assert ends == goes_on
    assert ends.tokens == [len(text.split()) for text in TEXTS]


# --- Errors ---


@pytest.mark.parametrize(
    ("texts", "prompts", "kwargs", "message"),
    [
        (["a", "b"], ["c"], {}, "`prompts` must be one for each text, got 1 for 2"),
        (["a"], [], {}, "`prompts` must be one for each text, got 0 for 1"),
        (["a"], None, {"method": "exact"}, r"`method` must be one of \['bound', 'pseudo'\], got 'exact'"),
        (
            ["a"],
            None,
            {"num_draws": 5},
            "`num_draws` must be an even number of at least 4, for a standard error, got 5",
        ),
        (
            ["a"],
            None,
            {"num_draws": 2},
            "`num_draws` must be an even number of at least 4, for a standard error, got 2",
        ),
        (["a"], None, {"num_draws": 0}, "`num_draws` must be an integer >= 1, got 0"),
        (["a"], None, {"batch_size": 0}, "`batch_size` must be an integer >= 1, got 0"),
        (["a"], None, {"batch_size": 1.5}, "`batch_size` must be an integer >= 1, got 1.5"),
        (["a", "", "b"], None, {}, "Text 1 has no tokens to score"),
        (["a", " \n"], ["b", "b"], {}, "Text 1 has no tokens to score"),
        (["a", "a " * 31], None, {}, "Text 1 has 33 tokens, the model takes at most 32"),
        (["a " * 11], ["b " * 20], {}, "Text 0 has 33 tokens, the model takes at most 32"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(pipe, texts, prompts, kwargs, message):
    calls = []
    pipe.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for method in METHODS:
        with pytest.raises(ValueError, match=message):
            score(pipe, texts, prompts, **{"method": method, **kwargs})
    assert not calls


@pytest.mark.parametrize("method", METHODS)
def test_strategies_whose_texts_have_no_likelihood_score_nothing(pipe, method):
    pipe.scheduler = ConfidenceUnmaskingScheduler()
    with pytest.raises(ValueError, match="`pipe.scheduler` is a ConfidenceUnmaskingScheduler, whose texts have no"):
        score(pipe, ["a"], method=method)


@pytest.mark.parametrize("method", METHODS)
def test_texts_as_long_as_the_model_takes_are_scored(pipe, method):
    long = score(pipe, ["a " * 30, "a " * 10], ["", "b " * 20], method=method, num_draws=4)
    assert long.tokens == [31, 11]
    fits = score(pipe, ["a " * 31], method=method, num_draws=4, with_terminator=False)
    assert fits.tokens == [31]
    assert all(math.isfinite(value) for value in [*long.log_likelihoods, *fits.log_likelihoods])


def test_a_bound_that_is_not_finite_is_an_error():
    model = toy_model()
    model.get_output_embeddings().bias.data[7] = -torch.inf
    with pytest.raises(FloatingPointError, match="is not finite"):
        score(pipe_of(model), ["a", "c"], num_draws=4)
