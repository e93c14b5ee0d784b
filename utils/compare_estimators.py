"""
How far estimates of the bound scatter at the same number of forward passes: the standard deviation of the bound of a
few held-out rows over many evaluations with noise of their own. The model and the corpus are those of the quickstart.

    python utils/compare_estimators.py --repeats 1000 --json estimators.json

All estimate the same bound, but for MDLM's with its cut of small times and the spindle's without its correction, and
agree within their errors; how much more passes each needs than the best is the ratio of variances.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from benchmark_sampling import find_in, print_table, write_json
from tqdm import tqdm
from transformers.utils import logging

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline, logits_at, maskable_tokens, pack_texts
from diffusers_text.evaluation.estimators import draw_estimates
from diffusers_text.noising import MASKS, TIMES, bound_terms, draw_noise, keyed_generator

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from quickstart import QuickstartArguments, load_texts


def plain(scheduler, sample, maskable, keys, draws, terms_of, stratified=False, raw=None, **kwargs):
    """Estimates of single draws, [batch, draws]; `stratified` over the rows of an evaluation, as MDLM's are."""
    nats = []
    firsts = [key for key in keys if key[1] == 0]  # the first row of each evaluation
    for draw in draws:
        if stratified:
            times = [
                scheduler.sample_timesteps(len(keys) // len(firsts), generator=keyed_generator(TIMES, *key, draw))
                for key in firsts
            ]
        else:
            times = [
                1 - torch.rand(1, generator=keyed_generator(TIMES, *key, draw), dtype=torch.float64) for key in keys
            ]
        generators = [keyed_generator(MASKS, *key, draw) for key in keys]
        noise = draw_noise(scheduler, sample, maskable, torch.cat(times), generators, **kwargs)
        nats.append(row_sums(terms_of(noise), len(sample), raw))
    return torch.stack(nats, dim=1)


def paired(scheduler, sample, maskable, keys, draws, terms_of, estimator, controlled):
    """Estimates of pairs of opposite draws, [batch, draws], with or without the losses of earlier pairs as control."""
    found = draw_estimates(scheduler, sample, maskable, keys, draws, terms_of, estimator)
    return torch.stack([nats if controlled else row_sums(terms, len(sample)) for _, terms, nats in found], dim=1)


def row_sums(terms, rows: int, raw: str | None = None) -> torch.Tensor:
    """Nats of each row, [rows]; `raw` drops what makes the spindle's loss a bound."""
    nats = terms.nats if raw is None else -terms.weights * terms.log_p
    return nats.new_zeros(rows, dtype=torch.float64).index_add(0, terms.rows, nats.double())


# Name, schedule, tilt, function.
ESTIMATORS = [
    ("MDLM's, cut at 1e-3", "linear", True, partial(plain, time_epsilon=1e-3, stratified=True)),
    ("MDLM's, no cut", "linear", True, partial(plain, stratified=True)),
    ("times, something masked", "linear", True, partial(plain, nonempty=True)),
    ("counts", "linear", True, partial(plain, by_count=True)),
    ("counts in opposite pairs", "linear", True, partial(paired, estimator="count", controlled=False)),
    ("counts in opposite pairs, control", "linear", True, partial(paired, estimator="count", controlled=True)),
    ("times", "spindle", True, partial(plain, stratified=True)),
    ("times, something masked", "spindle", True, partial(plain, nonempty=True)),
    ("in opposite pairs, control", "spindle", True, partial(paired, estimator="nonempty", controlled=True)),
    ("in opposite pairs, control, untilted", "spindle", False, partial(paired, estimator="nonempty", controlled=True)),
    ("something masked, uncorrected: no bound", "spindle", True, partial(plain, nonempty=True, raw="uncorrected")),
]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="outputs/quickstart", help="saved pipeline")
    parser.add_argument("--repeats", type=int, default=1000, help="evaluations of each estimator")
    parser.add_argument("--rows", type=int, default=8, help="held-out rows")
    parser.add_argument("--max_length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--num_draws", type=int, default=8, help="forward passes of an evaluation, an even number")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


@torch.no_grad()
def compare(pipe, rows: torch.Tensor, repeats: int, num_draws: int, report=lambda results: None) -> list[dict]:
    """The bound of the rows, [rows, seq], by each estimator, and how far it scatters; `report` gets what is there."""
    results = []
    for name, schedule, tilt, estimate in ESTIMATORS:
        scheduler = AbsorbingStateScheduler.from_config(pipe.scheduler.config, schedule=schedule, tilt=tilt)

        def terms_of(noise, scheduler=scheduler):
            logits = logits_at(pipe.model, noise.positions, input_ids=noise.noisy)
            return bound_terms(scheduler, logits, noise.positions, noise, overwrite_logits=True)

        bounds, start = [], time.perf_counter()
        each = 64 // len(rows)  # evaluations in a batch
        sample = rows.repeat(each, 1)
        maskable = maskable_tokens(sample, pipe.tokenizer)
        tokens = int(maskable[: len(rows)].sum())
        for repeat in tqdm(range(0, repeats, each), f"{schedule}: {name}"):
            keys = [(repeat + i // len(rows), i % len(rows)) for i in range(len(sample))]
            nats = estimate(scheduler, sample, maskable, keys, range(num_draws), terms_of)
            bounds.append(nats.mean(dim=1).view(each, len(rows)).sum(dim=1) / tokens)
        bounds = torch.cat(bounds)[:repeats]
        results.append(
            {
                "schedule": schedule,
                "estimator": name,
                "bound": bounds.mean().item(),
                "error": (bounds.std() / len(bounds) ** 0.5).item(),
                "deviation": bounds.std().item(),
                "seconds": (time.perf_counter() - start) / len(bounds),
            }
        )
        report(results)
    for schedule in ("linear", "spindle"):
        of_schedule = [row for row in results if row["schedule"] == schedule]
        best = min(row["deviation"] for row in of_schedule if "no bound" not in row["estimator"])
        for row in of_schedule:
            row["passes"] = (row["deviation"] / best) ** 2
    return results


def main():
    """Measures all estimators and reports them."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    pipe = TextDiffusionPipeline.from_pretrained(args.model_name_or_path)
    _, held_out, _ = load_texts(QuickstartArguments())
    rows = pack_texts(held_out, pipe.tokenizer, args.max_length)
    rows = rows[:: len(rows) // args.rows][: args.rows]

    def report(results):
        if args.json:
            write_json(args.json, vars(args) | {"rows_of_table": results})

    results = compare(pipe, rows, args.repeats, args.num_draws, report)
    report(results)
    device = find_in("/proc/cpuinfo", r"model name\s*: (.*)")
    print(f"\n{device}, {args.threads} threads, torch {torch.__version__}; {args.repeats} evaluations")
    print_table(results)


if __name__ == "__main__":
    main()
