"""
Quality beside speed: what each strategy of sampling writes with the quickstart's model, and what it costs.

    python utils/compare_strategies.py --json strategies.json --plot strategies.png

Every strategy writes the same number of texts from nothing, in one batch and with the same seed, at 4, 8, 16, 32, 64
and as many steps as it likes; ReMDM, which needs a number, at 128 in place of the last. With blocks the steps are
shared out over them, so that they count for the whole text. Of the new tokens of each text, terminators included:

- `entropy`: of the unigrams of one text, in nats, the mean over texts (as in ReMDM's paper)
- `distinct_2`: different bigrams over all bigrams of all texts
- `repetition`: share of tokens that equal one of the 4 tokens before them
- `bound`: the model's own continuous-time bound of the texts under its own scheduler, in nats per token, with the same
  noise for all strategies; far below that of held-out text means texts that the model finds too easy

`forward_passes` are those of one text, the mean over texts: rows that rest or only run the head again do not count.
`tokens` is the mean length. Texts in blocks end at their first terminator; as shorter texts have a lower entropy,
their figures compare with each other only.
"""

import json
import logging
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

from diffusers_text import (
    AbsorbingStateScheduler,
    ConfidenceUnmaskingScheduler,
    ReMDMScheduler,
    TextDiffusionPipeline,
    continuous_time_bound,
    maskable_tokens,
    pack_texts,
)
from diffusers_text.evaluation.ngrams import distinct, entropy

STEPS = [4, 8, 16, 32, 64, None]
REMDM_STEPS = [4, 8, 16, 32, 64, 128]
WINDOW = 4  # tokens back that a token counts as repeated from
PLOTTED = {"bound": "bound under the model, nats per token", "distinct_2": "distinct-2"}


