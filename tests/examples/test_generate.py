"""Texts for many prompts: the same file from any number of processes, batches and attempts."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import PartialState
from toys import COUNTS, toy_model, toy_tokenizer
from transformers.utils.logging import enable_progress_bar

from diffusers_text import AbsorbingStateScheduler, ReMDMScheduler, TextDiffusionPipeline

SCRIPT = Path(__file__).parents[2] / "examples" / "generate.py"
sys.path.insert(0, str(SCRIPT.parent))
import generate  # noqa: E402

NUM_PROMPTS = 40
OPTIONS = ["--model_name_or_path", "saved", "--gen_length", "16", "--eos_penalty", "inf", "--seed", "3"]
CALL = {"gen_length": 16, "eos_penalty": float("inf")}
COMMAND = [*OPTIONS, "--prompts_file", "prompts.jsonl", "--num_texts_per_prompt", "2"]
TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", str(SCRIPT)]


@pytest.fixture(scope="module")
def prompts():
    words = [["a", "b", "c", "[MASK]"][i * i % 7 % 4] for i in range(NUM_PROMPTS)]
    return [" ".join(words[i : i + 1 + i * 5 % 11]) for i in range(NUM_PROMPTS - 1)] + ["a ü\u2028c"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, prompts):
    """A folder with a pipeline and its prompts."""
    folder = tmp_path_factory.mktemp("generate")
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS, gen_length=6)
    pipe = TextDiffusionPipeline(toy_model(max_position_embeddings=128), toy_tokenizer(), scheduler)
    pipe.save_pretrained(folder / "saved")
    pipe.set_progress_bar_config(disable=True)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    return folder, pipe


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A folder of a test's own, the current one, in which the pipeline and the prompts are."""
    for name in ("saved", "prompts.jsonl"):
        (tmp_path / name).symlink_to(saved[0] / name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget_the_run()


@pytest.fixture(scope="module")
def one_process(saved):
    """What a run in one process wrote into `texts.jsonl` and printed."""
    with chdir(saved[0]), redirect_stdout(StringIO()) as printed:
        main(*COMMAND)
    forget_the_run()
    return (saved[0] / "texts.jsonl").read_bytes(), printed.getvalue()


@pytest.fixture(scope="module")
def unmerged(saved):
    """The part file of a process that was killed after its last prompt."""
    with chdir(saved[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "merge_parts", lambda *_: None)
        generate.main([*COMMAND, "--output_file", "unmerged.jsonl"])
    forget_the_run()
    (part,) = saved[0].glob("unmerged.jsonl.part-*")
    return part.read_bytes()


def main(*arguments):
    generate.main([*arguments, "--output_file", "texts.jsonl"])


def forget_the_run():
    """Takes back what a run sets for its whole process."""
    logging.getLogger("diffusers_text").setLevel(logging.NOTSET)
    enable_progress_bar()
    PartialState._reset_state()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def parts(folder):
    return sorted(folder.glob("texts.jsonl.part-*"))


def finished(folder):
    """How many prompts the parts have, but for torn lines and headers."""
    return sum(max(0, part.read_bytes().count(b"\n") - 1) for part in parts(folder))


def kill_in_the_middle(command, folder):
    """Starts `command` and kills it, children too, by SIGKILL as soon as eight prompts are finished."""
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 600
        while finished(folder) < 8:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            os.kill(one.pid, signal.SIGKILL)
        process.wait()
    return finished(folder)


def test_a_line_for_each_prompt_in_their_order(one_process, prompts, saved):
    written, printed = one_process
    rows = [json.loads(line) for line in written.decode().split("\n")[:-1]]
    assert [list(row) for row in rows] == [["index", "prompt", "texts"]] * NUM_PROMPTS
    assert [row["index"] for row in rows] == list(range(NUM_PROMPTS))
    assert [row["prompt"] for row in rows] == prompts
    assert {len(row["texts"]) for row in rows} == {2}
    assert len({text for row in rows for text in row["texts"]}) > 70
    assert re.fullmatch(r"80 texts in texts.jsonl, 80 of them generated now in [\d.]+ s, [\d.]+ texts/s\n", printed)
    assert not parts(saved[0])
    assert not (saved[0] / "texts.jsonl.tmp").exists()


def test_each_text_is_that_of_a_call_with_its_own_generator(one_process, prompts, saved):
    rows = [json.loads(line) for line in one_process[0].decode().split("\n")[:-1]]
    for number in (0, 17, 39):
        generators = [generate.text_generator(3, 2 * number), generate.text_generator(3, 2 * number + 1)]
        output = saved[1](prompts[number], num_texts_per_prompt=2, generator=generators, **CALL)
        assert rows[number]["texts"] == output.texts


@pytest.mark.slow
def test_two_processes_with_other_batches_write_the_same(folder, one_process):
    done = run([*TWO_PROCESSES, *COMMAND, "--batch_size", "3", "--output_file", "texts.jsonl"], folder)
    assert "20/20" in done.stderr  # of 40 prompts the main process had 20
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]
    assert not parts(folder)


@pytest.mark.parametrize("batch_size", ["5", "100"])
def test_batches_of_another_size_hold_the_same_texts(batch_size, folder, one_process):
    main(*COMMAND, "--batch_size", batch_size)
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]


