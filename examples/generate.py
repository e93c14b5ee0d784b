"""
Generates texts for many prompts from a saved pipeline, on one or several processes.

    python examples/generate.py --model_name_or_path outputs/run --prompts_file prompts.jsonl --output_file texts.jsonl
    accelerate launch --num_processes 4 examples/generate.py --model_name_or_path outputs/run \
        --prompts_file prompts.jsonl --output_file texts.jsonl

A text depends on the seed and its number, not on processes or batches. Each process writes what is finished into a
part file next to the output; the same command, started again, goes on from there. `--help` lists all options.
"""

import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline
from diffusers_text.evaluation.generation import text_generator
from diffusers_text.resuming import fingerprint, new_part, read_parts, remove_parts

SCHEDULERS = {
    "absorbing": AbsorbingStateScheduler,
    "confidence": ConfidenceUnmaskingScheduler,
    "remdm": ReMDMScheduler,
}


@dataclass
class GenerateArguments:
    model_name_or_path: str = field(metadata={"help": "Saved pipeline, folder or Hub id."})
    output_file: str = field(metadata={"help": "File to write: a line of JSON for each prompt, in their order."})
    overwrite_output: bool = field(default=False, metadata={"help": "Replace an output file that exists."})
    prompts_file: str | None = field(
        default=None, metadata={"help": "Prompts to continue or fill: .txt (one a line) or .jsonl (an object a line)."}
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Where the prompt is in each object of a .jsonl."})
    input_type: Literal["prompt", "source"] = field(
        default="prompt",
        metadata={"help": "What the prompts are: beginnings of texts, or the sources of a model trained on pairs."},
    )
    num_texts: int | None = field(default=None, metadata={"help": "Texts from nothing, in place of prompts."})
    num_texts_per_prompt: int = field(default=1, metadata={"help": "Texts for each prompt."})
    batch_size: int = field(default=16, metadata={"help": "Texts at once in each process."})
    seed: int = field(default=0, metadata={"help": "Same seed, same texts."})
    scheduler: Literal["absorbing", "confidence", "remdm"] | None = field(
        default=None,
        metadata={"help": "Strategy, with its default settings and the model's noise; by default the pipeline's own."},
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Type of the weights; auto is the one they are saved in."}
    )


@dataclass
class CallArguments:
    """What goes to the pipeline's call as it is."""

    gen_length: int | None = field(default=None, metadata={"help": "Tokens to generate after the prompt."})
    num_inference_steps: int | None = field(
        default=None, metadata={"help": "Steps; by default as many as it takes. remdm needs a number."}
    )
    block_length: int | None = field(default=None, metadata={"help": "Write this many tokens at a time."})
    temperature: float | None = field(default=None, metadata={"help": "0 takes the most probable tokens."})
    top_k: int | None = field(default=None, metadata={"help": "Draw from that many most probable tokens."})
    top_p: float | None = field(default=None, metadata={"help": "Draw from the fewest tokens of that probability."})
    guidance_scale: float = field(default=1.0, metadata={"help": "Above 1 follows the prompt more closely."})
    eos_penalty: float = field(default=0.0, metadata={"help": "Nats off the terminator, for longer texts."})


def check_arguments(args: GenerateArguments):
    """Raises a `ValueError` for what can be known to be wrong before anything is read."""
    if (args.prompts_file is None) == (args.num_texts is None):
        raise ValueError(
            f"Pass either `prompts_file` or `num_texts`, got {args.prompts_file!r} and {args.num_texts!r}."
        )
    for name in ("num_texts", "num_texts_per_prompt", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be an integer >= 1, got {value}.")
    if args.num_texts is not None and args.num_texts_per_prompt != 1:
        raise ValueError(
            f"`num_texts_per_prompt` {args.num_texts_per_prompt} needs `prompts_file`; `num_texts` alone says how many"
            " texts there are without prompts."
        )
    output = Path(args.output_file)
    if output.is_dir():
        raise ValueError(f"`output_file` must be a file, got the folder {args.output_file!r}.")
    if output.exists() and not args.overwrite_output:
        raise ValueError(
            f"`output_file` {args.output_file!r} exists: choose another, or replace it with --overwrite_output True."
        )


def read_prompts(prompts_file: str, prompt_column: str) -> list[str]:
    """The prompts of a .txt or .jsonl file, blank lines left out."""
    path = Path(prompts_file)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"`prompts_file` must end with .txt or .jsonl, got {prompts_file!r}.")
    if not path.is_file():
        raise ValueError(f"`prompts_file` {prompts_file!r} is no file.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines also splits at characters inside of JSON
    except UnicodeDecodeError as error:
        raise ValueError(f"`prompts_file` {prompts_file!r} must be UTF-8: {error}.") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = line
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"`prompts_file` {prompts_file!r}, line {number}, is not JSON: {error}.") from None
            prompt = row.get(prompt_column) if isinstance(row, dict) else None
            if not isinstance(prompt, str):
                raise ValueError(
                    f"`prompts_file` {prompts_file!r}, line {number}, must be an object with text in the"
                    f" `prompt_column` {prompt_column!r}, got {line[:80]}"
                )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"`prompts_file` {prompts_file!r} has no prompt.")
    return prompts


