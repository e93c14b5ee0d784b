"""The bound of a corpus: exact, the trainer's own, and the same in any order, batches and processes."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from exact_bounds import SHORT, SHORT_COUNTS, exact_bound
from toys import COUNTS, MASK, toy_model, toy_tokenizer
from transformers import AutoTokenizer

from diffusers_text import (
    AbsorbingStateScheduler,
    ConfidenceUnmaskingScheduler,
    TextDiffusionPipeline,
    TextDiffusionTrainer,
    TextDiffusionTrainingArguments,
    likelihood_bound,
    prepare_pairs,
    token_settings,
)
from diffusers_text.evaluation.likelihood import is_lower_case
from diffusers_text.resuming import read_parts, remove_parts


def pipe_of(schedule="linear", counts=COUNTS, **kwargs):
    tokenizer = toy_tokenizer()
    counts = counts if schedule == "spindle" else None
    scheduler = AbsorbingStateScheduler(
        **token_settings(tokenizer), schedule=schedule, token_counts=counts, gen_length=14
    )
    pipe = TextDiffusionPipeline(toy_model(**kwargs).double(), tokenizer, scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def texts_of(number, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices("abc", k=draw.randint(1, 9))) for _ in range(number)]


ROWS = Dataset.from_dict({"input_ids": SHORT})


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
@pytest.mark.parametrize("conditioning", ["none", "layerwise", "prefix"])
def test_the_bound_is_the_exact_one(conditioning, schedule, steps):
    pipe = pipe_of(schedule, SHORT_COUNTS, time_conditioning=conditioning)
    bound = likelihood_bound(pipe, ROWS, num_draws=160, num_inference_steps=steps)
    exact = exact_bound(pipe.model, pipe.scheduler, steps)
    assert abs(bound.nats_per_token - exact) < 4 * bound.standard_error < exact / 5
    assert bound.tokens == sum(len(row) - 1 for row in SHORT)


def test_figures_follow_from_each_other():
    texts = texts_of(30)
    bound = likelihood_bound(pipe_of(), texts)
    words = sum(len(text.split()) for text in texts)
    assert (bound.words, bound.texts) == (words, 30)
    assert bound.tokens == words + 30  # a terminator after each
    assert bound.rows == math.ceil(bound.tokens / 15)
    assert bound.bits_per_token == pytest.approx(bound.nats_per_token / math.log(2))
    assert bound.perplexity_per_token == pytest.approx(math.exp(bound.nats_per_token))
    assert bound.perplexity_per_word == pytest.approx(math.exp(bound.nats_per_token * bound.tokens / words))
    figures = json.loads(json.dumps(bound.to_dict()))
    assert figures["schedule"] == "linear"
    assert figures["estimator"] == "count"
    assert figures["max_length"] == 16
    assert str(bound) == (
        f"{bound.nats_per_token:.4f} +- {bound.standard_error:.4f} nats per token, perplexity per token at most"
        f" {bound.perplexity_per_token:.2f}, per word at most {bound.perplexity_per_word:.2f}"
        f" (linear, continuous time, {bound.tokens} tokens packed in rows of 16)"
    )


def test_what_is_no_bound_is_called_none():
    bound = likelihood_bound(pipe_of(), texts_of(30), packing=False, estimator="independent", time_epsilon=0.1)
    assert "at most" not in str(bound)
    assert "(linear, continuous time from 0.1: no bound, " in str(bound)
    assert str(bound).endswith(" tokens a text a row of up to 16)")


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("schedule", ["linear", "spindle"])
def test_order_and_batches_change_nothing(schedule, packing):
    texts = [f"{text} {text}" for text in texts_of(25)] * 2  # rows that occur twice as well
    pipe = pipe_of(schedule)
    bounds = [
        likelihood_bound(pipe, order, packing=packing, max_length=22, batch_size=batch_size, num_draws=4)
        for order, batch_size in ((texts, 32), (texts, 7), (texts, 1))
    ]
    if not packing:  # packed rows are others in another order of texts
        shuffled = random.Random(1).sample(texts, len(texts))
        bounds.append(likelihood_bound(pipe, shuffled, packing=False, max_length=22, num_draws=4))
    for bound in bounds[1:]:
        assert bound.nats_per_token == pytest.approx(bounds[0].nats_per_token, rel=1e-10)
        assert bound.standard_error == pytest.approx(bounds[0].standard_error, rel=1e-8)


def test_a_model_that_was_left_in_training_mode_is_evaluated_without_dropout_and_left_so():
    pipe = pipe_of(hidden_dropout_prob=0.5)
    expected = likelihood_bound(pipe, texts_of(5)).nats_per_token
    pipe.model.train()
    assert likelihood_bound(pipe, texts_of(5)).nats_per_token == expected
    assert pipe.model.training


@pytest.mark.parametrize(
    ("schedule", "objective"), [("linear", "continuous"), ("spindle", "continuous"), ("linear", "discrete")]
)
def test_the_trainer_s_evaluation_is_the_same_figure(tmp_path, schedule, objective):
    """The same noise, estimator and control, for rows that are all different."""
    pipe = pipe_of(schedule)
    rows = Dataset.from_dict({"input_ids": [[2, *row, 3] for row in ([5, 6], [7], [6, 6, 7, 5], [5, 5, 5])]})
    args = TextDiffusionTrainingArguments(
        str(tmp_path),
        max_length=16,
        objective=objective,
        num_diffusion_steps=9,
        eval_draws=6,
        eval_samples=0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = TextDiffusionTrainer(pipe.model, args, pipe.tokenizer, rows, rows, scheduler=pipe.scheduler)
    figures = trainer.evaluate()
    bound = likelihood_bound(pipe, rows, num_draws=6, num_inference_steps=9 if objective == "discrete" else None)
    assert bound.nats_per_token == pytest.approx(figures["eval_bound"], rel=1e-6)
    assert bound.standard_error == pytest.approx(figures["eval_bound_standard_error"], rel=1e-6)


def test_draws_are_added_until_the_standard_error_is_small_enough():
    pipe, texts = pipe_of(), texts_of(12)
    first = likelihood_bound(pipe, texts, num_draws=4)
    wanted = first.standard_error / 3
    bound = likelihood_bound(pipe, texts, num_draws=4, standard_error=wanted)
    assert bound.standard_error <= wanted
    assert bound.num_draws > 4
    assert bound.num_draws % 4 == 0
    fewer = likelihood_bound(pipe, texts, num_draws=4, standard_error=first.standard_error)
    assert fewer == first


def test_a_standard_error_out_of_reach_is_said(caplog):
    bound = likelihood_bound(pipe_of(), ["a b"], num_draws=4, standard_error=1e-9)
    assert bound.num_draws == 4 * 64
    assert "over 1e-09" in caplog.text


def test_given_beginnings_are_neither_noised_nor_counted():
    """The bound of pairs is that of the second parts, by all masks of two tokens."""
    pipe = pipe_of()
    rows = prepare_pairs(Dataset.from_dict({"source": ["a b"], "target": ["c"]}), pipe.tokenizer, 16)
    bound = likelihood_bound(pipe, rows, num_draws=64)
    assert (bound.tokens, bound.words, bound.perplexity_per_word) == (2, None, None)
    ids = torch.tensor([rows[0]["input_ids"]])
    losses = {}
    for masked in ([4], [5], [4, 5]):
        noisy = ids.clone()
        noisy[0, masked] = MASK
        logits = pipe.model(noisy).logits[0].double()
        logits[:, MASK] = -torch.inf
        losses[tuple(masked)] = -logits.log_softmax(-1)[masked, ids[0, masked]].sum().item()
    exact = (2 * (losses[4,] + losses[5,]) / 2 / 1 + losses[4, 5]) / 2 / 2
    assert abs(bound.nats_per_token - exact) < 4 * bound.standard_error


def test_whether_case_counts_is_said():
    assert not likelihood_bound(pipe_of(), ["a b"], num_draws=4).lower_case
    folder = Path(find_spec("cognition").submodule_search_locations[0], "model")
    assert is_lower_case(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_draws": 2}, "`num_draws` must be an even number of at least 4"),
        ({"num_draws": 5}, "`num_draws` must be an even number"),
        ({"batch_size": 0}, "`batch_size` must be an integer >= 1"),
        ({"max_length": 33}, "`max_length` is 33, but the model takes at most 32"),
        ({"max_length": 2}, "`max_length` must be an integer >= 3"),
        ({"estimator": "best"}, "`estimator` must be one of"),
        ({"num_inference_steps": 0}, "`num_inference_steps` must be an integer >= 1"),
        ({"num_inference_steps": 4, "estimator": "count"}, "needs continuous time"),
        ({"standard_error": 0}, "`standard_error` must be a number > 0"),
        ({"time_epsilon": 1e-3}, "`time_epsilon` goes with `estimator='independent'`"),
        ({"time_epsilon": 1.0, "estimator": "independent"}, r"`time_epsilon` must lie in \[0, 1\)"),
        ({"long_texts": "cut"}, "`long_texts` must be 'split' or 'error'"),
        ({"dataset": []}, "The corpus has no text: 0 texts, 0 of them blank"),
        ({"dataset": ["a", 1]}, "Text 1 is no text, but 1"),
        ({"max_length": "16"}, "`max_length` must be an integer >= 1, got '16'"),
        ({"dataset": Dataset.from_dict({"prose": ["a"]})}, r"no column 'text', it has \['prose'\]"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        likelihood_bound(pipe_of(), kwargs.pop("dataset", ["a b"]), **kwargs)


def test_a_scheduler_without_a_bound_is_refused():
    pipe = pipe_of()
    pipe.scheduler = ConfidenceUnmaskingScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(ValueError, match="ConfidenceUnmaskingScheduler, whose texts have no likelihood bound"):
        likelihood_bound(pipe, ["a b"])


def test_a_figure_that_is_not_finite_names_its_text():
    pipe = pipe_of()
    with torch.no_grad():
        pipe.model.get_output_embeddings().bias[6] = torch.nan
    with pytest.raises(FloatingPointError, match="The bound of .*b a.* is not finite"):
        likelihood_bound(pipe, ["b a"])


# --- Interruptions and processes ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pipe = pipe_of()
    pipe.model.float()
    pipe.save_pretrained(folder / "pipe")
    (folder / "texts.txt").write_text("\n".join(texts_of(300)))
    return folder


def command(folder, out, *launcher, draws=8):
    return [
        *(launcher or [sys.executable]),
        *("-m", "diffusers_text.commands.main", "evaluate", str(folder / "pipe")),
        *("--dataset", str(folder / "texts.txt"), "--json", str(out), "--batch-size", "1", "--num-draws", str(draws)),
        *("--num-texts", "30", "--gen-length", "6"),
    ]


ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def undisturbed(saved):
    out = saved / "undisturbed.json"
    subprocess.run(command(saved, out, draws=60), check=True, env=ENVIRONMENT, capture_output=True)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(saved, undisturbed, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    subprocess.run(
        command(saved, tmp_path / "out.json", *launcher, draws=60), check=True, env=ENVIRONMENT, capture_output=True
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["generation"] == undisturbed["generation"]
    assert found["bound"].pop("nats_per_token") == pytest.approx(undisturbed["bound"]["nats_per_token"], rel=1e-6)
    assert not list(tmp_path.glob("*.part-*"))


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_was(saved, undisturbed, tmp_path):
    out = tmp_path / "out.json"
    process = subprocess.Popen(command(saved, out, draws=60), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while sum(part.read_bytes().count(b"\n") for part in tmp_path.glob("out.json.bound.part-*")) < 10:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    (part,) = tmp_path.glob("out.json.bound.part-*")
    kept = part.read_bytes()
    again = subprocess.run(command(saved, out, draws=60), env=ENVIRONMENT, check=True, capture_output=True, text=True)
    left = undisturbed["bound"]["rows"] - (kept.count(b"\n") - 1)
    assert f"/{left} [" in again.stderr  # the bar of what was left
    assert json.loads(out.read_text()) == undisturbed
    assert not list(tmp_path.glob("*.part-*"))


def test_finished_batches_of_other_settings_are_an_error(tmp_path):
    pipe, resume = pipe_of(), str(tmp_path / "out")
    broken = pipe_of()
    with torch.no_grad():
        broken.model.get_output_embeddings().bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        likelihood_bound(broken, ["a b"], resume_file=resume)
    with pytest.raises(ValueError, match=r"unfinished parts of a command with other `pipeline`"):
        likelihood_bound(pipe, ["a b"], resume_file=resume)


def test_numbers_of_rows_add_up(tmp_path):
    """What is kept is taken up: the second run has nothing to compute but what a torn line lost."""
    pipe, texts = pipe_of(), texts_of(40)
    resume = tmp_path / "out"
    calls, logits_at = [], pipe.model.forward
    pipe.model.forward = lambda *args, **kwargs: calls.append(1) or logits_at(*args, **kwargs)
    expected = likelihood_bound(pipe, texts, batch_size=1, num_draws=4)
    whole = len(calls)
    likelihood_bound(pipe, texts, batch_size=1, num_draws=4, resume_file=str(resume))
    (part,) = tmp_path.glob("out.part-*")
    part.write_bytes(part.read_bytes()[:-5])
    calls.clear()
    found = likelihood_bound(pipe, texts, batch_size=1, num_draws=4, resume_file=str(resume))
    assert len(calls) == 4  # of one row
    assert whole == 4 * expected.rows
    assert found == expected
    remove_parts(str(resume))
    assert not list(Path(tmp_path).iterdir())


def test_a_model_that_differs_in_anything_is_another(tmp_path):
    """Same weights, with other heads, and the same with other words: neither is taken for the first."""
    pipe, resume = pipe_of(), str(tmp_path / "out")
    likelihood_bound(pipe, ["a b"], resume_file=resume)
    heads = pipe_of(num_attention_heads=4)
    heads.model.load_state_dict(pipe.model.state_dict())
    words = TextDiffusionPipeline(pipe.model, toy_tokenizer(["b", "a", "c"]), pipe.scheduler)
    for other in (heads, words):
        with pytest.raises(ValueError, match=r"unfinished parts of a command with other .*`pipeline`"):
            likelihood_bound(other, ["a b"], resume_file=resume)


def test_settings_that_are_gone_are_named_as_well(tmp_path):
    part = tmp_path / "out.part-0"
    part.write_text('{"seed": 0, "gen_length": 5}\n')
    with pytest.raises(ValueError, match=r"other `gen_length` \(5, now None\)"):
        read_parts(str(tmp_path / "out"), {"seed": 0})


def test_schedules_say_their_settings():
    scheduler = AbsorbingStateScheduler(**token_settings(toy_tokenizer()), schedule="polynomial", power=6.0)
    pipe = TextDiffusionPipeline(toy_model(), toy_tokenizer(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    assert likelihood_bound(pipe, ["a b"], max_length=8).schedule_settings == {"power": 6.0}
    assert likelihood_bound(pipe_of(), ["a b"]).schedule_settings == {}
    found = likelihood_bound(pipe_of("spindle"), ["a b"]).schedule_settings
    assert found == {"spindle_lambda": 0.3, "spindle_information": "surprisal", "spindle_mean": "corpus", "tilt": True}


def test_rows_that_occur_twice_have_noise_of_their_own():
    pipe = pipe_of()
    once, twice = (likelihood_bound(pipe, ["a b c"] * n, packing=False, num_draws=4) for n in (1, 2))
    assert once.nats_per_token != twice.nats_per_token
    assert twice.rows == 2
    assert np.isfinite(twice.standard_error)


def test_rows_are_filled_with_terminators_whose_nats_are_the_text_s():
    pipe, texts = pipe_of(), ["a b", "c", "a c c b"]
    found = likelihood_bound(pipe, texts, max_length=8, packing=False, fill_rows=True)
    rows = [[2, *pipe.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    rows = [row + [3] * (8 - len(row)) for row in rows]
    by_hand = likelihood_bound(pipe, Dataset.from_dict({"input_ids": rows}))
    assert (found.tokens, by_hand.tokens) == (3 + 2 + 5, 3 * 7)
    assert found.nats_per_token * found.tokens == pytest.approx(by_hand.nats_per_token * by_hand.tokens)
    assert found.standard_error * found.tokens == pytest.approx(by_hand.standard_error * by_hand.tokens)
    assert (found.fill_rows, by_hand.fill_rows) == (True, False)


def test_given_rows_may_be_as_long_as_the_model_takes():
    pipe = pipe_of()
    limit = pipe.scheduler.config.gen_length + 2
    rows = Dataset.from_dict({"input_ids": [[2] + [5] * limit + [3]]})
    assert likelihood_bound(pipe, rows).tokens == limit + 1
    with pytest.raises(ValueError, match=f"over `max_length` {limit}"):
        likelihood_bound(pipe, rows, max_length=limit)
