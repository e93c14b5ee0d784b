"""The command line: what it prints and writes, and what it says of wrong input."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset
from toys import COUNTS, toy_model, toy_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from diffusers_text import (
    AbsorbingStateScheduler,
    TextDiffusionPipeline,
    generation_metrics,
    likelihood_bound,
    prepare_pairs,
)
from diffusers_text.commands.main import app
from diffusers_text.evaluation.generation import generate_texts
from diffusers_text.evaluation.quality import rouge_l
from diffusers_text.evaluation.zero_shot import table
from diffusers_text.resuming import fingerprint

ROUGE = Path(__file__).parents[1] / "rouge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline, a judge with the same tokenizer, and two corpora."""
    folder = tmp_path_factory.mktemp("commands")
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS, gen_length=14)
    TextDiffusionPipeline(toy_model(), toy_tokenizer(), scheduler).save_pretrained(folder / "pipe")
    judge = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    judge.save_pretrained(folder / "judge")
    toy_tokenizer().save_pretrained(folder / "judge")
    (folder / "texts.txt").write_text("a b c a\n\nb a\nc c b a c\n" * 5)
    (folder / "pairs.jsonl").write_text(
        "".join(
            json.dumps({"early": early, "late": late}) + "\n"
            for early, late in (("a b", "b a"), ("c " * 40, "b"), ("c", "c c a"), ("a b", None), ("b b a c", "a"))
        )
    )
    scheduler = AbsorbingStateScheduler(gen_length=6)
    model = toy_model(type_vocab_size=2)
    TextDiffusionPipeline(model, toy_tokenizer(), scheduler).save_pretrained(folder / "of-pairs")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prose": text}) + "\n" for text in ("a b", "c , b a .")))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def test_evaluate_writes_the_bound_of_a_corpus_with_all_it_depends_on(run, folder):
    result = run("evaluate", "pipe", "--dataset", "texts.txt", "--json", "out/bound.json")
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "out" / "bound.json").read_text())
    texts = (folder / "texts.txt").read_text().splitlines()
    expected = likelihood_bound(TextDiffusionPipeline.from_pretrained(folder / "pipe"), texts, corpus_name="texts.txt")
    corpus = {"dataset": "texts.txt", "config_name": None, "split": "test", "text_column": "text"}
    corpus |= {"limit": None, "detokenize": None}
    assert found == {"pipeline": "pipe", "corpus": corpus, "bound": expected.to_dict()}
    assert {
        "nats_per_token",
        "standard_error",
        "perplexity_per_token",
        "perplexity_per_word",
        "tokens",
        "words",
    } <= set(found["bound"])
    assert (found["bound"]["estimator"], found["bound"]["schedule"]) == ("nonempty", "spindle")
    assert f"bound: {expected}" in result.output
    assert [path.name for path in (folder / "out").iterdir()] == ["bound.json"]


def test_evaluate_takes_the_options_of_the_library(run, folder):
    options = ["--schedule", "linear", "--no-packing", "--max-length", "5", "--num-draws", "4", "--limit", "4"]
    result = run("evaluate", "pipe", "--dataset", "texts.txt", *options, "--json", "short.json")
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "short.json").read_text())["bound"]
    assert (found["schedule"], found["packing"], found["max_length"], found["num_draws"]) == ("linear", False, 5, 4)
    assert (found["texts"], found["words"], found["split_texts"], found["blank_texts"]) == (3, 11, 2, 1)
    assert found["tokens"] == 14


def test_evaluate_measures_generated_texts_and_never_a_perplexity_alone(run, folder):
    options = ["--num-texts", "6", "--gen-length", "4", "--judge", "judge", "--num-draws", "4"]
    results = []
    for name, batch_size in (("once", 6), ("twice", 4)):
        result = run(
            "evaluate", "pipe", "--dataset", "texts.txt", *options, "--batch-size", batch_size, "--json", name
        )
        assert result.exit_code == 0, result.output
        results.append(json.loads((folder / name).read_text())["generation"])
    assert results[0]["bleu"] == results[1]["bleu"]
    assert results[0]["num_texts"] == results[0]["num_references"] == 6
    assert results[0]["judge"]["model"] == "judge"
    assert results[0]["judge"]["perplexity"] == pytest.approx(results[1]["judge"]["perplexity"])
    assert "judge: perplexity" in result.output
    assert f"at an entropy of {results[1]['judge']['entropy']:.3f} nats" in result.output


def test_a_judge_may_look_at_the_beginnings_only(run, folder):
    """Texts are written by the time a judge is found to be too short for them: they are kept, and judged then."""
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=3, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        folder / "short"
    )
    toy_tokenizer().save_pretrained(folder / "short")
    options = ["--num-texts", "20", "--gen-length", "6", "--judge", "short", "--num-draws", "4", "--json", "s.json"]
    command = ["evaluate", "pipe", "--dataset", "texts.txt", *options]
    assert "`--judge-max-length`" in str(run(*command).exception)
    assert [*folder.glob("s.json.texts*")]
    result = run(*command, "--judge-max-length", 3)
    assert result.exit_code == 0, result.output
    judged = json.loads((folder / "s.json").read_text())["generation"]["judge"]
    assert judged["max_length"] == 3
    assert judged["tokens"] <= 20 * 2
    command = [
        "curve",
        "pipe",
        "--dataset",
        "texts.txt",
        *options[:6],
        "--values",
        "1.0",
        "--output-dir",
        "short_curve",
    ]
    assert "`--judge-max-length`" in str(run(*command).exception)
    result = run(*command, "--judge-max-length", 3)
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "short_curve" / "curve.json").read_text())["judge_max_length"] == 3


