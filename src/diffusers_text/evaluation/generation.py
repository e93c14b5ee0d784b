"""Texts for an evaluation: the same whatever batch or process they come from, and kept as they come."""

import hashlib
import json
from contextlib import nullcontext
from functools import partial

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from ..pipelines.pipeline_text_diffusion import TextDiffusionPipeline
from ..resuming import fingerprint, new_part, read_parts
from ..schedulers.sampling import check_positive_int


def text_generator(seed: int, number: int) -> torch.Generator:
    """The generator of the text `number` of a run."""
    # Of its seed a CPU generator takes 32 bits. Of 100,000 seeds hashed to 32 bits two are equal: these are counted.
    first = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")
    return torch.Generator().manual_seed((first + number) % 2**32)


def generate_texts(
    pipe,
    num_texts: int,
    *,
    sources: list[str] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    resume_file: str | None = None,
    **call_args,
) -> list[str]:
    r"""
    Texts from nothing or for sources, the work divided among accelerate's processes.

    Args:
        pipe ([`TextDiffusionPipeline`]): what generates.
        num_texts (`int`): how many, for each source where there are some.
        sources (`list[str]`, *optional*): what a model of pairs is given. The texts of a source stand side by side.
        batch_size (`int`, defaults to 16): texts at once.
        seed (`int`, defaults to 0): a text depends on it and on its number alone.
        resume_file (`str`, *optional*):
            Texts are kept beside it as they come; [`~resuming.remove_parts`] removes them.
        call_args: of the pipeline's `__call__`, without a prompt.

    Raises:
        ValueError: a number out of range, no source, or what the pipeline does not take.
    """
    check_positive_int("num_texts", num_texts)
    check_positive_int("batch_size", batch_size)
    if sources is not None and not sources:
        raise ValueError("`sources` is empty.")
    given = [None] * num_texts if sources is None else [source for source in sources for _ in range(num_texts)]
    state, found, part = PartialState(), {}, nullcontext(lambda line: None)
    if resume_file is not None:
        settings = {"seed": seed, **call_args, "pipeline": fingerprint(pipe)}
        if sources is not None:
            settings["sources"] = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        found = {line["number"]: line["text"] for line in read_parts(resume_file, settings)}
        state.wait_for_everyone()  # from here on parts change: all must have seen the same
        part = new_part(resume_file, settings)
    left = [number for number in range(len(given)) if number not in found]
    # Sources of a length go together, with little padding; the longest first: if memory does not suffice, then now.
    left.sort(key=lambda number: len(given[number] or ""), reverse=True)
    left = left[state.process_index :: state.num_processes]
    quiet = TextDiffusionPipeline(**pipe.components)  # one bar for all texts, not one a batch
    quiet.set_progress_bar_config(disable=True)
    progress_bar = pipe.progress_bar if state.is_main_process else partial(tqdm, disable=True)
    done = []
    with part as write, progress_bar(total=len(left)) as bar:
        bar.set_description("Generating")
        for start in range(0, len(left), batch_size):
            numbers = left[start : start + batch_size]
            generators = [text_generator(seed, number) for number in numbers]
            if sources is None:
                texts = quiet(num_texts_per_prompt=len(numbers), generator=generators, **call_args).texts
            else:
                texts = quiet(source=[given[number] for number in numbers], generator=generators, **call_args).texts
            for number, text in zip(numbers, texts):
                write({"number": number, "text": text})
                done.append((number, text))
            bar.update(len(numbers))
    found |= dict(gather_object(done))
    return [found[number] for number in range(len(given))]
