"""The studies on stand-in data: each preset starts, a killed run goes on, and tables say what the records hold."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from toys import MASK, SEP, toy_config, toy_tokenizer
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, DataCollatorForLanguageModeling, set_seed
from transformers.utils import logging

FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"
sys.path.insert(0, str(FOLDER))
import baselines  # noqa: E402
import ideas  # noqa: E402
import study  # noqa: E402
import tables  # noqa: E402

ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true"}


@pytest.fixture(autouse=True)
def own_verbosity():
    """The studies are quiet; other tests look at what is logged."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A BERT and a corpus."""
    folder = tmp_path_factory.mktemp("stand_in")
    set_seed(0)
    BertForMaskedLM(BertConfig(**{**toy_config().to_dict(), "model_type": "bert"})).save_pretrained(folder / "bert")
    toy_tokenizer().save_pretrained(folder / "bert")
    (folder / "texts.txt").write_text("a b c a b c a\nc c b a\nb a c\n" * 2000)
    return folder


def options(stand_in, output_dir, preset="sotu", **changes) -> list[str]:
    """A command line with stand-ins in place of a preset's data and model, and little to do."""
    small = {
        "preset": preset,
        "output_dir": output_dir,
        "model_name_or_path": stand_in / "bert",
        "train_file": stand_in / "texts.txt",
        "max_length": 12,
        "max_steps": 2,
        "eval_steps": 1,
        "warmup_steps": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 4,
        "eval_rows": 2,
        "test_rows": 6,
        "num_texts": 6,
        "seeds": 0,
        "num_threads": 1,
    }
    return [part for name, value in {**small, **changes}.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("preset", ["owt", pytest.param("lm1b", marks=pytest.mark.slow)])
def test_ideas_start_with_each_preset(stand_in, tmp_path, preset):
    """Rows are longer than the stand-in's positions where the preset asks for more."""
    length = 40 if preset == "owt" else 12
    ideas.main(options(stand_in, tmp_path, preset, max_length=length))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == [*ideas.RUNS]
    assert all([step for step, *_ in row["curve"]] == [0, 1, 2] for row in results["rows"])
    assert (tmp_path / "table.md").read_text().count("\n") == 3 + len(ideas.RUNS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("checkpoint-*"))
    bounds = {row["name"]: row["bound"][0] for row in results["rows"]}
    assert len(set(bounds.values())) == len(bounds)  # the settings of each reach its training


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sotu", "lm1b", "owt"])
def test_tables_start_with_each_preset(stand_in, tmp_path, preset):
    arguments = options(stand_in, tmp_path, preset)
    tables.main(arguments)
    results = json.loads((tmp_path / "results.json").read_text())
    models = {row["name"]: row for row in results["models"]}
    assert [*models] == [*tables.DENOISERS, *tables.BASELINES]
    assert [row["steps"] for row in results["steps"]] == tables.STEPS
    assert models["BERT-Mouth"]["nats"] is None
    for row in [*models.values(), *results["steps"]]:
        assert row["seconds"] > 0
        assert 0 <= row["bleu"] <= 1
        if row["nats"] is not None:
            assert row["perplexity_per_word"] == pytest.approx(math.exp(row["nats"] * results["tokens_per_word"]))
    # All that was done is kept: a second run trains nothing and finds the same.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    tables.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    again = json.loads((tmp_path / "results.json").read_text())
    for row in [*results["models"], *results["steps"], *again["models"], *again["steps"]]:
        del row["seconds"]
    assert again == results
    written = (tmp_path / "tables.md").read_text()
    assert written.startswith("| model | nats per token |")
    assert f"| token frequencies | {results['token_frequencies']:.3f} | " in written
    assert f"| other held-out text | | | | {results['held_out_text']['bleu']:.4f} | " in written
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_records_of_other_settings_are_not_taken_for_these(stand_in, tmp_path):
    ideas.main(options(stand_in, tmp_path, only="baseline"))
    with pytest.raises(ValueError, match=r"holds a run with other \['max_steps'\]"):
        ideas.main(options(stand_in, tmp_path, only="baseline", max_steps=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "c4"}, r"`preset` must be one of \['lm1b', 'owt', 'sotu'\], got 'c4'"),
        ({"max_steps": 3, "eval_steps": 2}, "`max_steps` must be a multiple of `eval_steps` 2, got 3"),
        ({"only": "magic"}, r"`only` must be of .* got \['magic'\]"),
    ],
)
def test_wrong_input_is_named(stand_in, tmp_path, arguments, message):
    for module in (ideas, tables):
        with pytest.raises(ValueError, match=message):
            module.main(options(stand_in, tmp_path, **arguments))


def test_a_preset_s_values_stand_back_behind_the_command_line():
    args = study.parse_study_args(
        ["--output_dir", "x", "--preset", "lm1b", "--max_steps", "100000", "--num_threads", "1"]
    )
    assert (args.max_steps, args.learning_rate, args.max_length, args.dataset_name) == (
        100000,
        3e-6,
        128,
        "billion-word-benchmark/lm1b",
    )


