"""
How long a training step takes, and how much memory. The steps share a model with random weights and take turns in one
process; a step is forward and backward, without the optimizer.

    python utils/benchmark_training.py --preset quick --json quick.json

- `ours`: `TextDiffusionTrainer`'s step, linear schedule, the bound at uniform times; the head runs at masked positions
  only.
- `ours_chunked`: the same with `head_chunk_size`; `ours_spindle`: with the spindle schedule.
- `full_logits`: the usual step of masked diffusion, cross-entropy over the logits of all positions, weighted where
  they were masked; the same masks as `ours`.
- `mlm`: masked language modelling at 15%, as transformers trains it.
- `encoder`: the encoder's forward and backward alone.
"""

import argparse
import tempfile
from collections.abc import Callable

import torch
from benchmark_sampling import SIZES, VOCAB_SIZE, find_in, make_model, measure, print_table, write_json
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

from diffusers_text import AbsorbingStateScheduler, TextDiffusionTrainer, TextDiffusionTrainingArguments
from diffusers_text.training.noise import training_noise

STEPS = ["ours", "ours_chunked", "ours_spindle", "full_logits", "mlm", "encoder"]
PRESETS = {"quick": ["minilm"], "full": ["minilm", "base"]}
CHUNK_SIZE = 128
# step / its baseline at most, by what is measured.
TARGETS = [
    ("ours", "full_logits", "seconds", 0.65),
    ("ours", "full_logits", "peak_mb_above_rest", 0.7),
    ("ours_chunked", "full_logits", "peak_mb_above_rest", 0.5),
    ("ours_chunked", "ours", "seconds", 1.2),
    ("ours_spindle", "ours", "seconds", 1.25),
]


