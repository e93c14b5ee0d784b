"""What texts may not or must hold, with every scheduler."""

from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from toys import CLS, EMITTED, MASK, PAD, SEP, UNK, assert_follows, seeded, toy_model
from transformers import LogitsProcessor, LogitsProcessorList
from writing import (
    INF,
    SAMPLES,
    STEPS,
    WORDS,
    any_order_law,
    build,
    family_model,
    favouring,
    lists,
    passes_of,
    prediction,
    raw_logits,
    start_canvas,
)


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_suppressed_tokens_never_appear(kind, steps):
    pipe = build(kind)
    arguments = {"num_inference_steps": steps or STEPS[kind], "num_texts_per_prompt": 50, "generator": seeded()}
    for suppressed in ([6], [5, 7], [5, 6, SEP]):
        for more in ({}, {"block_length": 2}):
            out = pipe("[MASK]", gen_length=5, suppress_tokens=suppressed, **more, **arguments)
            for sequence in lists(out):
                assert not set(suppressed) & set(sequence[1:-1])
                assert MASK not in sequence


def completes(sequence, words, written):
    """Whether a bad word stands in a sequence, at least one of its tokens being a new one."""
    return any(
        sequence[i : i + len(word)] == word and any(written[i : i + len(word)])
        for word in words
        for i in range(len(sequence))
    )


BAD_WORDS = [
    [[6], [5, 5]],
    [[5, 6], [6, 5, 6], [5, 5, 5], [6, 6]],
]


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("bad_words", BAD_WORDS, ids=str)
def test_bad_words_are_never_completed(kind, bad_words, steps):
    pipe = build(kind)
    prompt = "a [MASK] [MASK] b [MASK] [MASK] b a [MASK]"
    canvas = start_canvas(pipe.tokenizer(prompt).input_ids, 8)
    unconstrained = []
    for more in ({}, {"block_length": 3}):
        arguments = {
            "prompt": prompt,
            "gen_length": 8,
            "num_inference_steps": steps or STEPS[kind],
            "num_texts_per_prompt": 25,
            **more,
        }
        out = pipe(**arguments, bad_words_ids=bad_words, generator=seeded())
        written = [token == MASK for token in canvas]
        assert not any(completes(sequence, bad_words, written) for sequence in lists(out))
        assert not any(MASK in sequence for sequence in lists(out))
        unconstrained += lists(pipe(**arguments, generator=seeded()))
    assert any(completes(sequence, bad_words, written) for sequence in unconstrained)


@pytest.mark.parametrize(
    "settings",
    [
        {"criterion": "margin"},
        {"criterion": "entropy", "position_temperature": 2.0},
        {"rule": "threshold", "threshold": 0.0},
        {"rule": "threshold", "threshold": 0.6},
        {"rule": "entropy_bound", "entropy_bound": 2.0},
    ],
    ids=str,
)
def test_bad_words_with_every_rule_of_confidence(settings):
    pipe = build("confidence", **settings)
    for bad_words in BAD_WORDS:
        out = pipe("a [MASK] [MASK] b", gen_length=9, bad_words_ids=bad_words, num_texts_per_prompt=100)
        written = [False, False, True, True, False, *[True] * 9, False]
        assert not any(completes(sequence, bad_words, written) for sequence in lists(out))


@pytest.mark.parametrize("settings", [{"strategy": s, "eta": 0.8} for s in ("cap", "rescale", "confidence", "loop")])
def test_bad_words_with_every_strategy_of_remasking(settings):
    pipe = build("remdm", **settings)
    for steps in (1, 3, 12):
        for bad_words in BAD_WORDS:
            out = pipe(
                "a [MASK] [MASK] b",
                gen_length=9,
                bad_words_ids=bad_words,
                num_texts_per_prompt=50,
                num_inference_steps=steps,
            )
            written = [False, False, True, True, False, *[True] * 9, False]
            assert not any(completes(sequence, bad_words, written) for sequence in lists(out))


