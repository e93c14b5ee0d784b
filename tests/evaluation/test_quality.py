"""Measures of generated texts by hand, and the perplexity under a judge that is asked one token at a time."""

import math
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from toys import SPECIALS, toy_model, toy_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline, generation_metrics, generative_perplexity
from diffusers_text.evaluation.quality import spelled_by, split_words

LIMIT = 16  # tokens that the judge takes
IDS = {"a": 5, "b": 6, "c": 7}
BOS = 2  # [CLS], where the tokenizer is told that texts begin with it
TEXTS = ["a b", "c", "", "a a c b a", "b", "c c c c c c c c c", "", "b a c"]


# --- Measures ---


def test_measures_by_hand():
    texts = ["a b a b a b", "c c d"]
    found = generation_metrics(texts, references=["a b a b a b"])
    # Of 9 words 6 are found, of 7 pairs 5, of 5 triples 4 and of 4-grams, nltk counting one for each text, 3 of 4.
    bleu = math.exp(1 - 12 / 9) * (6 / 9 * 5 / 7 * 4 / 5 * 3 / 4) ** 0.25
    entropy = (math.log(2) + 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3)) / 2
    assert found == {
        "bleu": 0.5,  # of a text that is the reference, and of one that has no word of it
        "corpus_bleu": pytest.approx(bleu),
        "self_bleu": 0,  # no word in common
        "distinct_1": pytest.approx(4 / 9),
        "distinct_2": pytest.approx(4 / 7),
        "distinct_3": pytest.approx(3 / 5),
        "distinct_4": pytest.approx(2 / 3),
        "div_4": pytest.approx(2 / 3),
        "repetition_4": pytest.approx((1 / 3 + 0) / 2),
        "entropy": pytest.approx(entropy),
        "unique": 1,
        "length_mean": 4.5,
        "length_std": pytest.approx(math.sqrt((1.5**2 + 1.5**2) / 1)),  # of a sample
        "length_min": 3,
        "length_max": 6,
        "num_texts": 2,
        "num_references": 1,
    }
    alone = generation_metrics(texts)
    of_references = ("bleu", "corpus_bleu", "num_references")
    assert alone == {name: value for name, value in found.items() if name not in of_references}


def test_the_texts_of_a_prompt_stand_side_by_side():
    """Copies of each other if they belong to one prompt, of which half the 4-grams are new; else all are."""
    first, second = "a b c d e", "f g h i j"
    together = generation_metrics([first, first, second, second], texts_per_prompt=2)
    apart = generation_metrics([first, second, first, second], texts_per_prompt=2)
    assert (together["div_4"], apart["div_4"]) == (0.5, 1)
    assert together["distinct_4"] == apart["distinct_4"] == 0.5
    assert generation_metrics([first, first, second, second])["div_4"] == 0.5  # one prompt
    assert generation_metrics([first, first, second, second], texts_per_prompt=1)["div_4"] == 1
    # The mean over prompts, not over their n-grams: 2 of 4 and 1 of 1.
    uneven = generation_metrics([first, first, "f g h i", "f"], texts_per_prompt=2)
    assert uneven["div_4"] == (0.5 + 1) / 2


def test_texts_are_the_same_if_all_of_their_characters_are():
    found = generation_metrics(["a b", "a b", "a  b", "b a"])
    assert found["unique"] == 3 / 4
    assert found["distinct_2"] == 2 / 4


def test_words_are_runs_of_letters_and_single_marks():
    assert split_words("We don't agree: 3.5 -- naïve!\n") == [
        *("We", "don", "'", "t", "agree", ":", "3", ".", "5", "-", "-", "naïve", "!"),
    ]
    texts = ["No, no.", "yes"]
    assert generation_metrics(texts)["length_max"] == 4
    found = generation_metrics(texts, references=["No, no."], split=str.split)
    assert found["length_max"] == 2
    assert found["distinct_1"] == 1
    # References are split in the same way: words and a pair are found in them, but too few words for more.
    by_marks = generation_metrics(["No, no.", "no"], references=["No, no."])
    assert 0 < found["bleu"] < 1e-70 < by_marks["bleu"]