def record_of(name, seed, bound, curve=((0, 9.0), (1, 8.0)), max_steps=1):
    return {
        "name": name,
        "seed": seed,
        "bound": bound,
        "standard_error": 0.01,
        "curve": [list(point) for point in curve],
        "settings": {"max_steps": max_steps, "schedule": "linear"},
    }


def test_differences_are_of_the_same_seeds():
    records = [record_of("baseline", 0, 5.0), record_of("baseline", 1, 7.0), record_of("counts", 1, 6.5)]
    records += [record_of("prefix time", 0, 5.1), record_of("prefix time", 1, 7.3)]
    args = study.StudyArguments("x")
    rows = {row["name"]: row for row in ideas.summarise(args, records)["rows"]}
    assert rows["counts"]["difference"] == (-0.5, None)
    assert rows["prefix time"]["bound"] == (pytest.approx(6.2), pytest.approx(1.1))
    assert rows["prefix time"]["difference"] == (pytest.approx(0.2), pytest.approx(0.1))
    table = ideas.markdown_table({"rows": [*rows.values()], "token_frequencies": (6.5, 0.1)})
    assert "| prefix time | 6.200 ± 1.100 | 0.010 | +0.200 ± 0.100 | 2 |" in table
    assert "| baseline | 6.000 ± 1.000 | 0.010 |  | 2 |" in table


def test_frequencies_are_those_of_training(data):
    counts = {token: 1 for token in range(len(data.tokenizer))}
    for row in data.train["input_ids"]:
        for token in row[1:]:
            counts[token] += 1
    total = sum(counts.values())
    args = study.StudyArguments("x", test_rows=2)
    found = study.frequency_nats(args, data, [0, 2])
    for nats, seed in zip(found, [0, 2], strict=True):
        tokens = [token for row in data.test_rows(2, seed)["input_ids"] for token in row[1:]]
        assert nats == pytest.approx(-sum(math.log(counts[token] / total) for token in tokens) / len(tokens))


def test_test_rows_are_spread_and_of_one_seed_each():
    rows = Dataset.from_dict({"input_ids": [[i] for i in range(31)]})
    data = study.Data(None, None, rows, 1.0)
    of_seeds = [[row[0] for row in data.test_rows(100, seed)["input_ids"]] for seed in range(3)]
    assert sorted(itertools.chain(*of_seeds)) == [*range(31)]
    assert data.test_rows(5, 1)["input_ids"] == [[1], [7], [13], [19], [25]]
    assert data.test_rows(5, 4)["input_ids"] == data.test_rows(5, 1)["input_ids"]


def test_curves_are_joined_by_step_and_end_at_the_bound():
    longer = record_of("baseline", 1, 6.0, [(0, 7.0), (1, 6.0), (2, 5.0)])
    (row,) = ideas.summarise(study.StudyArguments("x"), [longer, record_of("baseline", 0, 5.0, [(0, 9.0), (2, 8.0)])])[
        "rows"
    ]
    assert [point[:2] for point in row["curve"]] == [[0, 7.0], [2, 5.5]]


def test_runs_of_different_settings_are_not_put_together():
    records = [record_of("baseline", 0, 5.0), record_of("counts", 0, 4.0, max_steps=2)]
    with pytest.raises(ValueError, match="`output_dir` holds runs of different settings"):
        ideas.summarise(study.StudyArguments("x"), records)


def test_seeds_are_means():
    figures = dict.fromkeys(tables.TEXT_FIGURES, 0.5)
    rows = [{"name": "x", "seed": seed, "nats": nats, "error": 0.1, **figures} for seed, nats in ((0, 1.0), (1, 2.0))]
    (mean,) = tables.mean_rows(rows, "name", tokens_per_word=2.0)
    assert (mean["seeds"], mean["nats"], mean["error"]) == ([0, 1], 1.5, pytest.approx(0.5))
    assert mean["perplexity_per_word"] == pytest.approx(math.exp(3))
    (alone,) = tables.mean_rows(rows[:1], "name", tokens_per_word=2.0)
    assert alone["error"] == 0.1


def test_words_are_those_of_the_texts(data):
    """Sentences of the stand-in: every word is a token, and each text has a terminator."""
    texts = (["a b c a b c a", "c c b a", "b a c"] * 2000)[:300]  # the first 5% are held out
    words = [len(text.split()) for text in texts]
    assert data.tokens_per_word == pytest.approx((sum(words) + len(texts)) / sum(words))


@pytest.mark.parametrize("preset", ["sotu", "lm1b", "owt"])
def test_every_training_takes_the_rows_of_its_preset(stand_in, tmp_path, preset):
    """Before the first of them begins: lengths are the preset's own."""
    length = study.parse_study_args(["--output_dir", "x", "--preset", preset, "--num_threads", "1"]).max_length
    arguments = options(stand_in, tmp_path, preset, max_length=length)
    if preset != "owt":  # the stand-in has 32 positions
        arguments += ["--max_position_embeddings", "512"]
    args = study.parse_study_args(arguments)
    data = study.load_data(args)
    for name, settings in {**ideas.RUNS, **tables.DENOISERS}.items():
        trainer = study.make_trainer(args, data, tmp_path / name, 0, **settings)
        assert trainer.max_sequence_length >= length


