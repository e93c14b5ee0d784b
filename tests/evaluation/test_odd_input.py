"""Input at the edges, of every part of the evaluation."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from toys import CLS, PAD, SEP, toy_model, toy_tokenizer
from transformers import PreTrainedTokenizerFast
from writing import passes_of

from diffusers_text import (
    AbsorbingStateScheduler,
    TextDiffusionPipeline,
    generative_perplexity,
    likelihood_bound,
    score,
)
from diffusers_text.evaluation.corpus import TEXTS_AT_ONCE, encode_corpus
from diffusers_text.evaluation.lm_harness import TextDiffusionLM
from diffusers_text.evaluation.quality import spelled_by


def pipe_of(scheduler=None, tokenizer=None, seed=1):
    pipe = TextDiffusionPipeline(toy_model(seed), tokenizer or toy_tokenizer(), scheduler or AbsorbingStateScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def written(lm, context, **settings):
    requests = [Instance(request_type="generate_until", doc={}, arguments=(context, settings), idx=0)]
    return lm.generate_until(requests)[0]


def test_a_text_ends_with_its_terminator(tmp_path):
    """Seed 2: [CLS] a c [SEP] c c [SEP] [SEP]. The pipeline's text is "a c"."""
    pipe_of(seed=2).save_pretrained(tmp_path)
    lm = TextDiffusionLM(str(tmp_path))
    expected = lm.greedy_pipe(input_ids=torch.tensor([[CLS, 5]]), gen_length=6).texts[0]
    assert "a " + written(lm, "a", max_gen_toks=6) == expected


def test_of_overlapping_stop_strings_the_first_ends_the_text(tmp_path):
    """The text is "c b c c ...": "c b" begins before "b c", which cuts its end off if it is looked for first."""
    pipe = pipe_of(seed=5)
    pipe.model.get_output_embeddings().bias.data[SEP] -= 50
    pipe.save_pretrained(tmp_path)
    lm = TextDiffusionLM(str(tmp_path))
    assert written(lm, "c b a", max_gen_toks=10).startswith("c b c")
    for stops in (["c b", "b c"], ["b c", "c b"]):
        assert written(lm, "c b a", max_gen_toks=10, until=stops) == ""


@pytest.mark.parametrize("alias", ["max_new_tokens", "max_tokens"])
def test_other_names_for_the_length(tmp_path, alias):
    """lm_eval.models.utils.normalize_gen_kwargs; catalan_bench and noreval tasks use max_new_tokens."""
    pipe_of().save_pretrained(tmp_path)
    lm = TextDiffusionLM(str(tmp_path), max_gen_toks=20)
    assert written(lm, "a", **{alias: 4}) == written(lm, "a", max_gen_toks=4)


def test_a_context_that_fits_is_not_cut(tmp_path):
    """[CLS], 21 words and 10 new ones are 32 tokens, which the model takes."""
    pipe_of().save_pretrained(tmp_path)
    lm = TextDiffusionLM(str(tmp_path))
    seen = passes_of(lm.pipe.model)
    written(lm, " ".join("abc" * 7), max_gen_toks=10)
    assert all(len(row) == 32 for rows in seen for row in rows)


def test_one_text_is_no_list_of_texts():
    """A string is a sequence of texts of a letter each, which nobody means."""
    pipe = pipe_of()
    for call in (
        lambda: encode_corpus("a b c", pipe.tokenizer, 8),
        lambda: likelihood_bound(pipe, "a b c", num_draws=4),
        lambda: score(pipe, "ab", num_draws=4),
        lambda: score(pipe, ["a", "b"], "cc", num_draws=4),
    ):
        with pytest.raises(ValueError, match="must be a list of texts, got one text"):
            call()


def test_padding_is_no_part_of_a_row_that_says_so():
    """Padding may be done with the terminator, which is scored elsewhere."""
    rows = [[CLS, 5, 6, SEP], [CLS, 7, 5, 6, 7, SEP]]
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = "[SEP]"
    padded = [row + [SEP] * (8 - len(row)) for row in rows]
    masks = [[int(i < len(row)) for i in range(8)] for row in rows]
    dataset = Dataset.from_dict({"input_ids": padded, "attention_mask": masks})
    assert encode_corpus(dataset, tokenizer, 8).tokens == 8