@pytest.mark.parametrize(
    ("texts", "kwargs", "message"),
    [
        ([], {}, "`texts` must be two at least, got 0"),
        (["a b"], {}, "`texts` must be two at least, got 1"),
        (["a"] * 4, {"texts_per_prompt": 3}, "`texts_per_prompt` 3 does not divide the number of texts, 4"),
        (["a"] * 4, {"texts_per_prompt": 8}, "`texts_per_prompt` 8 does not divide the number of texts, 4"),
        (["a"] * 4, {"texts_per_prompt": 0}, "`texts_per_prompt` must be an integer >= 1, got 0"),
        (["a"] * 4, {"texts_per_prompt": 2.0}, "`texts_per_prompt` must be an integer >= 1, got 2.0"),
        (["a"] * 4, {"references": []}, "must hold a text each at least"),
    ],
)
def test_wrong_arguments_of_the_measures_are_named(texts, kwargs, message):
    with pytest.raises(ValueError, match=message):
        generation_metrics(texts, **kwargs)


# --- Spelling ---


def lower_casing_tokenizer():
    """In the manner of BERT: no upper case, marks apart, pieces of words joined again."""
    vocabulary = [*SPECIALS, "yes", "no", "agree", "##ment", ",", ".", "'", "t", "don"]
    backend = Tokenizer(WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ("pad", "unk", "cls", "sep", "mask")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in zip(names, SPECIALS)}
    )


def test_references_are_spelled_as_the_model_would_write_them():
    tokenizer = lower_casing_tokenizer()
    texts = ["Yes , No .", "NO   agreement, don't.\n", "", "agree"]
    spelled = spelled_by(tokenizer, texts)
    assert spelled == ["yes, no.", "no agreement, don ' t.", "", "agree"]
    assert spelled_by(tokenizer, spelled) == spelled
    assert spelled_by(tokenizer, ["Yes zebra."]) == ["yes."]  # no model writes that a word is unknown
    pipe = TextDiffusionPipeline(toy_model(vocab_size=14), tokenizer, AbsorbingStateScheduler())
    pipe.set_progress_bar_config(disable=True)
    assert pipe(texts).texts == spelled  # nothing is masked: it gives back what it would have written


def test_references_are_not_cut():
    tokenizer = toy_tokenizer()
    long = " ".join("abc" * tokenizer.model_max_length)
    assert spelled_by(tokenizer, [long, "a"]) == [long, "a"]


# --- Perplexity ---