@dataclass
class CompareArguments:
    model: str = field(default="outputs/quickstart", metadata={"help": "Saved pipeline, folder or Hub id."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Held-out text to compare with, as in examples/quickstart.py."}
    )
    num_texts: int = field(default=64, metadata={"help": "Texts of each strategy, written in one batch."})
    gen_length: int = field(default=62, metadata={"help": "Tokens in a text; the quickstart trained on 62 and 2."})
    bound_draws: int = field(default=8, metadata={"help": "Draws of the noise, two or more, for the bound."})
    num_threads: int = field(default=2, metadata={"help": "CPU threads."})
    seed: int = field(default=0, metadata={"help": "Same seed, same texts."})
    json: str | None = field(default=None, metadata={"help": "File for the results."})
    plot: str | None = field(default=None, metadata={"help": "File for the plot, .png or .svg."})


class Strategy(NamedTuple):
    """A scheduler and how it is called. The plot joins strategies that differ in their setting only."""

    family: str
    name: str
    scheduler: AbsorbingStateScheduler
    steps: list[int | None] = STEPS
    setting: str = ""
    block_length: int | None = None


def make_strategies(config) -> list[Strategy]:
    """What is compared, for a model whose scheduler has the config `config`."""
    ancestral, confidence = AbsorbingStateScheduler.from_config, ConfidenceUnmaskingScheduler.from_config
    strategies = [
        Strategy("ancestral", f"own schedule ({config.schedule})", ancestral(config)),
        Strategy("ancestral", "linear", ancestral(config, schedule="linear")),
        Strategy("ancestral", "DiffusionBERT, top-k 30", ancestral(config, schedule="spindle", top_k=30)),
        Strategy("confidence", "probability", confidence(config)),
        Strategy("confidence", "margin", confidence(config, criterion="margin")),
        Strategy("confidence", "entropy", confidence(config, criterion="entropy")),
        Strategy("confidence", "blocks of 16", confidence(config), block_length=16),
    ]
    for value in (0.5, 0.9):
        scheduler = confidence(config, rule="threshold", threshold=value)
        strategies.append(Strategy("confidence", "threshold", scheduler, [None], str(value)))
    for value in (0.1, 1.0):
        scheduler = confidence(config, rule="entropy_bound", criterion="entropy", entropy_bound=value)
        strategies.append(Strategy("confidence", "entropy bound", scheduler, [None], str(value)))
    for name in ("cap", "rescale", "confidence", "loop"):
        strategies.append(Strategy("ReMDM", name, ReMDMScheduler.from_config(config, strategy=name), REMDM_STEPS))
    return strategies


def repetition(texts: list[list[int]]) -> float:
    """Share of the tokens of `texts` that equal one of the `WINDOW` tokens before them."""
    repeated = [token in tokens[max(0, i - WINDOW) : i] for tokens in texts for i, token in enumerate(tokens)]
    return statistics.fmean(repeated)


@torch.no_grad()
def bound_of_texts(pipe, scheduler, texts: list[list[int]], length: int, draws: int, seed: int) -> tuple[float, float]:
    """
    The bound in nats per token under `scheduler`, the mean of several draws of the noise, and its standard error.
    Texts shorter than `length` are padded to it, so that the same seed means the same noise.
    """
    rows = torch.full((len(texts), 1 + length), pipe.tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(rows)
    for i, tokens in enumerate(texts):
        row = torch.tensor([pipe.tokenizer.cls_token_id, *tokens])  # as the quickstart trains and measures
        rows[i, : len(row)] = row
        attention_mask[i, : len(row)] = 1
    maskable = maskable_tokens(rows, pipe.tokenizer, attention_mask)
    generator, bounds = torch.Generator().manual_seed(seed), torch.zeros(draws, dtype=torch.float64)
    for draw in range(draws):
        all_times = scheduler.sample_timesteps(len(rows), generator=generator)
        for batch in torch.arange(len(rows)).split(32):
            clean, times = rows[batch], all_times[batch]
            noisy = scheduler.add_noise(clean, times, maskable=maskable[batch], generator=generator)
            positions = (noisy.flatten() == scheduler.mask_token_id).nonzero().flatten()
            logits = pipe.model(noisy, attention_mask=attention_mask[batch], positions_to_predict=positions).logits
            nats = continuous_time_bound(scheduler, logits, clean, noisy, times, positions=positions, reduction="none")
            bounds[draw] += nats.double().sum()
    bounds /= maskable.sum()
    return bounds.mean().item(), bounds.std().item() / math.sqrt(draws)


def measure_texts(pipe, scheduler, texts: list[list[int]], args: CompareArguments) -> dict:
    """All that is measured of texts, wherever they come from."""
    bound, error = bound_of_texts(pipe, scheduler, texts, args.gen_length, args.bound_draws, args.seed)
    return {
        "tokens": statistics.fmean(map(len, texts)),
        "entropy": entropy(texts),
        "distinct_2": distinct(texts, 2),
        "repetition": repetition(texts),
        "bound": bound,
        "bound_error": error,
    }


def generate(pipe, strategy: Strategy, steps: int | None, args: CompareArguments) -> tuple[list[list[int]], dict]:
    """The new tokens of each text, and what they cost."""
    pipe.scheduler = strategy.scheduler
    if steps is not None and strategy.block_length is not None:
        steps = max(1, steps // math.ceil(args.gen_length / strategy.block_length))
    rows = []  # of each forward pass: what the embeddings give, as the last layer gives less
    handle = pipe.model.bert.embeddings.register_forward_hook(lambda *call: rows.append(len(call[2])))
    start = time.perf_counter()
    output = pipe(
        gen_length=args.gen_length,
        num_inference_steps=steps,
        block_length=strategy.block_length,
        num_texts_per_prompt=args.num_texts,
        generator=torch.Generator().manual_seed(args.seed),
        output_type="seq",
    )
    seconds = time.perf_counter() - start
    handle.remove()
    texts = [sequence[1 : 1 + args.gen_length].tolist() for sequence in output.sequences]  # the start token is given
    return texts, {"forward_passes": sum(rows) / args.num_texts, "seconds": seconds}


def real_texts(tokenizer, args: CompareArguments) -> list[list[int]]:
    """Held-out text in pieces of the same length, from all over the corpus as far as it goes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from quickstart import QuickstartArguments, load_texts

    _, held_out, _ = load_texts(QuickstartArguments(dataset_name=args.dataset_name))
    rows = pack_texts(held_out, tokenizer, 1 + args.gen_length)
    return rows[:: max(1, len(rows) // args.num_texts), 1:][: args.num_texts].tolist()


def compare(pipe, args: CompareArguments) -> dict:
    """Runs all strategies; the results, which --json gets after each, so that an interruption leaves what there is."""
    own = pipe.scheduler
    real = measure_texts(pipe, own, real_texts(pipe.tokenizer, args), args)
    results = {"settings": asdict(args), "torch": torch.__version__, "real_text": real, "rows": []}
    strategies = make_strategies(own.config)
    generate(pipe, strategies[0], 1, args)  # a model's first call is slower than the others
    for strategy in strategies:
        for steps in strategy.steps:
            texts, cost = generate(pipe, strategy, steps, args)
            row = {"family": strategy.family, "strategy": strategy.name, "setting": strategy.setting, "steps": steps}
            results["rows"].append({**row, **cost, **measure_texts(pipe, own, texts, args)})
            if args.json:
                write_json(args.json, results)
            print(f"{strategy.family}: {strategy.name} {strategy.setting}, {steps} steps", file=sys.stderr)
    pipe.scheduler = own
    return results


def write_json(path: str, results: dict):
    """Writes the file as a whole or not at all."""
    Path(f"{path}.tmp").write_text(json.dumps(results, indent=2) + "\n")
    os.replace(f"{path}.tmp", path)


def markdown_table(results: dict) -> str:
    """A row for each run, and one for the real text."""
    lines = [
        "| strategy | steps | passes | seconds | tokens | entropy | distinct-2 | repetition | bound |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    runs = ["| held-out text | | | |"]
    for row in results["rows"]:
        name = f"{row['family']}: {row['strategy']} {row['setting']}".strip()
        runs.append(f"| {name} | {row['steps']} | {row['forward_passes']:.0f} | {row['seconds']:.1f} |")
    for run, row in zip(runs, [results["real_text"], *results["rows"]]):
        metrics = f"{row['tokens']:.0f} | {row['entropy']:.2f} | {row['distinct_2']:.2f} | {row['repetition']:.2f}"
        lines.append(f"{run} {metrics} | {row['bound']:.2f} ± {row['bound_error']:.2f} |")
    return "\n".join(lines)


def spread(heights: list[float], gap: float, top: float) -> list[float]:
    """`heights` moved `gap` apart in the same order, the uppermost not above `top`."""
    placed, last = list(heights), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        placed[i] = last = max(heights[i], last + gap)
    return [height - max(0.0, last - top) for height in placed]


def draw_panel(axis, rows: list[dict], metric: str, real: float, limits: tuple[float, float], label_at: float):
    """`metric` against forward passes, a labelled line for each strategy of one family and one for the real text."""
    lines = {"held-out text": [(1e-3, real), (0.75 * label_at, real)]}
    for row in rows:
        lines.setdefault(row["strategy"], []).append((row["forward_passes"], row[metric]))
    ends = [max(points) for points in lines.values()]
    heights = spread([end[1] for end in ends], 0.055 * (limits[1] - limits[0]), limits[1])
    for i, (name, points) in enumerate(lines.items()):
        color, style = (f"C{i - 1}", "o-") if i else ("0.4", "--")
        axis.plot(*zip(*sorted(points)), style, markersize=4, color=color)
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5}
        axis.annotate(name, ends[i], (label_at, heights[i]), va="center", color=color, size=8.5, arrowprops=arrow)


def draw_plot(path: str, results: dict):
    """A column of panels for each family of strategies, a row for each of `PLOTTED`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    rows, passes = results["rows"], [row["forward_passes"] for row in results["rows"]]
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure = Figure(figsize=(5 * len(families), 8), layout="constrained")
    axes = figure.subplots(len(PLOTTED), len(families), sharex=True, sharey="row", squeeze=False)
    for metric, line_of_axes in zip(PLOTTED, axes):
        values = [row[metric] for row in rows] + [results["real_text"][metric]]
        margin = 0.06 * (max(values) - min(values)) + 1e-9
        limits = (min(values) - margin, max(values) + margin)
        for family, axis in zip(families, line_of_axes):
            members = [row for row in rows if row["family"] == family]
            draw_panel(axis, members, metric, results["real_text"][metric], limits, 1.35 * max(passes))
            axis.set(xscale="log", ylim=limits, xlim=(0.8 * min(passes), 14 * max(passes)))
            axis.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 32, 64, 128]))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        line_of_axes[0].set_ylabel(PLOTTED[metric])
    for i, family in enumerate(families):
        axes[0, i].set_title(family)
        axes[-1, i].set_xlabel("forward passes a text")
    figure.savefig(path, dpi=150)


def main():
    (args,) = HfArgumentParser(CompareArguments).parse_args_into_dataclasses()
    torch.set_num_threads(args.num_threads)
    transformers_logging.disable_progress_bar()
    logging.getLogger("diffusers_text").setLevel(logging.ERROR)  # few steps are the point: no warning of them
    pipe = TextDiffusionPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    print(markdown_table(results := compare(pipe, args)))
    if args.plot:
        draw_plot(args.plot, results)


if __name__ == "__main__":
    main()