COLUMNS = ["--source-column", "early", "--target-column", "late"]


def test_evaluate_pairs_gives_the_bound_of_targets_and_compares_texts_with_them(run, folder):
    options = ["--num-sources", "2", "--texts-per-source", "4", "--rouge", ROUGE, "--json", "pairs.json"]
    result = run("evaluate-pairs", "of-pairs", "--dataset", "pairs.jsonl", *COLUMNS, *options)
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "pairs.json").read_text())
    assert not list(folder.glob("pairs.json.*"))

    pipe = TextDiffusionPipeline.from_pretrained(folder / "of-pairs")
    pairs = Dataset.from_dict({"source": ["a b", "c", "b b a c"], "target": ["b a", "c c a", "a"]})
    expected = likelihood_bound(pipe, prepare_pairs(pairs, pipe.tokenizer, 32), corpus_name="pairs.jsonl")
    assert found["bound"] == expected.to_dict()
    assert found["corpus"]["left_out"] == 2
    assert found["bound"]["tokens"] == 2 + 3 + 1 + 3  # the targets' words and terminators
    texts = generate_texts(pipe, 4, sources=["a b", "c"])
    metrics = generation_metrics(texts, ["b a", "c c a"], texts_per_prompt=4)
    assert found["generation"].pop("rouge_l") == pytest.approx(rouge_l(texts, ["b a"] * 4 + ["c c a"] * 4, str(ROUGE)))
    sampling = found["generation"].pop("sampling")
    assert (sampling["scheduler"], sampling["gen_length"], sampling["seed"]) == ("AbsorbingStateScheduler", 6, 0)
    assert found["generation"] == metrics
    assert "ROUGE-L" in result.output


def test_zero_shot_lays_out_own_and_published_rows(run, folder):
    result = run(
        "zero-shot", "pipe", "--dataset", "ptb=texts.txt", "--dataset", "mine=texts.txt", "--json", "table.json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "table.json").read_text())
    assert found["bounds"]["ptb"]["nats_per_token"] == found["bounds"]["mine"]["nats_per_token"]
    assert table("pipe", found["bounds"]) in result.output
    own = f"{found['bounds']['mine']['perplexity_per_token']:.2f}"
    assert f"| pipe (at most) | {own} | {own} |" in result.output
    assert "| MDLM, as published | 95.26 |  |" in result.output


def test_zero_shot_undoes_the_spacing_of_corpora_it_knows(run, folder):
    (folder / "spaced.txt").write_text("a b , c .\n")
    result = run("zero-shot", "pipe", "--dataset", "wikitext=spaced.txt", "--dataset", "own=spaced.txt", "--json", "s")
    assert result.exit_code == 0, result.output
    bounds = json.loads((folder / "s").read_text())["bounds"]
    assert (bounds["wikitext"]["words"], bounds["own"]["words"]) == (3, 5)


def test_curve_measures_each_value_and_goes_on_where_it_was(run, folder):
    command = ["curve", "pipe", "--dataset", "texts.txt", "--output-dir", "curve", "--values", "0.3,1.0"]
    command += ["--num-texts", "5", "--gen-length", "4", "--judge", "judge"]
    result = run(*command)
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "curve" / "curve.json").read_text())
    assert [row["value"] for row in found["rows"]] == [0.3, 1.0]
    assert found["rows"][0]["entropy"] < found["rows"][1]["entropy"]
    assert (folder / "curve" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert found["sampling"]["gen_length"] == 4
    texts = [
        json.loads(line)["text"] for line in (folder / "curve" / "temperature-0.3.jsonl").read_text().split("\n")[:-1]
    ]
    pipe = TextDiffusionPipeline.from_pretrained(folder / "pipe")
    assert texts == generate_texts(pipe, 5, gen_length=4, temperature=0.3)
    assert not list((folder / "curve").glob("*.part-*"))
    # An interrupted one goes on: of the first value two texts were written, of the second none.
    part = {"number": 1, "text": texts[1]}, {"number": 0, "text": texts[0]}
    settings = {"seed": 0, "gen_length": 4, "temperature": 0.3, "pipeline": fingerprint(pipe)}
    lines = "".join(json.dumps(line) + "\n" for line in (settings, *part))
    (folder / "curve" / "temperature-0.3.part-1").write_text(lines)
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "curve" / "curve.json").read_text()) == found
    assert not list((folder / "curve").glob("*.part-*"))