def make_trainer(model, tokenizer, **kwargs) -> TextDiffusionTrainer:
    """A trainer whose steps are run one by one."""
    folder = tempfile.mkdtemp()
    schedule = kwargs.pop("schedule", "linear")
    args = TextDiffusionTrainingArguments(
        folder, max_length=128, schedule=schedule, objective="continuous", time_power=1.0, disable_tqdm=True, **kwargs
    )
    counts = None
    if schedule == "spindle":  # words by Zipf's law, and a text of them every 64 tokens or so
        counts = [0 if i in tokenizer.all_special_ids else 10**6 // (1 + i) for i in range(len(tokenizer))]
        counts[tokenizer.sep_token_id] = sum(counts) // 64
    scheduler = AbsorbingStateScheduler(schedule=schedule, token_counts=counts)
    return TextDiffusionTrainer(model, args, processing_class=tokenizer, scheduler=scheduler)


def make_batch(tokenizer, batch_size: int, length: int, device) -> dict[str, torch.Tensor]:
    """Rows of `[CLS]` and words, as packing gives them."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(len(tokenizer.all_special_ids), VOCAB_SIZE, (batch_size, length), generator=generator)
    input_ids[:, 0] = tokenizer.cls_token_id
    labels = input_ids.clone()
    labels[:, 0] = -100
    return {
        "input_ids": input_ids.to(device),
        "labels": labels.to(device),
        "rows_of_step": [*range(batch_size)],
    }


def trainer_step(trainer, batch) -> torch.Tensor:
    """The loss of a step of `trainer`, with gradients."""
    trainer.model.zero_grad()
    items = (batch["labels"] != -100).sum()
    return trainer.training_step(trainer.model, dict(batch), items)


def full_logits_step(model, batch, noise, items) -> torch.Tensor:
    """Cross-entropy of all positions, weighted by L / k where the row has k of its L tokens masked."""
    model.zero_grad()
    masked = noise.noisy != noise.sample
    weights = noise.maskable.sum(dim=1, keepdim=True) / masked.sum(dim=1, keepdim=True)
    logits = model(noise.noisy).logits  # [batch, seq, vocab]
    logits[..., model.config.mask_token_id] = -torch.inf
    nats = functional.cross_entropy(logits.flatten(0, 1), noise.sample.flatten(), reduction="none")
    loss = (nats.view_as(noise.sample)[masked] * weights.expand_as(masked)[masked]).sum() / items
    loss.backward()
    return loss.detach()


def mlm_step(model, batch, mask_token_id: int) -> torch.Tensor:
    """15% of the tokens masked, the mean cross-entropy of these over the logits of all positions."""
    model.zero_grad()
    chosen = (torch.rand(batch["input_ids"].shape, device=model.device) < 0.15) & (batch["labels"] != -100)
    labels = batch["input_ids"].masked_fill(~chosen, -100)
    loss = model(batch["input_ids"].masked_fill(chosen, mask_token_id), labels=labels).loss
    loss.backward()
    return loss.detach()


def encoder_step(model, batch) -> torch.Tensor:
    """The mean square of the last hidden states."""
    model.zero_grad()
    loss = model.bert(batch["input_ids"]).last_hidden_state.square().mean()
    loss.backward()
    return loss.detach()


def make_steps(size: str, batch_size: int, length: int, device: str) -> tuple[dict[str, Callable], dict]:
    """The steps of a model of `size` by name, ready to be timed, and the models that they leave gradients in."""
    model, tokenizer = make_model(size, device)
    model.config.mask_token_id = tokenizer.mask_token_id
    positions = model.config.max_position_embeddings
    stock = BertForMaskedLM(BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=positions, **SIZES[size]))
    stock.to(device)
    model.train()
    stock.train()
    batch = make_batch(tokenizer, batch_size, length, device)
    settings = {"per_device_train_batch_size": batch_size, "use_cpu": device == "cpu"}
    ours = make_trainer(model, tokenizer, **settings)
    chunked = make_trainer(model, tokenizer, head_chunk_size=CHUNK_SIZE, **settings)
    spindle = make_trainer(model, tokenizer, schedule="spindle", **settings)
    maskable, rows = batch["labels"] != -100, batch["rows_of_step"]
    noise = training_noise(ours.pipeline.scheduler, batch["input_ids"], maskable, ours.args, 0, rows, batch_size)
    steps = {
        "ours": lambda: trainer_step(ours, batch),
        "ours_chunked": lambda: trainer_step(chunked, batch),
        "ours_spindle": lambda: trainer_step(spindle, batch),
        "full_logits": lambda: full_logits_step(model, batch, noise, maskable.sum()),
        "mlm": lambda: mlm_step(stock, batch, tokenizer.mask_token_id),
        "encoder": lambda: encoder_step(model, batch),
    }
    return steps, {name: stock if name == "mlm" else model for name in steps}


def measure_size(size: str, args) -> list[dict]:
    """A row for each step of a model of `size`."""
    steps, _ = make_steps(size, args.batch_size, args.length, args.device)
    for step in steps.values():  # a first call is slower than the others
        step()
    measured = measure(steps, args.repeats, args.device, size)
    return [
        {
            "step": name,
            "size": size,
            "batch": args.batch_size,
            "length": args.length,
            "seconds": seconds,
            "peak_mb_above_rest": peak,
            "tokens_per_second": args.batch_size * args.length / seconds,
        }
        for name, (seconds, peak) in measured.items()
    ]


def describe_targets(rows: list[dict]) -> list[str]:
    """The ratios that were aimed at, of one size."""
    by_name = {row["step"]: row for row in rows}
    lines = []
    for name, baseline, figure, target in TARGETS:
        ratio = by_name[name][figure] / by_name[baseline][figure]
        verdict = "met" if ratio <= target else "missed"
        lines.append(f"{rows[0]['size']}: {name}/{baseline} {figure} {ratio:.2f} <= {target}: {verdict}")
    return lines


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="quick", help="which sizes to run")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each step, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def main(arguments: list[str] | None = None):
    """Runs a preset and reports it."""
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    device = find_in("/proc/cpuinfo", r"model name\s*: (.*)") if args.device == "cpu" else torch.cuda.get_device_name()
    results, lines = {"device": device or args.device, "threads": args.threads, "rows": []}, []
    for size in PRESETS[args.preset]:
        rows = measure_size(size, args)
        results["rows"] += rows
        lines += describe_targets(rows)
        if args.json:
            write_json(args.json, results)
    print(f"\n{results['device']}, {args.threads} threads, torch {torch.__version__}")
    print_table(results["rows"])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