def load_pipeline(args: GenerateArguments) -> TextDiffusionPipeline:
    """The pipeline on the CPU, with the scheduler that was asked for."""
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    pipe = TextDiffusionPipeline.from_pretrained(args.model_name_or_path, dtype=dtype)
    if args.scheduler is not None:
        pipe.scheduler = SCHEDULERS[args.scheduler].from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def output_settings(
    args: GenerateArguments, call_args: CallArguments, prompts: list[str | None], pipe: TextDiffusionPipeline
) -> dict:
    """All that the texts depend on: what a part file begins with."""
    names = ("model_name_or_path", "dtype", "scheduler", "seed", "input_type", "num_texts_per_prompt")
    return {
        **{name: getattr(args, name) for name in names},
        **asdict(call_args),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "pipeline": fingerprint(pipe),
    }


def check_prompts(
    pipe: TextDiffusionPipeline, prompts: list[str | None], numbers: list[int], input_type: str, call_args: dict
):
    """Raises the pipeline's error for the first of the `numbers` whose prompt it does not take."""
    for prompt, number in {prompts[number]: number for number in sorted(numbers, reverse=True)}.items():
        try:
            pipe.stream(**{input_type: prompt}, **call_args)  # checks at once, and generates when it is read
        except (TypeError, ValueError) as error:
            raise ValueError(f"Prompt {number}, {str(prompt)[:60]!r}: {error}") from error


def write_texts(
    pipe: TextDiffusionPipeline,
    prompts: list[str | None],
    numbers: list[int],
    args: GenerateArguments,
    call_args: dict,
    write,
    is_main_process: bool,
):
    """Generates the texts of the prompts with these `numbers`, and calls `write` with a row as each is finished."""
    rows = [(number, text) for number in numbers for text in range(args.num_texts_per_prompt)]
    texts = defaultdict(list)
    with tqdm(total=len(numbers), unit=" prompts", disable=not is_main_process) as progress_bar:
        for start in range(0, len(rows), args.batch_size):
            # The library's warnings would be the same in each batch and process.
            level = logging.WARNING if is_main_process and start == 0 else logging.ERROR
            logging.getLogger("diffusers_text").setLevel(level)
            batch = rows[start : start + args.batch_size]
            generators = [
                text_generator(args.seed, number * args.num_texts_per_prompt + text) for number, text in batch
            ]
            if args.prompts_file is None:
                output = pipe(num_texts_per_prompt=len(batch), generator=generators, **call_args)
            else:
                given = {args.input_type: [prompts[number] for number, _ in batch]}
                output = pipe(**given, generator=generators, **call_args)
            for (number, _), text in zip(batch, output.texts):
                texts[number].append(text)
                if len(texts[number]) == args.num_texts_per_prompt:
                    row = {"index": number, "prompt": prompts[number], "texts": texts.pop(number)}
                    write(row)
                    progress_bar.update()


def merge_parts(output_file: str, settings: dict, num_prompts: int):
    """Writes all lines into `output_file` in the order of the prompts and removes the parts."""
    finished = {row["index"]: row for row in read_parts(output_file, settings)}
    if len(finished) < num_prompts:
        raise RuntimeError(
            f"{num_prompts - len(finished)} of {num_prompts} prompts are missing in {output_file}.part-*, as if"
            " somebody had removed a part. Start the same command again to generate them."
        )
    temporary = Path(f"{output_file}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(finished[number], ensure_ascii=False) + "\n" for number in range(num_prompts))
    os.replace(temporary, output_file)
    remove_parts(output_file)


def main(arguments: list[str] | None = None):
    args, call_args = HfArgumentParser((GenerateArguments, CallArguments)).parse_args_into_dataclasses(arguments)
    check_arguments(args)
    prompts = [None] * (args.num_texts or 0)
    if args.prompts_file is not None:
        prompts = read_prompts(args.prompts_file, args.prompt_column)

    # accelerate sees several processes without an accelerator only when told to use the CPU. Processes that are done
    # wait for the others, which may take days.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
    disable_progress_bar()
    with state.main_process_first():  # it downloads
        pipe = load_pipeline(args)
    settings = output_settings(args, call_args, prompts, pipe)
    finished = {row["index"] for row in read_parts(args.output_file, settings)}
    left = [number for number in range(len(prompts)) if number not in finished]
    if finished and state.is_main_process:
        print(f"{len(finished)} of {len(prompts)} prompts were finished before.")

    # Prompts of a length go together, without padding. The longest come first: if memory does not suffice, then now.
    left.sort(key=lambda number: len(prompts[number] or ""), reverse=True)
    numbers = left[state.process_index :: state.num_processes]
    logging.getLogger("diffusers_text").setLevel(logging.ERROR)
    check_prompts(pipe, prompts, numbers, args.input_type, asdict(call_args))
    state.wait_for_everyone()  # from here on parts change: all must have seen the same

    start = time.perf_counter()
    pipe.to(state.device)
    with new_part(args.output_file, settings) as write:
        write_texts(pipe, prompts, numbers, args, asdict(call_args), write, state.is_main_process)
    state.wait_for_everyone()
    if state.is_main_process:
        merge_parts(args.output_file, settings, len(prompts))
        new, seconds = len(left) * args.num_texts_per_prompt, time.perf_counter() - start
        total = len(prompts) * args.num_texts_per_prompt
        print(
            f"{total} texts in {args.output_file}, {new} of them generated now in {seconds:.1f} s,"
            f" {new / seconds:.1f} texts/s"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    main()