@pytest.mark.parametrize("steps", [None, 1])
def test_bad_words_across_blocks_and_windows(kind, steps):
    pipe = build(kind, toy_model(max_position_embeddings=12))
    bad_words = [[5, 6], [6, 5, 6], [5, 5, 5], [6, 6], [5, *[7] * 10, 5]]
    out = pipe(
        gen_length=40,
        block_length=4,
        suppress_tokens=[SEP],
        bad_words_ids=bad_words,
        num_texts_per_prompt=20,
        num_inference_steps=steps or STEPS[kind],
        generator=seeded(),
    )
    for sequence in lists(out):
        assert len(sequence) == 42
        assert not completes(sequence, bad_words, [True] * 42)


def test_a_bad_word_that_ends_with_the_given_separator(pipe):
    out = pipe(gen_length=3, bad_words_ids=[[7, SEP], [5, SEP]], num_texts_per_prompt=300, generator=seeded())
    assert not any(completes(sequence, [[7, SEP], [5, SEP]], [True] * 5) for sequence in lists(out))


def test_bad_words_renormalise_the_prediction():
    """One token at a time: the exact conditional given that no bad word is completed."""
    model = toy_model()
    bad_words = [[5, 6], [7, 7], [6], [7, SEP, 5]]

    def predict(canvas, column):
        p = prediction(model, canvas, column)
        for token in EMITTED:
            filled = [*canvas[:column], token, *canvas[column + 1 :]]
            p[token] *= not completes(filled, bad_words, [i == column for i in range(len(canvas))])
        return p / p.sum()

    law = any_order_law(predict, [CLS, *[MASK] * 3, SEP])
    out = build(model=model)(
        gen_length=3, bad_words_ids=bad_words, num_texts_per_prompt=SAMPLES, generator=seeded(), output_type="seq"
    )
    assert_follows(lists(out), law)
    assert len(law) > 10


NO_REPEATS = [[word, word] for word in WORDS]


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_bad_words_that_can_be_avoided_are_no_error(kind, steps):
    """No word twice in a row: of three words, one always fits between two others."""
    out = build(kind)(
        " ".join(["[MASK]"] * 5),
        bad_words_ids=NO_REPEATS,
        num_inference_steps=steps or STEPS[kind],
        num_texts_per_prompt=20,
        generator=seeded(),
    )
    assert not any(completes(sequence, NO_REPEATS, [True] * 7) for sequence in lists(out))


def test_tokens_that_complete_a_bad_word_together_are_written_one_after_another():
    """[a a] is bad: of three a's at once the second waits, and then it can be no a."""
    pipe = build("linear", favouring(5))
    passes = passes_of(pipe.model)
    out = pipe("[MASK] [MASK] [MASK]", bad_words_ids=[[5, 5]], num_inference_steps=1, temperature=0.0)
    assert [row for rows in passes for row in rows] == [[CLS, MASK, MASK, MASK, SEP], [CLS, 5, MASK, 5, SEP]]
    assert lists(out)[0][1] == lists(out)[0][3] == 5 != lists(out)[0][2]


def test_bad_words_do_not_shorten_texts_that_are_written_one_token_at_a_time():
    """Under the rule of confidence only one of the candidates is kept, so none may rule another out."""
    model = toy_model()
    canvas = [CLS, MASK, MASK, SEP]
    at_once = [prediction(model, canvas, column, emitted=WORDS) for column in (1, 2)]
    law = Counter()
    for first in WORDS:
        for second in WORDS:
            mass = at_once[0][first] * at_once[1][second]
            kept, column = (first, 1) if at_once[0][first] >= at_once[1][second] else (second, 2)
            filled = [*canvas[:column], kept, *canvas[column + 1 :]]
            p = prediction(model, filled, 3 - column, emitted=[word for word in WORDS if word != kept])
            for other in p.nonzero()[0].tolist():
                law[(kept, other) if column == 1 else (other, kept)] += mass * p[other]
    out = build("confidence", model)(
        "[MASK] [MASK]", bad_words_ids=NO_REPEATS, num_texts_per_prompt=SAMPLES // 2, generator=seeded()
    )
    assert_follows([sequence[1:3] for sequence in lists(out)], law)


def random_mask(length, seed=0):
    """[length, vocab]: some of the tokens at each position, at least a word."""
    generator = seeded(seed)
    mask = torch.rand(length, 8, generator=generator) < 0.4
    mask[torch.arange(length), torch.randint(5, 8, (length,), generator=generator)] = True
    return mask