@pytest.mark.slow
def test_two_processes_go_on_where_one_was_killed(folder, one_process):
    options = [*COMMAND, "--batch_size", "2", "--output_file", "texts.jsonl"]
    before = kill_in_the_middle([sys.executable, str(SCRIPT), *options], folder)
    assert 8 <= before < NUM_PROMPTS
    done = run([*TWO_PROCESSES, *options], folder)
    assert f"{before} of 40 prompts were finished before." in done.stdout
    assert f"80 texts in texts.jsonl, {2 * (NUM_PROMPTS - before)} of them generated now" in done.stdout
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]
    assert not parts(folder)


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_killed_and_one_again(folder, one_process):
    options = [*COMMAND, "--batch_size", "2", "--output_file", "texts.jsonl"]
    first = kill_in_the_middle([*TWO_PROCESSES, *options], folder)
    assert len(parts(folder)) == 2
    second = kill_in_the_middle([sys.executable, str(SCRIPT), *options], folder)
    done = run([sys.executable, str(SCRIPT), *options], folder)
    assert 8 <= first <= second < NUM_PROMPTS
    assert f"{second} of 40 prompts were finished before." in done.stdout
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]


@pytest.mark.slow
def test_a_process_may_have_no_prompt(folder):
    (folder / "one.txt").write_text("a b")
    command = [*OPTIONS, "--prompts_file", "one.txt", "--output_file", "texts.jsonl"]
    run([*TWO_PROCESSES, *command], folder)
    assert (folder / "texts.jsonl").read_bytes().count(b"\n") == 1
    assert not parts(folder)


@pytest.mark.slow
def test_an_error_in_one_of_two_processes_ends_both_before_anything_is_written(folder):
    (folder / "long.txt").write_text("a\n" + "b " * 200)
    command = [*OPTIONS, "--prompts_file", "long.txt", "--output_file", "texts.jsonl"]
    done = subprocess.run([*TWO_PROCESSES, *command], cwd=folder, capture_output=True, timeout=600)
    assert done.returncode != 0
    assert b"Prompt 1, 'b b b" in done.stderr
    assert not list(folder.glob("texts*"))


def test_a_torn_line_is_generated_again_and_no_other(folder, one_process, unmerged):
    header, *lines = unmerged.split(b"\n")[:-1]
    marked, *others, torn = sorted(lines, key=lambda line: "ü".encode() in line)
    marked = marked.replace(b'"texts": ["', b'"texts": ["marked ')
    torn = torn[: torn.index("ü".encode()) + 1]  # amid a character
    (folder / "texts.jsonl.part-0").write_bytes(b"\n".join([header, marked, *others, torn]))
    main(*COMMAND)
    expected = one_process[0].split(b"\n")
    expected[json.loads(marked)["index"]] = marked
    assert (folder / "texts.jsonl").read_bytes().split(b"\n") == expected


def test_a_part_without_a_whole_header_counts_for_nothing(folder, one_process, unmerged):
    (folder / "texts.jsonl.part-2").write_bytes(unmerged)
    (folder / "texts.jsonl.part-0").write_text('{"model_name')
    (folder / "texts.jsonl.part-1").touch()
    main(*COMMAND)
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]
    assert not parts(folder)