@pytest.mark.parametrize("parameter", ["top_k", "num_inference_steps"])
def test_curve_varies_whole_numbers(run, folder, parameter):
    command = ["curve", "pipe", "--dataset", "texts.txt", "--output-dir", parameter, "--parameter", parameter]
    result = run(*command, "--values", "1,3", "--num-texts", "4", "--gen-length", "4")
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / parameter / "curve.json").read_text())["rows"]
    assert [row["value"] for row in rows] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "pipe", "--dataset", "missing.txt"], "`dataset` 'missing.txt' is no file."),
        (["evaluate", "pipe", "--dataset", "texts.jsonl"], "has no column 'text', it has ['prose']"),
        (["evaluate", "pipe", "--dataset", "broken.jsonl"], "`dataset` 'broken.jsonl' cannot be read"),
        (["evaluate", "pipe", "--dataset", "blank.txt"], "The corpus has no text"),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--detokenize", "c4"], "`detokenizer` must be one of"),
        (["evaluate", "nowhere", "--dataset", "texts.txt"], "nowhere"),
        (
            [
                "evaluate",
                "pipe",
                "--dataset",
                "texts.txt",
                "--no-packing",
                "--max-length",
                "4",
                "--long-texts",
                "error",
            ],
            "10 texts are longer than `max_length` 4, the first of them number 0",
        ),
        (["evaluate-pairs", "of-pairs", "--dataset", "pairs.jsonl"], "has no column 'source', it has"),
        (
            ["evaluate-pairs", "of-pairs", "--dataset", "pairs.jsonl", *COLUMNS, "--num-sources", "1"],
            "There must be two texts at least, to be compared, got 1",
        ),
        (["evaluate-pairs", "of-pairs", "--dataset", "pairs.jsonl", *COLUMNS, "--fill-rows"], "`--max-length`"),
        (
            [
                *("evaluate-pairs", "of-pairs", "--dataset", "pairs.jsonl", *COLUMNS, "--num-sources", "2"),
                *("--rouge", "./nowhere"),
            ],
            "nowhere",
        ),
        (["zero-shot", "pipe", "--dataset", "texts.txt"], "`--dataset` must be NAME=FILE[#COLUMN] or NAME=ID"),
        (["zero-shot", "pipe", "--dataset", "x=texts.txt:plain"], "`--dataset` must be NAME=FILE[#COLUMN] or NAME=ID"),
        (
            ["zero-shot", "pipe", "--dataset", "x=texts.txt", "--dataset", "x=texts.jsonl#prose"],
            "a name for each corpus, got ['x', 'x']",
        ),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--judge", "judge"], "needs `--num-texts`"),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--num-texts", "1"], "two texts at least"),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--num-texts", "2", "--gen-length", "0"], "`gen_length`"),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--json", "pipe"], "`--json` must be a file"),
        (["evaluate", "pipe", "--dataset", "texts.txt", "--long-texts", "error"], "goes with `packing=False`"),
        (
            ["curve", "pipe", "--dataset", "texts.txt", "--output-dir", "never", "--values", "1,-1"],
            "`temperature`",
        ),
        (
            ["curve", "pipe", "--dataset", "texts.txt", "--output-dir", "x", "--parameter", "seed"],
            "`--parameter` must",
        ),
        (["curve", "pipe", "--dataset", "texts.txt", "--output-dir", "x", "--values", "1;2"], "`--values` must be"),
    ],
)
def test_wrong_input_is_named(run, folder, arguments, message):
    (folder / "broken.jsonl").write_text('{"text": "a"\n{"text" "b"}\n')
    (folder / "blank.txt").write_text("\n \n")
    result = run(*arguments)
    assert result.exit_code != 0
    assert not (folder / "never").exists()
    assert message in str(result.exception)
    assert isinstance(result.exception, (ValueError, OSError))


@pytest.mark.slow
def test_the_command_prints_an_error_in_a_line(folder):
    command = [sys.executable, "-m", "diffusers_text.commands.main", "evaluate", "pipe", "--dataset", "missing.txt"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("Error: `dataset` 'missing.txt' is no file.")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_killed_curve_goes_on_where_it_was(folder):
    command = [sys.executable, "-m", "diffusers_text.commands.main", "curve", "pipe", "--dataset", "texts.txt"]
    command += ["--values", "0.3,1.0", "--num-texts", "120", "--batch-size", "2", "--output-dir"]
    whole, killed = folder / "whole", folder / "killed"
    subprocess.run([*command, whole], cwd=folder, check=True, capture_output=True)

    process = subprocess.Popen([*command, killed], cwd=folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while sum(part.read_bytes().count(b"\n") for part in killed.glob("temperature-1.0.part-*")) < 20:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "curve.json").exists()
    written = sum(part.read_bytes().count(b"\n") for part in killed.glob("temperature-1.0.part-*")) - 1
    again = subprocess.run([*command, killed], cwd=folder, check=True, capture_output=True, text=True)
    assert f"/{120 - written} [" in again.stderr  # the bar of what was left
    assert (killed / "curve.json").read_text() == (whole / "curve.json").read_text()
    assert (killed / "curve.png").read_bytes() == (whole / "curve.png").read_bytes()