@pytest.mark.parametrize("limit", [32, 10])
@pytest.mark.parametrize("steps", [None, 2])
def test_allowed_mask_equals_its_callable(kind, steps, limit):
    pipe = build(kind, toy_model(max_position_embeddings=limit))
    prompts = ["a", "b [MASK] c"]
    mask = random_mask(17)
    arguments = {"gen_length": 12, "block_length": 4, "num_inference_steps": steps or STEPS[kind]}

    def allowed(canvas, positions):
        return mask[positions % canvas.shape[1]]

    results = []
    for rule in (mask, allowed):
        out = pipe(prompts * 10, allowed_token_ids=rule, generator=seeded(), **arguments)
        for i, sequence in enumerate(lists(out)):
            canvas = start_canvas(pipe.tokenizer(prompts[i % 2]).input_ids, 12)
            new = [column for column in range(len(sequence)) if canvas[column] == MASK]
            assert all(mask[column, sequence[column]] for column in new)
        results.append(lists(out))
    assert results[0] == results[1]


def test_the_callable_gets_coordinates_of_the_canvas(kind):
    pipe = build(kind, toy_model(max_position_embeddings=12))
    prompts = ["a b", "[MASK] c c c"]
    asked = [set(), set()]
    sequences = []

    def allowed(canvas, positions):
        assert canvas.shape == (2, 30)  # [CLS] [MASK] c c c and 24 new tokens [SEP]
        assert (canvas.flatten()[positions] == MASK).all()
        assert canvas[0, :3].tolist() == [CLS, 5, 6]
        assert canvas[1, [0, 2, 3, 4]].tolist() == [CLS, 7, 7, 7]
        for row, column in zip((positions // canvas.shape[1]).tolist(), (positions % canvas.shape[1]).tolist()):
            asked[row].add(column)
        sequences.append(canvas.clone())
        canvas[:] = 7  # is a copy
        return torch.ones(len(positions), 8, dtype=torch.bool)

    out = pipe(
        prompts,
        gen_length=24,
        block_length=4,
        suppress_tokens=[SEP],
        allowed_token_ids=allowed,
        generator=seeded(),
    )
    assert asked == [set(range(3, 27)), {1, *range(5, 29)}]
    assert all(canvas.shape == sequences[0].shape for canvas in sequences)
    for canvas in sequences if kind != "remdm" else []:
        for row, sequence in zip(canvas.tolist(), lists(out)):
            assert all(old in (MASK, new) for old, new in zip(row, sequence))


class Recorder(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.clone(), scores.clone()))
        return scores


def test_processors_see_the_ids_to_the_left_and_the_scores(kind):
    model = toy_model()
    recorder = Recorder()
    build(kind, model)("a [MASK] b [MASK]", logits_processor=LogitsProcessorList([recorder]), num_inference_steps=1)
    canvas = [CLS, 5, MASK, 6, MASK, SEP]
    logits = raw_logits(model, canvas)
    assert sorted(ids.shape[1] for ids, _ in recorder.seen) == [2, 4]
    for ids, scores in recorder.seen:
        assert ids.tolist() == [canvas[: ids.shape[1]]]
        assert scores.shape == (1, 8)
        assert np.allclose(scores[0, WORDS].numpy(), logits[ids.shape[1], WORDS], atol=1e-4)


def test_processors_see_the_whole_left_in_windows(pipe):
    pipe.model = toy_model(max_position_embeddings=12)
    recorder = Recorder()
    out = pipe(
        "a b c",
        gen_length=24,
        block_length=1,
        suppress_tokens=[SEP],
        logits_processor=LogitsProcessorList([recorder]),
        generator=seeded(),
    )
    lengths = [ids.shape[1] for ids, _ in recorder.seen]
    assert sorted(set(lengths)) == list(range(4, 28))
    assert lengths == sorted(lengths)
    for ids, _ in recorder.seen:
        assert ids[0].tolist() == lists(out)[0][: ids.shape[1]]


def test_a_processor_decides_what_is_written(pipe):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -INF).index_fill(-1, torch.tensor([7]), 0.0)

    out = pipe(["[MASK] a", "b"], gen_length=4, logits_processor=LogitsProcessorList([Only()]), generator=seeded())
    assert out.texts == ["c a c c c c", "b c c c c"]