def test_parts_of_another_command_are_an_error_that_says_what_differs(folder, unmerged):
    part = folder / "texts.jsonl.part-0"
    part.write_bytes(unmerged)
    with pytest.raises(ValueError, match=r"other `seed` \(3, now 4\).*Finish.*or delete texts.jsonl.part-\*"):
        main(*COMMAND, "--seed", "4")
    with pytest.raises(ValueError, match=r"other `top_k` \(None, now 2\), `guidance_scale` \(1.0, now 2.0\)\."):
        main(*COMMAND, "--top_k", "2", "--guidance_scale", "2", "--batch_size", "1")
    with pytest.raises(ValueError, match=r"other `num_texts_per_prompt` .*, `prompts`"):
        main(*OPTIONS, "--num_texts", "40")
    assert part.read_bytes() == unmerged
    assert not (folder / "texts.jsonl").exists()


def test_parts_of_another_model_under_the_same_name_are_an_error(folder, unmerged):
    (folder / "texts.jsonl.part-0").write_bytes(unmerged)
    (folder / "saved").unlink()
    model = toy_model(seed=2, max_position_embeddings=128)
    TextDiffusionPipeline(model, toy_tokenizer(), AbsorbingStateScheduler()).save_pretrained("saved")
    with pytest.raises(ValueError, match=r"parts of a command with other `pipeline` \('\w+', now '\w+'\)\."):
        main(*COMMAND)


def test_a_part_that_somebody_removed_is_an_error(folder):
    with pytest.raises(RuntimeError, match="40 of 40 prompts are missing in texts.jsonl.part-*"):
        generate.merge_parts("texts.jsonl", {}, NUM_PROMPTS)
    assert not (folder / "texts.jsonl").exists()


@pytest.mark.parametrize("flag", [[], ["--overwrite_output", "False"]])
def test_an_output_that_exists_stays(flag, folder):
    (folder / "texts.jsonl").write_text("precious")
    with pytest.raises(ValueError, match=r"`output_file` 'texts.jsonl' exists: .* --overwrite_output True"):
        main(*COMMAND, *flag)
    assert (folder / "texts.jsonl").read_text() == "precious"


def test_an_output_is_replaced_where_that_is_asked_for(folder, one_process):
    (folder / "texts.jsonl").write_text("old")
    main(*COMMAND, "--overwrite_output", "True")
    assert (folder / "texts.jsonl").read_bytes() == one_process[0]


def test_texts_from_nothing(folder, saved):
    main(*OPTIONS, "--num_texts", "7", "--batch_size", "3")
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    generators = [generate.text_generator(3, number) for number in range(7)]
    texts = saved[1](num_texts_per_prompt=7, generator=generators, **CALL).texts
    assert rows == [{"index": i, "prompt": None, "texts": [text]} for i, text in enumerate(texts)]
    assert len(set(texts)) == 7


def test_a_txt_file_and_another_column_hold_the_same_prompts(folder):
    (folder / "prompts.txt").write_text("\ufeffa b\r\n\n c [MASK]\n", encoding="utf-8")
    write_jsonl(folder / "other.jsonl", [{"question": "a b", "prompt": 1}, {"question": " c [MASK]"}])
    assert generate.read_prompts("prompts.txt", "prompt") == ["a b", " c [MASK]"]
    assert generate.read_prompts("other.jsonl", "question") == ["a b", " c [MASK]"]


def test_no_two_texts_of_a_run_have_the_same_seed():
    """CPU generators that agree in the lower 32 bits of their seeds draw the same numbers."""
    seeds = {generate.text_generator(0, number).initial_seed() for number in range(100_000)}
    assert len(seeds) == 100_000
    assert max(seeds) < 2**32
    assert generate.text_generator(-1, 5).initial_seed() not in seeds


def test_the_scheduler_is_the_pipelines_own_unless_another_is_asked_for(folder):
    pipe = TextDiffusionPipeline(toy_model(), toy_tokenizer(), ReMDMScheduler(strategy="cap", eta=0.5))
    pipe.to(torch.bfloat16).save_pretrained("remasking")
    args = generate.GenerateArguments(model_name_or_path="remasking", output_file="texts.jsonl")
    assert generate.load_pipeline(args).scheduler.config.eta == 0.5
    assert generate.load_pipeline(args).model.dtype == torch.bfloat16
    args.scheduler, args.dtype = "absorbing", "float32"
    assert type(generate.load_pipeline(args).scheduler) is AbsorbingStateScheduler
    assert generate.load_pipeline(args).model.dtype == torch.float32


