"""Text from a source: pairs with token types, as a model is trained on them."""

import pytest
import torch
from toys import CLS, COUNTS, MASK, SEP, seeded, toy_model, toy_tokenizer
from transformers import RobertaConfig, RobertaForMaskedLM

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

A, B, C = 5, 6, 7


def pipeline(model=None, **kwargs):
    tokenizer = toy_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's
    pipe = TextDiffusionPipeline(model or toy_model(), tokenizer, AbsorbingStateScheduler(**kwargs))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seen_inputs(pipe, **kwargs):
    """What the model is given in a call, and what the call gives."""
    seen = []
    hook = pipe.model.register_forward_pre_hook(lambda module, args, inputs: seen.append(inputs), with_kwargs=True)
    output = pipe(**kwargs, generator=seeded())
    hook.remove()
    return seen, output


def test_the_canvas_is_a_pair_and_the_text_its_second_part():
    seen, output = seen_inputs(pipeline(), source="a b", prompt="c", gen_length=3)
    assert seen[0]["input_ids"].tolist() == [[CLS, A, B, SEP, C, MASK, MASK, MASK, SEP]]
    assert seen[0]["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1]]
    assert output.sequences[0][:5].tolist() == [CLS, A, B, SEP, C]
    new = [i for i in output.sequences[0][5:-1].tolist()]
    new = new[: new.index(SEP)] if SEP in new else new
    assert output.texts[0].split() == ["c", *("abc"[i - A] for i in new)]


def test_without_a_prompt_the_text_has_the_default_length():
    seen, output = seen_inputs(pipeline(gen_length=2), source=["a b", "c"])
    assert [len(sequence) for sequence in output.sequences] == [7, 6]
    assert seen[0]["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0]]
    assert all(set(text.split()) <= {"a", "b", "c"} for text in output.texts)


@pytest.mark.parametrize("kwargs", [{}, {"schedule": "spindle", "token_counts": COUNTS}])
@pytest.mark.parametrize("call", [{}, {"guidance_scale": 2.0}, {"block_length": 2}])
def test_a_batch_of_sources_gives_each_its_text_alone(kwargs, call):
    pipe = pipeline(**kwargs)
    sources, generators = ["a b c a", "b"], [seeded(1), seeded(2)]
    texts = pipe(source=sources, gen_length=4, generator=generators, **call).texts
    for source, text, seed in zip(sources, texts, (1, 2)):
        assert pipe(source=source, gen_length=4, generator=seeded(seed), **call).texts == [text]


def test_ids_with_token_types_give_what_a_source_gives():
    pipe = pipeline()
    ids, types = torch.tensor([[CLS, A, B, SEP, SEP]]), torch.tensor([[0, 0, 0, 0, 1]])
    by_ids = pipe(input_ids=ids, token_type_ids=types, gen_length=4, generator=seeded(), output_type="seq")
    by_text = pipe(source="a b", gen_length=4, generator=seeded())
    assert by_ids.sequences[0].tolist() == by_text.sequences[0].tolist()


def test_token_types_reach_the_prediction():
    """Greedily, and with a spindle whose states are kept, the text is that of the model's own logits."""
    for kwargs in ({}, {"schedule": "spindle", "token_counts": COUNTS, "tilt": False}):
        model = toy_model()
        pipe = pipeline(model, **kwargs)
        output = pipe(source="a b", gen_length=1, temperature=0, generator=seeded())
        canvas = output.sequences[0][None].clone()
        canvas[0, 4] = MASK
        types = torch.tensor([[0, 0, 0, 0, 1, 1]])
        with torch.no_grad():
            logits = model(canvas, token_type_ids=types).logits[0, 4]
        logits[[0, 1, 2, MASK]] = -torch.inf
        assert output.sequences[0][4] == logits.argmax()


def test_a_model_without_token_types_gets_none():
    config = RobertaConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        pad_token_id=0,
        type_vocab_size=1,
    )
    pipe = pipeline(RobertaForMaskedLM(config).eval())
    pipe.tokenizer.model_input_names = ["input_ids", "attention_mask"]
    seen, output = seen_inputs(pipe, source="a b", gen_length=3)
    assert "token_type_ids" not in seen[0]
    assert output.sequences[0][:4].tolist() == [CLS, A, B, SEP]
    assert len(output.texts[0].split()) <= 3


def test_a_source_stays_out_of_the_text_whatever_the_tokenizer_adds():
    pipe = pipeline()
    pipe.tokenizer.backend_tokenizer.post_processor = None
    output = pipe(source="a b c", gen_length=2, num_texts_per_prompt=20, generator=seeded())
    assert {len(text.split()) for text in output.texts} <= {0, 1, 2}
    assert all(sequence[:3].tolist() == [A, B, C] for sequence in output.sequences)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"source": "a", "input_ids": torch.tensor([[CLS, SEP]])}, "either `source` or `input_ids`"),
        ({"source": "a", "prompt": ["b", "c"]}, "`source` has one text for the 2 of `prompt`"),
        ({"source": ["a"], "prompt": ["b", "c"]}, "`source` has 1 texts for the 2 of `prompt`"),
        ({"source": []}, "`source` is an empty list"),
        ({"source": 3}, "`source` must be a string or a list of strings, got 3"),
        ({"token_type_ids": torch.tensor([[0, 0]])}, "`token_type_ids` goes with `input_ids`"),
        (
            {"input_ids": torch.tensor([[CLS, MASK, SEP]]), "token_type_ids": torch.tensor([[0, 0]])},
            r"`token_type_ids` goes with `input_ids` and must be a tensor of its shape, got \[1, 2\]",
        ),
    ],
)
def test_wrong_sources_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        pipeline()(**call)