def test_repetition_penalty_of_transformers(kind):
    processors = LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(4.0)])
    model = toy_model(4)
    out = build(kind, model)(
        "a c [MASK] b",
        logits_processor=processors,
        num_texts_per_prompt=SAMPLES // 10,
        generator=seeded(),
        output_type="seq",
    )

    def penalise(logits):
        logits = logits.copy()
        for token in (5, 7):  # what stands to the left
            logits[token] *= 4.0 if logits[token] < 0 else 1 / 4.0
        return logits

    p = prediction(model, [CLS, 5, 7, MASK, 6, SEP], 3, emitted=WORDS, change=penalise)
    assert_follows([sequence[3:4] for sequence in lists(out)], {(token,): p[token] for token in WORDS})
    assert abs(p - prediction(model, [CLS, 5, 7, MASK, 6, SEP], 3, emitted=WORDS)).max() > 0.05


def test_bad_words_processor_of_transformers(pipe):
    bad_words = [[5, 6], [7, 7], [6, 6, 5]]
    processors = LogitsProcessorList([transformers.NoBadWordsLogitsProcessor(bad_words, eos_token_id=SEP)])
    arguments = {"prompt": ["a", "c c"] * 30, "gen_length": 8, "block_length": 1}
    out = pipe(**arguments, logits_processor=processors, generator=seeded())
    written = [False, False, *[True] * 9]
    assert not any(completes(sequence[i % 2 :], bad_words, written) for i, sequence in enumerate(lists(out)))
    free = pipe(**arguments, generator=seeded())
    assert any(completes(sequence[i % 2 :], bad_words, written) for i, sequence in enumerate(lists(free)))


