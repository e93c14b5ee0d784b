"""Texts of a model that is being trained."""

from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..data.special_tokens import terminator_id


def sample_texts(pipeline, args, eval_dataset) -> list[str]:
    r"""
    Texts from nothing, each by a seed of its own; or new ends for the evaluation's first rows, where these begin with
    what is given.

    Args:
        pipeline ([`TextDiffusionPipeline`]): with the model that is trained.
        args ([`TextDiffusionTrainingArguments`]): `eval_samples`, `max_length` and `fill_rows` count.
        eval_dataset: rows with `input_ids`, a dictionary of datasets of them, or None.
    """
    generators = [torch.Generator().manual_seed(i) for i in range(args.eval_samples)]
    dataset = next(iter(eval_dataset.values())) if isinstance(eval_dataset, dict) else eval_dataset
    rows = [row for row, _ in zip(dataset or [], generators)]
    if not rows or "prompt_length" not in rows[0]:
        return pipeline(num_texts_per_prompt=args.eval_samples, generator=generators).texts
    return [_new_ending(pipeline, args, row, generator) for row, generator in zip(rows, generators)]


def _new_ending(pipeline, args, row, generator) -> str:
    """What is given in a row, and what the model makes of the rest of its length."""
    ids, given = torch.as_tensor(row["input_ids"]).long(), row["prompt_length"]
    length = args.max_length if args.fill_rows else len(ids)
    inputs = {"input_ids": torch.cat([ids[:given], ids[-1:]])}
    if "token_type_ids" in row:
        types = torch.as_tensor(row["token_type_ids"]).long()
        inputs["token_type_ids"] = torch.cat([types[:given], types[-1:]])
    gen_length = max(1, length - given - 1)
    output = pipeline(**inputs, gen_length=gen_length, generator=generator, output_type="seq")
    tokenizer, new = pipeline.tokenizer, output.sequences[0][given:].tolist()
    terminator = terminator_id(tokenizer)
    new = new[: new.index(terminator)] if terminator in new else new
    return f"{tokenizer.decode(ids[:given], skip_special_tokens=True)} => {tokenizer.decode(new)}"


def write_samples(texts: list[str], folder: Path, step: int):
    """Prints the texts and writes them to `step-{step}.txt`, whole or not at all."""
    folder.mkdir(exist_ok=True)
    temporary = folder / f".step-{step}.txt"
    temporary.write_text("\n".join(texts) + "\n", encoding="utf-8")
    temporary.replace(folder / f"step-{step}.txt")
    for text in texts:
        tqdm.write(f"  * {text}")