def test_a_run_resumes_before_its_last_step(tmp_path):
    for step, whole in ((5, True), (10, True), (15, False), (20, True)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if whole:
            (folder / "trainer_state.json").write_text("{}")
    assert study.last_checkpoint(tmp_path, 20) == str(tmp_path / "checkpoint-10")
    assert study.last_checkpoint(tmp_path, 5) is None


@pytest.fixture
def data(stand_in):
    args = study.parse_study_args(options(stand_in, "x"))
    return study.load_data(args)


def test_gibbs_sampling_draws_every_token_from_its_conditional(data):
    """A model whose prediction does not depend on the context: tokens are drawn by its bias, and no mask is left."""
    set_seed(0)
    model = BertForMaskedLM(BertConfig(**{**toy_config().to_dict(), "model_type": "bert"})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
        model.cls.predictions.bias[[SEP, 5, 6, 7]] = shares.log()
        model.cls.predictions.bias[MASK] = 9.0  # never to be drawn
    texts = torch.tensor(baselines.gibbs_samples(model, data, 400, 10))
    assert texts.shape == (400, 10)
    found = torch.bincount(texts.flatten(), minlength=8) / texts.numel()
    assert found[[0, 1, 2, 4]].sum() == 0
    assert torch.allclose(found[[SEP, 5, 6, 7]], shares, atol=4 * (0.25 / 4000) ** 0.5)


def test_bert_mouth_learns_where_texts_end(stand_in, tmp_path, data, monkeypatch):
    """Terminators are masked as often as other tokens, the start never."""
    batches = []
    collate = DataCollatorForLanguageModeling.__call__
    monkeypatch.setattr(
        DataCollatorForLanguageModeling,
        "__call__",
        lambda *args, **kw: batches.append(collate(*args, **kw)) or batches[-1],
    )
    args = study.parse_study_args(options(stand_in, tmp_path, max_steps=40))
    baselines.train_baseline(args, data, "BERT-Mouth", 0)
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    counts = torch.bincount(torch.cat([torch.tensor(row) for row in data.train["input_ids"]]))
    share = (labels == SEP).sum() / (labels != -100).sum()
    assert share.item() == pytest.approx((counts[SEP] / counts[SEP:].sum()).item(), abs=0.05)
    assert not set(labels.tolist()) - {-100, SEP, 5, 6, 7}


def test_the_decoder_s_nats_are_those_of_its_own_draws(data):
    set_seed(0)
    config = BertConfig(**{**toy_config().to_dict(), "model_type": "bert", "is_decoder": True})
    model = BertLMHeadModel(config).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in data.held_out["input_ids"][:20]:
            for end in range(1, len(row)):  # a token at a time, as it would be written
                total -= model(input_ids=torch.tensor([row[:end]])).logits[0, -1].log_softmax(-1)[row[end]].item()
                tokens += 1
    assert baselines.exact_nats(model, data.held_out.select(range(20))) == pytest.approx(total / tokens, rel=1e-5)
    texts = baselines.decoder_samples(model, data, 40, 6)
    assert {token for text in texts for token in text} <= {0, SEP, 5, 6, 7}  # padding after a terminator
    assert all(set(text[text.index(SEP) :]) <= {SEP, 0} for text in texts if SEP in text)


def test_texts_end_at_their_first_terminator(data):
    assert tables.spell([5, 6, SEP, 7, SEP], data) == "a b"
    assert tables.spell([5, 6], data) == "a b"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["checkpoint-20", "checkpoint-60", "curve.json"])
def test_a_killed_study_goes_on_where_it_was(stand_in, tmp_path, moment):
    """In the middle, at the last checkpoint, and while the final bound is measured."""

    def command(output_dir):
        arguments = options(stand_in, output_dir, max_steps=60, eval_steps=5, save_steps=5, only="baseline")
        return [sys.executable, str(FOLDER / "ideas.py"), *arguments]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), env=ENVIRONMENT, check=True, capture_output=True)
    process = subprocess.Popen(command(killed), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (killed / "runs" / "baseline" / "0" / moment).exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "results.json").exists()
    subprocess.run(command(killed), env=ENVIRONMENT, check=True, capture_output=True)
    found, expected = (json.loads((folder / "results.json").read_text()) for folder in (killed, whole))
    assert str(killed) in found.pop("command")
    assert str(whole) in expected.pop("command")
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ideas.py", "tables.py"])
def test_two_processes_run_a_study(stand_in, tmp_path, script):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    arguments = options(stand_in, tmp_path, **({"only": "baseline"} if script == "ideas.py" else {}))
    subprocess.run([*launcher, str(FOLDER / script), *arguments], env=ENVIRONMENT, check=True, capture_output=True)
    results = json.loads((tmp_path / "results.json").read_text())
    if script == "ideas.py":
        assert results["rows"][0]["seeds"] == [0]
    else:
        assert [row["num_texts"] for row in results["models"]] == [6] * len(results["models"])
        assert min(row["seconds"] for row in results["models"]) > 0
