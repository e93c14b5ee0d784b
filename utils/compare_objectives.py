"""
What the ways of drawing noise and weighing it do to training: the noise of the gradient, and the held-out bound after
the same number of steps. The model and the corpus are those of the quickstart.

    python utils/compare_objectives.py --max_steps 800 --seeds 2 --json objectives.json

The noise of a gradient is its variance over draws of the noise, for the same rows, over the square of its mean. The
bound is that in continuous time under the linear schedule for all, with the averaged weights.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from benchmark_sampling import find_in, print_table, write_json
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import logging

from diffusers_text import TextDiffusionTrainer, TextDiffusionTrainingArguments, load_denoiser, pack_texts

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from quickstart import QuickstartArguments, default_checkpoint, load_texts

BOUND = {"objective": "continuous"}
VARIANTS = {
    "mlm": {},
    "mlm, independent": {"mask_sampling": "independent"},
    "mlm, spindle": {"schedule": "spindle"},
    "continuous": BOUND,
    "continuous, power 1": {**BOUND, "time_power": 1.0},
    "continuous, independent": {**BOUND, "mask_sampling": "independent"},
    "continuous, independent, power 1": {**BOUND, "mask_sampling": "independent", "time_power": 1.0},
    "continuous, independent, power 1, cut at 0.05": {
        **BOUND,
        "mask_sampling": "independent",
        "time_power": 1.0,
        "time_epsilon": 0.05,
    },
    "continuous, cosine, independent, power 1": {
        **BOUND,
        "schedule": "cosine",
        "mask_sampling": "independent",
        "time_power": 1.0,
    },
    "continuous, spindle": {**BOUND, "schedule": "spindle"},
    "continuous, spindle, power 1": {**BOUND, "schedule": "spindle", "time_power": 1.0},
    "discrete, T 2048": {"objective": "discrete"},
    "discrete, no cross-entropy, power 1": {"objective": "discrete", "cross_entropy_weight": 0.0, "time_power": 1.0},
}


def make_trainer(model, tokenizer, rows, held_out, args, seed, **settings) -> TextDiffusionTrainer:
    """A trainer with the quickstart's settings but for those of a variant."""
    training_args = TextDiffusionTrainingArguments(
        tempfile.mkdtemp(),
        max_length=args.max_length,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.max_steps // 20,
        weight_decay=0.01,
        adam_beta2=0.98,
        save_strategy="no",
        eval_samples=0,
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=args.max_steps,
        seed=seed,
        **settings,
    )
    return TextDiffusionTrainer(
        model, training_args, processing_class=tokenizer, train_dataset=rows, eval_dataset=held_out
    )


def gradient_noise(trainer, batch, draws: int) -> tuple[float, float]:
    """The variance of the gradient over the square of its mean, and the standard deviation of the loss, in nats."""
    model, losses, total, squares = trainer.model, [], None, 0.0
    for module in model.modules():  # the noise of dropout is not asked for
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for step in range(draws):
        trainer.state.global_step = step
        model.zero_grad()
        losses.append(trainer.training_step(model, dict(batch), (batch["labels"] != -100).sum()).item())
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
        total = gradient if total is None else total + gradient
        squares += gradient.square().sum().item()
    mean_square = (total / draws).square().sum().item()
    variance = (squares / draws - mean_square) * draws / (draws - 1)
    return variance / (mean_square - variance / draws), statistics.stdev(losses)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="which to compare")
    parser.add_argument("--max_steps", type=int, default=800, help="steps of each training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each variant")
    parser.add_argument("--draws", type=int, default=64, help="draws of the noise for the gradient")
    parser.add_argument("--batch_size", type=int, default=32, help="rows of a step")
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="its peak")
    parser.add_argument("--eval_rows", type=int, default=512, help="held-out rows")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def main():
    """Measures all variants and reports them."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = default_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts, held_out_texts, _ = load_texts(QuickstartArguments())
    rows, held_out = (
        Dataset.from_dict({"input_ids": pack_texts(part, tokenizer, args.max_length)[:limit].tolist()})
        for part, limit in ((texts, None), (held_out_texts, args.eval_rows))
    )
    results = {
        "device": find_in("/proc/cpuinfo", r"model name\s*: (.*)"),
        "threads": args.threads,
        "rows": [{"variant": name, "bounds": []} for name in args.variants],
    }
    trained = None
    for seed in range(args.seeds):
        for row in results["rows"]:
            settings = VARIANTS[row["variant"]]
            model = load_denoiser(checkpoint)
            trainer = make_trainer(model, tokenizer, rows, held_out, args, seed, **settings)
            trainer.train()
            if trainer.was_stopped:
                sys.exit("stopped by SIGTERM")
            with trainer.ema_weights():
                judge = make_trainer(model, tokenizer, rows, held_out, args, seed)
                figures = judge.evaluate()
                trained = trained or {name: tensor.clone() for name, tensor in model.state_dict().items()}
            row["bounds"].append(figures["eval_bound"])
            row["standard_error"] = figures["eval_bound_standard_error"]
            print(f"{row['variant']}, seed {seed}: {figures['eval_bound']:.4f}", flush=True)
            if seed == 0:  # at the start, and where the first variant's training ended
                batch = trainer.data_collator([rows[i] for i in range(args.batch_size)])
                batch["rows_of_step"] = [*range(args.batch_size)]
                for place, weights in (("start", load_denoiser(checkpoint).state_dict()), ("end", trained)):
                    model.load_state_dict(weights)
                    noise, deviation = gradient_noise(trainer, batch, args.draws)
                    row[f"gradient_noise_{place}"], row[f"loss_deviation_{place}"] = noise, deviation
            if args.json:
                write_json(args.json, results)
    print(f"\n{results['device']}, {args.threads} threads, torch {torch.__version__}")
    print_table(
        [
            {"variant": row["variant"], "bound": statistics.mean(row["bounds"])}
            | {name: value for name, value in row.items() if name not in ("variant", "bounds")}
            for row in results["rows"]
        ]
    )


if __name__ == "__main__":
    main()