@pytest.fixture(scope="module")
def judge():
    """A random model whose predictions depend strongly on what came before."""
    torch.manual_seed(0)
    shape = {"vocab_size": 8, "n_positions": LIMIT, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, initializer_range=0.6, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(params=["with [CLS] at the beginning", "without a beginning"])
def start(request):
    return [BOS] if request.param.startswith("with ") else []


def tokenizer_with(start):
    tokenizer = toy_tokenizer()
    tokenizer.bos_token = "[CLS]" if start else None
    return tokenizer


def nats_of(judge, row):
    """Of each token but the first, given what stands before it and nothing else: the text is shown cut there."""
    values = []
    for i in range(1, len(row)):
        with torch.no_grad():
            logits = judge(input_ids=torch.tensor([row[:i]])).logits[0, -1].double()
        values.append(float(torch.logsumexp(logits, dim=0) - logits[row[i]]))
    return values


def rows_of(texts, start, max_length=None):
    rows = [(start + [IDS[word] for word in text.split()])[:max_length] for text in texts]
    return [row for row, text in zip(rows, texts) if text and len(row) > 1]


def entropy_of(row):
    shares = [row.count(token) / len(row) for token in set(row)]
    return -sum(share * math.log(share) for share in shares)


def by_hand(judge, texts, start, max_length=None):
    rows = rows_of(texts, start, max_length)
    nats = [value for row in rows for value in nats_of(judge, row)]
    return {
        "perplexity": pytest.approx(math.exp(np.mean(nats)), rel=1e-5),
        "nats_per_token": pytest.approx(np.mean(nats), rel=1e-5),
        "entropy": pytest.approx(np.mean([entropy_of(row[len(start) :]) for row in rows])),
        "tokens": len(nats),
        "empty_texts": sum(len(start) + len(text.split()) < 2 for text in texts),
    }


def test_perplexity_is_that_of_one_token_after_another(judge, start):
    found = generative_perplexity(TEXTS, judge, tokenizer_with(start))
    assert found == by_hand(judge, TEXTS, start)
    assert found["tokens"] == (21 if start else 21 - 6)
    assert found["empty_texts"] == (2 if start else 4)  # without a beginning, words that stand alone as well


def test_perplexity_does_not_depend_on_order_and_batches(judge, start):
    expected = by_hand(judge, TEXTS, start)
    texts = list(TEXTS)
    for seed, batch_size in enumerate((1, 2, 3, 100)):
        random.Random(seed).shuffle(texts)
        assert generative_perplexity(texts, judge, tokenizer_with(start), batch_size=batch_size) == expected


def test_long_texts_are_looked_at_up_to_max_length(judge, start):
    texts = ["a b c " * 20, "a b", "c a c a"]
    found = generative_perplexity(texts, judge, tokenizer_with(start), max_length=4)
    assert found == by_hand(judge, texts, start, max_length=4)
    assert found["tokens"] == 3 + (2 if start else 1) + 3


def test_a_text_that_the_judge_does_not_take_is_an_error_before_anything_is_run(judge, start):
    fits = " ".join("a" * (LIMIT - len(start)))
    assert generative_perplexity([fits], judge, tokenizer_with(start))["tokens"] == LIMIT - 1
    calls = []
    handle = judge.register_forward_pre_hook(lambda *_: calls.append(1))
    message = f"A text has {LIMIT + 1} tokens, the judge takes {LIMIT}: set `max_length`"
    with pytest.raises(ValueError, match=message):
        generative_perplexity(["b", fits + " a"], judge, tokenizer_with(start), batch_size=1)
    handle.remove()
    assert not calls
    found = generative_perplexity([fits + " a"], judge, tokenizer_with(start), max_length=LIMIT)
    assert found["tokens"] == LIMIT - 1


def test_texts_without_a_token_to_score_are_an_error(judge):
    for texts, start in (([], [BOS]), ([""], [BOS]), (["", ""], []), (["a", "b"], [])):
        with pytest.raises(ValueError, match=f"None of {len(texts)} texts has a token that the judge could score"):
            generative_perplexity(texts, judge, tokenizer_with(start))
    with pytest.raises(ValueError, match="`batch_size` must be an integer >= 1, got 0"):
        generative_perplexity(["a b"], judge, tokenizer_with([BOS]), batch_size=0)


def test_repetitive_texts_have_a_low_entropy(judge, start):
    """And a low perplexity under a judge that has learned that words come again: the one does not excuse the other."""
    repetitive, varied = ["a a a a a a", "b b b b b c"], ["a b c a b c", "c b a a b c"]
    entropies = [
        generative_perplexity(texts, judge, tokenizer_with(start))["entropy"] for texts in (repetitive, varied)
    ]
    assert entropies[0] == pytest.approx((0 + entropy_of("bbbbbc")) / 2)
    assert entropies[1] == pytest.approx(math.log(3))


def test_nothing_is_dropped_out_and_the_judge_is_left_as_it_was(judge):
    expected = by_hand(judge, TEXTS, [BOS])
    judge.train()
    try:
        assert generative_perplexity(TEXTS, judge, tokenizer_with([BOS])) == expected
        assert judge.training
    finally:
        judge.eval()


def test_a_progress_bar_counts_the_texts(judge):
    class Bar:
        def __init__(self, total):
            bars.append(self)
            self.total, self.n = total, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.closed = True

        def update(self, n=1):
            self.n += n

        def set_description(self, _):
            pass

    bars = []
    generative_perplexity(TEXTS, judge, tokenizer_with([BOS]), batch_size=4, progress_bar=Bar)
    assert [(bar.total, bar.n, bar.closed) for bar in bars] == [(6, 6, True)]