def test_options_reach_the_call(folder, prompts, saved):
    main(*COMMAND[:-2], "--temperature", "0.5", "--top_k", "2", "--guidance_scale", "2", "--num_inference_steps", "9")
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_bytes().split(b"\n")[:-1]]
    options = {"temperature": 0.5, "top_k": 2, "guidance_scale": 2.0, "num_inference_steps": 9}
    output = saved[1](prompts[5], generator=generate.text_generator(3, 5), **CALL, **options)
    assert rows[5]["texts"] == output.texts


def test_prompts_may_be_sources(folder, prompts, saved):
    main(*COMMAND[:-2], "--input_type", "source")
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_bytes().split(b"\n")[:-1]]
    output = saved[1](source=prompts[5], generator=generate.text_generator(3, 5), **CALL)
    assert rows[5]["texts"] == output.texts


def test_a_warning_of_the_library_comes_once(folder, caplog):
    (folder / "whole.txt").write_text("a b\nb\nc a\na a\n")
    main(*OPTIONS[:2], "--prompts_file", "whole.txt", "--batch_size", "1")
    assert [record.getMessage()[:25] for record in caplog.records] == ["1 of 1 texts have no [MAS"]


WRONG = {
    "neither": ([], r"either `prompts_file` or `num_texts`, got None and None"),
    "both": (["--prompts_file", "prompts.jsonl", "--num_texts", "2"], r"got 'prompts.jsonl' and 2"),
    "no texts": (["--num_texts", "0"], r"`num_texts` must be an integer >= 1, got 0"),
    "no batch": (["--num_texts", "2", "--batch_size", "0"], r"`batch_size` must be an integer >= 1, got 0"),
    "no text for a prompt": ([*COMMAND, "--num_texts_per_prompt", "-1"], r"`num_texts_per_prompt` .* got -1"),
    "both numbers": (["--num_texts", "2", "--num_texts_per_prompt", "2"], r"_prompt` 2 needs `prompts_file`"),
    "a number out of range": (["--num_texts", "2", "--top_p", "3"], r"`top_p` must be .* got 3.0"),
    "guidance without prompts": (["--num_texts", "2", "--guidance_scale", "2"], r"2.0 needs a prompt"),
    "a scheduler without steps": (["--num_texts", "2", "--scheduler", "remdm"], r"`num_inference_steps`"),
    "another ending": (["--prompts_file", "prompts.csv"], r"must end with .txt or .jsonl, got 'prompts.csv'"),
    "no file": (["--prompts_file", "none.txt"], r"`prompts_file` 'none.txt' is no file"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_errors_before_anything_is_written(arguments, message, folder):
    with pytest.raises(ValueError, match=message):
        main(*OPTIONS, *arguments)
    assert not list(folder.glob("texts*"))


FILES = {
    "empty": ("x.txt", b"", r"`prompts_file` 'x.txt' has no prompt"),
    "blank": ("x.jsonl", b"\n \n", r"`prompts_file` 'x.jsonl' has no prompt"),
    "broken": ("x.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', r"'x.jsonl', line 3, is not JSON: Expecting"),
    "no column": ("x.jsonl", b'{"prompt": "a"}\n{"text": "b"}', r'line 2, .* `prompt_column` \'prompt\', got {"text"'),
    "no text": ("x.jsonl", b'{"prompt": 7}', r"line 1, must be an object with text"),
    "no object": ("x.jsonl", b'{"prompt": "a"}\n["prompt"]', r"line 2, must be an object with text"),
    "no UTF-8": ("x.txt", b"a\n\xe4\n", r"'x.txt' must be UTF-8"),
    "too long": ("x.txt", b"a\nb\n" + b"c " * 200, r"Prompt 2, 'c c .*': The canvas would have 218 tokens, .* 128"),
    "nothing to guide by": ("x.txt", b"a\n[MASK]", r"Prompt 1, '\[MASK\]': `guidance_scale` 2.0 needs a prompt"),
    "half a character": ("x.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}', r"Prompt 1, .*: TextEncodeInput"),
}


@pytest.mark.parametrize(("name", "content", "message"), FILES.values(), ids=FILES)
def test_wrong_prompts_are_errors_that_say_where(name, content, message, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        main(*OPTIONS, "--prompts_file", name, "--guidance_scale", "2")
    assert not list(folder.glob("texts*"))


def test_the_output_is_no_folder(folder):
    with pytest.raises(ValueError, match="`output_file` must be a file, got the folder 'saved'"):
        generate.main([*COMMAND, "--output_file", "saved", "--overwrite_output", "True"])