def test_the_model_does_not_attend_to_padding():
    rows = [[CLS, 5, 6, SEP], [CLS, 7, 5, 6, 7, SEP]]
    padded = [row + [PAD] * (8 - len(row)) for row in rows]
    masks = [[int(i < len(row)) for i in range(8)] for row in rows]
    bounds = [
        likelihood_bound(pipe_of(), Dataset.from_dict(columns), max_length=8, num_draws=1000)
        for columns in ({"input_ids": rows}, {"input_ids": padded, "attention_mask": masks})
    ]
    error = np.hypot(bounds[0].standard_error, bounds[1].standard_error)
    assert abs(bounds[0].nats_per_token - bounds[1].nats_per_token) < 4 * error


def test_keys_do_not_depend_on_order_where_beginnings_differ():
    """The same ids with two prompt lengths are no copies of each other."""
    row = [CLS, 5, 6, 7, 5, 6, 7, SEP]
    values = [
        likelihood_bound(
            pipe_of(),
            Dataset.from_dict({"input_ids": [row, row], "prompt_length": lengths}),
            max_length=8,
            num_draws=4,
        ).nats_per_token
        for lengths in ([1, 4], [4, 1])
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_the_error_names_how_many_tokens_fit_without_a_terminator():
    backend = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, "a": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )
    assert len(encode_corpus(["a a a a"], tokenizer, 4, packing=False, long_texts="error").rows) == 1
    with pytest.raises(ValueError, match="with 5 tokens of 4"):
        encode_corpus(["a a a a a"], tokenizer, 4, packing=False, long_texts="error")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_device_that_the_command_line_passes_by_itself(tmp_path):
    """`lm_eval run` without --device passes "cuda:0"; its own models then take the CPU where there is none."""
    pipe_of().save_pretrained(tmp_path)
    assert TextDiffusionLM(str(tmp_path), device="cuda:0").pipe.device.type == "cpu"


@pytest.mark.parametrize("max_length", [-1, 0, 2.5])
def test_max_length_is_checked(max_length):
    from transformers import GPT2Config, GPT2LMHeadModel

    judge = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="`max_length` must be"):
        generative_perplexity(["a b c"], judge, toy_tokenizer(), max_length=max_length)


def test_no_texts_are_spelled_as_none():
    assert spelled_by(toy_tokenizer(), []) == []


def test_words_of_all_parts_that_the_tokenizer_gets_are_counted():
    corpus = encode_corpus(["a b"] * (TEXTS_AT_ONCE + 1), toy_tokenizer(), 8)
    assert (corpus.words, corpus.texts) == (2 * (TEXTS_AT_ONCE + 1), TEXTS_AT_ONCE + 1)


def test_a_length_of_none_is_none_and_every_name_of_it_is_known(tmp_path):
    pipe_of().save_pretrained(tmp_path)
    lm = TextDiffusionLM(str(tmp_path), max_gen_toks=4, batch_size="auto:4")
    expected = written(lm, "a", max_gen_toks=4)
    assert written(lm, "a", max_gen_toks=None) == written(lm, "a", max_completion_tokens=4) == expected
    assert lm.loglikelihood([]) == []


def test_a_temperature_without_do_sample_is_one(tmp_path):
    pipe_of().save_pretrained(tmp_path)

    def texts(**settings):
        lm = TextDiffusionLM(str(tmp_path), seed=3)
        return [written(lm, "a", max_gen_toks=8, **settings) for _ in range(6)]

    assert texts(temperature=1.0) == texts(temperature=1.0, do_sample=True) != texts()
    assert texts(temperature=1.0, do_sample=False) == texts()


def test_a_text_of_one_token_that_nothing_precedes_is_counted():
    from transformers import GPT2Config, GPT2LMHeadModel

    judge = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    found = generative_perplexity(["a b c", "a", ""], judge, toy_tokenizer())
    assert (found["tokens"], found["empty_texts"]) == (2, 2)


def test_keys_do_not_depend_on_order_where_segments_differ():
    row, segments = [CLS, 5, 6, 7, 5, 6, 7, SEP], ([0] * 8, [0] * 4 + [1] * 4)
    values = []
    for types in (segments, segments[::-1]):
        rows = Dataset.from_dict({"input_ids": [row, row], "token_type_ids": [*types]})
        values.append(likelihood_bound(pipe_of(seed=5), rows, max_length=8, num_draws=4).nats_per_token)
    assert values[0] == pytest.approx(values[1], rel=1e-5)
