"""What a call costs: tokens a forward pass, and memory."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import CLS, MASK, SEP, seeded, toy_model
from writing import build, family_model, one_each

from diffusers_text.models import sparse_head as models
from diffusers_text.pipelines import prediction

# --- The warning of many tokens a forward pass ---


def warnings_of(caplog, call):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="diffusers_text"):
        call()
    return [record.getMessage() for record in caplog.records if "forward pass" in record.getMessage()]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ({"gen_length": 16}, "16.0 "),
        ({"gen_length": 9}, "9.0 "),
        ({"gen_length": 9, "prompt": ["a", "b b b", "c"]}, "9.0 "),
        ({"gen_length": 18, "block_length": 9, "suppress_tokens": [SEP]}, "9.0 "),
        ({"gen_length": 16, "prompt": "a", "guidance_scale": 2.0}, "16.0 "),
        ({"prompt": " ".join(["[MASK]"] * 12)}, "12.0 "),
    ],
    ids=str,
)
def test_many_tokens_a_pass_are_warned_of_once_with_the_number(pipe, caplog, arguments, number):
    messages = warnings_of(caplog, lambda: pipe(**arguments, num_inference_steps=1))
    assert len(messages) == 1
    assert number in messages[0]
    messages = warnings_of(caplog, lambda: list(pipe.stream(**arguments, num_inference_steps=1)))
    assert len(messages) == 1
    assert len(warnings_of(caplog, lambda: pipe(**arguments, num_inference_steps=1))) == 1  # of each call


@pytest.mark.parametrize(
    "arguments",
    [
        {"gen_length": 8, "num_inference_steps": 1},
        {"gen_length": 8, "num_inference_steps": 1, "num_texts_per_prompt": 4},
        {"prompt": ["a", "b b"], "gen_length": 8, "num_inference_steps": 1},
        {"gen_length": 24, "block_length": 8, "num_inference_steps": 1},
        {"gen_length": 24},
        {"gen_length": 8, "num_inference_steps": 1, "prompt": "a", "guidance_scale": 3.0},
        {"prompt": "a b"},
    ],
    ids=str,
)
def test_eight_tokens_a_pass_are_not_warned_of(pipe, caplog, arguments):
    assert warnings_of(caplog, lambda: pipe(**arguments)) == []


def test_the_warning_counts_what_confidence_decides(caplog):
    pipe = build("confidence", rule="threshold", threshold=0.0)
    messages = warnings_of(caplog, lambda: pipe(gen_length=20, num_texts_per_prompt=2))
    assert len(messages) == 1
    assert "20.0 " in messages[0]
    pipe = build("confidence", rule="entropy_bound", entropy_bound=1e3)
    assert "20.0 " in warnings_of(caplog, lambda: pipe(gen_length=20))[0]
    pipe = build("confidence", rule="threshold", threshold=0.9999)
    assert warnings_of(caplog, lambda: pipe(gen_length=20)) == []


# --- Memory ---


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, views apart."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


VOCAB = 30522


def wide_model(limit=66):
    model = toy_model(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=limit
    )
    return model


def head_sizes(model):
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    return sizes


def test_the_head_runs_in_chunks(kind):
    model = wide_model()
    pipe = build(kind, model)
    sizes = head_sizes(model)
    with Largest() as largest:
        out = pipe(
            gen_length=64, num_texts_per_prompt=8, num_inference_steps=1, generator=one_each(8), output_type="seq"
        )
    assert sum(sizes) == 8 * 64 * VOCAB
    assert max(sizes) <= 2**23
    assert largest.elements <= 2**23
    for i in range(8):  # alone, where all fits
        alone = pipe(gen_length=64, num_inference_steps=1, generator=[seeded(i)], output_type="seq")
        assert torch.equal(alone.sequences[0], out.sequences[i])


@pytest.mark.parametrize("kind", ["linear", "spindle"])
def test_exact_samplers_take_the_head_to_asked_positions_only(kind):
    model = wide_model()
    pipe = build(kind, model)
    sizes = head_sizes(model)
    with Largest() as largest:
        pipe(gen_length=24, num_texts_per_prompt=4, generator=seeded(), output_type="seq")
    assert max(sizes) <= 4 * VOCAB  # one position a row
    assert largest.elements <= 4 * VOCAB


def test_a_long_row_is_a_chunk_of_its_own(kind):
    model = wide_model(302)
    pipe = build(kind, model)
    sizes = head_sizes(model)
    pipe(gen_length=300, num_texts_per_prompt=2, num_inference_steps=1, generator=seeded(), output_type="seq")
    assert max(sizes) <= 300 * VOCAB
    assert sum(sizes) == 600 * VOCAB


def test_chunks_do_not_change_what_one_generator_draws():
    """Against a loop by hand that holds all logits at once."""
    model = wide_model()
    pipe = build("linear", model)
    out = pipe(gen_length=64, num_texts_per_prompt=8, num_inference_steps=2, generator=seeded(), output_type="seq")
    scheduler, generator = pipe.scheduler, seeded()
    sample = torch.tensor([[CLS, *[MASK] * 64, SEP]]).repeat(8, 1)
    scheduler.set_timesteps(2)
    positions, times = scheduler.next_positions(sample, generator)
    while len(positions):
        with torch.no_grad():
            logits = model(sample).logits.flatten(0, 1)[positions]
        logits[(positions % 66 == 65) | (positions % 66 == 0)] = 0
        sample = scheduler.step(logits, times, sample, positions=positions, generator=generator).prev_sample
        positions, times = scheduler.next_positions(sample, generator)
    assert torch.equal(torch.stack(out.sequences), sample)


def test_guided_and_constrained_heads_run_in_chunks_too(kind):
    model = wide_model()
    pipe = build(kind, model)
    prompts = ["a b", "c"] * 4
    arguments = {
        "gen_length": 62,
        "num_inference_steps": 1,
        "guidance_scale": 2.0,
        "bad_words_ids": [[5, 6]],
        "suppress_tokens": [7],
        "output_type": "seq",
    }
    with Largest() as largest:
        out = pipe(prompts, generator=one_each(8), **arguments)
    assert largest.elements <= 2**24  # with and without the prompt
    for i in range(3):
        alone = pipe(prompts[i], generator=[seeded(i)], **arguments)
        assert torch.equal(alone.sequences[0], out.sequences[i])


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_stock_models_get_few_rows_at_a_time(compiled, monkeypatch):
    """They compute the logits of whole rows, of which fewer fit."""
    torch.compiler.reset()
    calls = []

    def logits_at(model, positions, **inputs):
        calls.append(len(inputs["input_ids"]))
        return models.logits_at(model, positions, **inputs)

    monkeypatch.setattr(prediction, "logits_at", logits_at)
    monkeypatch.setattr(prediction, "MAX_ELEMENTS", {"cpu": 8 * 5 * 2, "other": 0})  # two rows of [CLS] 3 tokens [SEP]
    pipe = build("linear", family_model("bert"))
    if compiled:
        pipe.model.compile(backend="eager")
    pipe(num_texts_per_prompt=8, gen_length=3, num_inference_steps=1, generator=seeded())
    assert calls == ([2] * 4 if compiled else [3, 3, 2])