class Forced(LogitsProcessor):
    """Gives one token all of the probability, whatever was ruled out."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -INF).index_fill_(1, torch.tensor([self.token]), 0.0)


@pytest.mark.parametrize(
    ("prompt", "arguments", "token"),
    [
        ("a [MASK]", {}, SEP),  # a text does not end in a gap
        ("a", {"gen_length": 2, "eos_penalty": INF}, SEP),
        ("a [MASK]", {"suppress_tokens": [6]}, 6),
        ("a [MASK]", {"bad_words_ids": [[5, 6]]}, 6),
        ("a [MASK]", {"allowed_token_ids": torch.arange(8).ne(6).repeat(4, 1)}, 6),
        ("a [MASK]", {}, MASK),
    ],
    ids=str,
)
def test_processors_bring_nothing_back(pipe, prompt, arguments, token):
    processors = LogitsProcessorList([Forced(token)])
    with pytest.raises(ValueError, match="allow no token at position 2"):
        pipe(prompt, logits_processor=processors, **arguments)


def test_a_mask_that_leaves_nothing_is_named_before_any_work(pipe):
    allowed = torch.ones(8, 8, dtype=torch.bool)
    allowed[6, [3, 5, 6]] = False
    passes = passes_of(pipe.model)
    arguments = {"gen_length": 6, "block_length": 1, "allowed_token_ids": allowed, "generator": seeded()}
    pipe(**arguments)
    assert passes
    passes.clear()
    with pytest.raises(ValueError, match="allow no token at position 6"):
        pipe(**arguments, suppress_tokens=[7])
    assert not passes


def test_processors_choose_among_what_is_allowed(pipe):
    allowed = torch.zeros(4, 8, dtype=torch.bool)
    allowed[:, 6] = True
    processors = LogitsProcessorList([transformers.TopKLogitsWarper(1)])
    out = pipe(["a [MASK]"] * 20, allowed_token_ids=allowed, logits_processor=processors, generator=seeded())
    assert [sequence[2] for sequence in lists(out)] == [6] * 20


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -INF)


NOTHING_AT_4 = torch.ones(8, 8, dtype=torch.bool)
NOTHING_AT_4[4] = False
IMPOSSIBLE = {
    "suppress_tokens": WORDS,
    "bad_words_ids": [[5], [7, 6], [6], [7]],
    "allowed_token_ids": NOTHING_AT_4,
    "logits_processor": LogitsProcessorList([Nothing()]),
}


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_constraints_name_the_position(kind, name, steps):
    pipe = build(kind)
    pipe.model.train()
    with pytest.raises(ValueError, match="constraints allow no token at position 4 of the canvas"):
        pipe(
            "a b c [MASK] a b",
            **{name: IMPOSSIBLE[name]},
            num_inference_steps=steps or STEPS[kind],
            num_texts_per_prompt=3,
        )
    assert all(module.training for module in pipe.model.modules())


def test_impossible_constraints_name_the_position_of_the_canvas_in_windows(pipe):
    pipe.model = toy_model(max_position_embeddings=12)
    mask = torch.ones(42, 8, dtype=torch.bool)
    mask[:, SEP] = False
    mask[33] = False
    with pytest.raises(ValueError, match="position 33 of the canvas"):
        pipe(gen_length=40, block_length=4, allowed_token_ids=mask, num_texts_per_prompt=2, generator=seeded())


def test_only_special_tokens_allowed_is_impossible_too(pipe):
    """What the scheduler never draws is no way out."""
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, [PAD, UNK, CLS, MASK]] = True
    with pytest.raises(ValueError, match="position [12] of the canvas"):
        pipe(gen_length=2, allowed_token_ids=mask)
    with pytest.raises(ValueError, match="position [12] of the canvas"):
        pipe(gen_length=2, suppress_tokens=WORDS, eos_penalty=INF)


def test_constraints_that_leave_the_terminator_only_end_the_text(pipe):
    out = pipe("a", gen_length=6, block_length=2, suppress_tokens=WORDS, generator=seeded())
    assert lists(out) == [[CLS, 5, SEP]]
    assert out.texts == ["a"]


def test_constraints_that_rule_nothing_out_change_nothing(pipe):
    free = lists(pipe("[MASK] a", gen_length=6, generator=seeded()))
    for rule in (
        {"suppress_tokens": []},
        {"suppress_tokens": [PAD, MASK]},
        {"bad_words_ids": []},
        {"bad_words_ids": [[5] * 30]},
        {"allowed_token_ids": torch.ones(10, 8, dtype=torch.bool)[:10]},
        {"logits_processor": LogitsProcessorList()},
        {"logits_processor": LogitsProcessorList([Recorder()])},
        {"eos_penalty": 0},
    ):
        if "allowed_token_ids" in rule:
            rule = {"allowed_token_ids": torch.ones(len(free[0]), 8, dtype=torch.bool)}
        assert lists(pipe("[MASK] a", gen_length=6, generator=seeded(), **rule)) == free


WRONG = [
    ({"eos_penalty": -0.5}, "`eos_penalty` must be .*got -0.5"),
    ({"eos_penalty": float("nan")}, "`eos_penalty` must be .*got nan"),
    ({"eos_penalty": -INF}, "`eos_penalty` must be .*got -inf"),
    ({"eos_penalty": "1"}, "`eos_penalty` must be"),
    ({"eos_penalty": None}, "`eos_penalty` must be"),
    ({"suppress_tokens": 5}, "`suppress_tokens` must be a list of ids .*got 5"),
    ({"suppress_tokens": ["a"]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [8]}, r"`suppress_tokens` must be a list of ids in \[0, 8\), got \[8\]"),
    ({"suppress_tokens": [-1]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [True]}, "`suppress_tokens` must be a list of ids"),
    ({"suppress_tokens": [[5]]}, "`suppress_tokens` must be a list of ids"),
    ({"bad_words_ids": [5]}, "`bad_words_ids` must be a list of non-empty lists"),
    ({"bad_words_ids": [[]]}, "`bad_words_ids` must be a list of non-empty lists"),
    ({"bad_words_ids": [[5], [8]]}, r"`bad_words_ids` must be .* in \[0, 8\)"),
    ({"bad_words_ids": "a"}, "`bad_words_ids` must be"),
    ({"bad_words_ids": ["a b"]}, "`bad_words_ids` must be"),
    ({"allowed_token_ids": [[True] * 8] * 6}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(6, 8)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(8, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(6, 9, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"allowed_token_ids": torch.ones(5, 8, dtype=torch.bool)}, "`allowed_token_ids` must .* 6 .*got 5"),
    ({"allowed_token_ids": torch.ones(1, 6, 8, dtype=torch.bool)}, "`allowed_token_ids` must be"),
    ({"logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(2.0)]}, "`logits_processor` must be"),
    ({"logits_processor": transformers.RepetitionPenaltyLogitsProcessor(2.0)}, "`logits_processor` must be"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_constraints_are_named_before_any_work(arguments, message):
    pipe = build()
    calls = passes_of(pipe.model)
    with pytest.raises(ValueError, match=message):
        pipe(gen_length=4, **arguments)
    assert calls == []


WRONG_RETURNS = {
    "too many rows": lambda canvas, positions: torch.ones(len(positions) + 1, 8, dtype=torch.bool),
    "too few rows": lambda canvas, positions: torch.ones(len(positions) - 1, 8, dtype=torch.bool),
    "one row for all": lambda canvas, positions: torch.ones(1, 8, dtype=torch.bool),
    "a smaller vocabulary": lambda canvas, positions: torch.ones(len(positions), 7, dtype=torch.bool),
    "floats": lambda canvas, positions: torch.ones(len(positions), 8),
    "a list": lambda canvas, positions: [[True] * 8] * len(positions),
    "one dimension": lambda canvas, positions: torch.ones(8, dtype=torch.bool),
    "nothing": lambda canvas, positions: None,
}


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("name", WRONG_RETURNS)
def test_what_the_callable_returns_is_checked(name, steps):
    with pytest.raises(ValueError, match="`allowed_token_ids` must return"):
        build()(gen_length=4, num_texts_per_prompt=2, allowed_token_ids=WRONG_RETURNS[name], num_inference_steps=steps)


def test_a_padded_vocabulary_takes_masks_of_the_tokenizer_s_size(pipe):
    pipe.model = toy_model(vocab_size=64)
    mask = random_mask(12)
    results = [
        lists(pipe(gen_length=10, allowed_token_ids=rule, num_texts_per_prompt=20, generator=seeded()))
        for rule in (
            mask,
            lambda canvas, positions: mask[positions % canvas.shape[1]],
        )
    ]
    assert results[0] == results[1]
    assert all(mask[i, sequence[i]] for sequence in results[0] for i in range(1, 11))
    out = pipe(gen_length=10, bad_words_ids=[[5, 6]], suppress_tokens=[7], num_texts_per_prompt=20)
    assert all(set(sequence[1:-1]) <= {SEP, 5, 6} for sequence in lists(out))
    assert not any(completes(sequence, [[5, 6]], [True] * 12) for sequence in lists(out))


def test_a_scheduler_may_rule_out_ids_beyond_the_tokenizer(pipe):
    pipe.model = toy_model(vocab_size=64)
    suppressed = [*pipe.scheduler.config.suppressed_token_ids, 9]
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, suppressed_token_ids=suppressed)
    out = pipe(gen_length=10, suppress_tokens=[7], num_texts_per_prompt=20)
    assert all(set(sequence[1:-1]) <= {SEP, 5, 6} for sequence in lists(out))


def test_constraints_hold_with_guidance_and_shaping(pipe):
    mask = random_mask(12)
    out = pipe(
        "a",
        gen_length=9,
        guidance_scale=3.0,
        temperature=0.0,
        top_k=2,
        allowed_token_ids=mask,
        suppress_tokens=[SEP],
        num_texts_per_prompt=5,
    )
    assert all(mask[i, sequence[i]] for sequence in lists(out) for i in range(2, 11))


def test_constraints_and_guidance_in_half_precision(pipe):
    pipe.to(torch.bfloat16)
    mask = random_mask(12)
    out = pipe(
        "a",
        gen_length=9,
        block_length=4,
        guidance_scale=3.0,
        allowed_token_ids=mask,
        suppress_tokens=[SEP],
        eos_penalty=INF,
        logits_processor=LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.3)]),
        generator=seeded(),
    )
    assert all(mask[i, lists(out)[0][i]] for i in range(2, 11))


def test_constraints_hold_for_stock_models(kind):
    for family in ("bert", "roberta"):
        pipe = build(kind, family_model(family))
        out = pipe(
            "a",
            gen_length=20,
            block_length=6,
            suppress_tokens=[SEP],
            bad_words_ids=[[5, 6], [6, 5]],
            generator=seeded(),
        )
        assert not completes(lists(out)[0], [[5, 6], [6, 5]], [False, False, *[True] * 20, False])
