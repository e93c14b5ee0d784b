"""Classifier-free guidance, with every scheduler."""

import numpy as np
import pytest
import torch
from toys import CLS, EMITTED, MASK, SEP, UNK, assert_follows, seeded, toy_model
from writing import (
    INF,
    PAIRS,
    SAMPLES,
    WORDS,
    any_order_law,
    build,
    family_model,
    lists,
    one_each,
    passes_of,
    raw_logits,
)


def guided_logits(model, canvas, column, scale, given, t=None):
    unprompted = [MASK if i in given else token for i, token in enumerate(canvas)]
    prompted, unprompted = (raw_logits(model, row, t)[column] for row in (canvas, unprompted))
    return unprompted + scale * (prompted - unprompted)


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_guidance_equals_its_formula(kind, family):
    ids = [CLS, 5, SEP, UNK, MASK, 6, SEP]
    differs = 0
    for seed in range(6, 10):  # toys whose most probable token depends on the scale
        model = family_model(family, seed)
        pipe = build(kind, model)
        t = 1.0 if family in ("layerwise", "prefix") else None
        greedy = {}
        for scale in (0.0, 0.5, 1.0, 4):
            out = pipe(
                input_ids=torch.tensor([ids]),
                temperature=0.0,
                guidance_scale=scale,
                num_inference_steps=1,
                generator=seeded(),
            )
            logits = guided_logits(model, ids, 4, scale, given=(1, 3, 5), t=t)
            greedy[scale] = WORDS[logits[WORDS].argmax()]
            assert lists(out)[0] == [CLS, 5, SEP, UNK, greedy[scale], 6, SEP]
        differs += len(set(greedy.values())) > 1
    assert differs  # otherwise the scale would be seen to do nothing


def test_guided_samples_follow_their_law(kind):
    model = toy_model(3)
    out = build(kind, model)(
        "a [MASK] b", guidance_scale=2.0, num_texts_per_prompt=SAMPLES // 2, generator=seeded(), output_type="seq"
    )
    logits = guided_logits(model, [CLS, 5, MASK, 6, SEP], 2, 2.0, given=(1, 3))[WORDS]
    p = np.exp(logits) / np.exp(logits).sum()
    assert_follows([sequence[2:3] for sequence in lists(out)], {(token,): p[i] for i, token in enumerate(WORDS)})


def test_guidance_masks_the_prompt_and_not_what_was_written():
    """A continuation and a gap at once, one token at a time: by enumeration."""
    model = toy_model()

    def predict(canvas, column):
        logits = guided_logits(model, canvas, column, 1.8, given=(1,))
        emitted = WORDS if column == 2 else EMITTED
        p = np.zeros(8)
        p[emitted] = np.exp(logits[emitted])
        return p / p.sum()

    out = build(model=model)(
        "b [MASK]",
        gen_length=1,
        guidance_scale=1.8,
        num_texts_per_prompt=SAMPLES,
        generator=seeded(),
        output_type="seq",
    )
    assert_follows(lists(out), any_order_law(predict, [CLS, 6, MASK, MASK, SEP]))


def test_scale_one_is_no_guidance_and_costs_one_pass(pipe):
    embedded = []
    pipe.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: embedded.append(len(args[0])))
    arguments = {"prompt": ["a [MASK]", "b b"], "gen_length": 5, "block_length": 2}
    results = []
    for scale in ({}, {"guidance_scale": 1.0}, {"guidance_scale": 1}, {"guidance_scale": 1.0001}):
        embedded.clear()
        sequences = lists(pipe(**arguments, **scale, generator=one_each(2)))
        results.append((sequences, list(embedded)))
    assert results[0] == results[1] == results[2]
    assert results[3][0] == results[0][0]
    assert sum(results[3][1]) == 2 * sum(results[0][1])


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_guided_batch_of_unequal_prompts_equals_each_alone(kind, family):
    pipe = build(kind, family_model(family))
    prompts = ["a", "b [MASK] c a b", "[MASK] c", "a b c a b c [MASK] a"]
    arguments = {"gen_length": 4, "guidance_scale": 2.5}
    for more in ({"temperature": 0.0}, {"block_length": 2}):
        together = lists(pipe(prompts, generator=one_each(4), **arguments, **more))
        for i, prompt in enumerate(prompts):
            assert lists(pipe(prompt, generator=[seeded(i)], **arguments, **more))[0] == together[i]


def test_guidance_changes_texts_and_keeps_given_ids(pipe):
    prompts = ["a [MASK] [MASK] b [MASK]", "c [MASK]"]
    texts = []
    for scale in (1.0, 4.0):
        out = pipe(prompts * 10, guidance_scale=scale, generator=one_each(20))
        for i, sequence in enumerate(lists(out)):
            ids = pipe.tokenizer(prompts[i % 2]).input_ids
            assert all(new in WORDS if old == MASK else new == old for new, old in zip(sequence, ids))
        texts.append(out.texts)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("scale", [float("nan"), -0.1, INF, -INF, True, "2", None])
def test_wrong_guidance_is_named_before_any_work(scale):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match="`guidance_scale` must be"):
        pipe("a [MASK]", guidance_scale=scale)
    assert calls == []


@pytest.mark.parametrize("prompt", [None, "", "[MASK] [MASK]", ["", "[MASK]"]])
def test_guidance_needs_a_prompt(prompt):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match="`guidance_scale` 2.*prompt"):
        pipe(prompt, gen_length=3, guidance_scale=2.0)
    assert calls == []
