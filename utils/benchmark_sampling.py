"""
How fast texts are sampled. The samplers share a model with random weights and take turns in one process.

    python utils/benchmark_sampling.py --preset quick --json quick.json --plot quick.png

- `ours`: `TextDiffusionPipeline` with `AbsorbingStateScheduler`, linear schedule; `spindle`: with that schedule.
- `textbook`: MDLM's ancestral sampling with its cache (arXiv 2406.07524), over the logits of the whole canvas.
- `llada2`: `diffusers.LLaDA2Pipeline` with `BlockRefinementScheduler`, the text in one block.
- `floor`: the bare model as an exact sampler needs it: its encoder at each row's events, the head at what they reveal.

The preset `steps` varies their number for all samplers, `growth` length, batch and steps one at a time for ours;
`precision` compares number formats and compilation.
"""

import argparse
import copy
import ctypes
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from torch import nn
from transformers import BertConfig, BertTokenizer

from diffusers_text import AbsorbingStateScheduler, DiffusionBertForMaskedDiffusion, TextDiffusionPipeline, pack_texts


class Setting(NamedTuple):
    """What is sampled: `batch` texts of `length` tokens in `steps` steps by a model of `size`."""

    size: str
    batch: int
    length: int
    steps: int


VOCAB_SIZE = 30522
SIZES = {
    "minilm": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
SAMPLERS = ["ours", "textbook", "llada2", "floor", "spindle"]
TARGETS = {  # textbook/ours and llada2/ours at least, ours/floor at most
    Setting("minilm", 1, 64, 1000): {"textbook": 14, "llada2": 4, "floor": 1.25},
    Setting("minilm", 8, 64, 256): {"textbook": 24, "llada2": 7, "floor": 1.15},
    Setting("minilm", 8, 64, 64): {"textbook": 6.5, "llada2": 7, "floor": 1.15},
    Setting("base", 1, 128, 1000): {"textbook": 2.9, "llada2": 1.9, "floor": 1.05},
}
GROWTH = {
    "length": [Setting("minilm", 1, length, 1000) for length in (32, 64, 128, 256, 512)],
    "batch": [Setting("minilm", batch, 64, 64) for batch in (1, 2, 4, 8, 16, 32, 64)],
    "steps": [Setting("minilm", 1, 64, steps) for steps in (8, 16, 32, 64, 128, 256, 1000, 10_000)],
}
PRESETS = {
    "quick": list(TARGETS)[::2],
    "targets": list(TARGETS),
    "steps": [Setting("minilm", 1, length, steps) for length in (64, 128) for steps in (64, 256, 1000)],
    "full": [Setting(*values) for values in itertools.product(SIZES, (1, 8), (64, 128), (64, 256, 1000))],
    "growth": list(dict.fromkeys(itertools.chain(*GROWTH.values()))),
    "precision": [Setting("minilm", 8, 64, 64)],
}


def make_model(size: str, device: str) -> tuple[DiffusionBertForMaskedDiffusion, BertTokenizer]:
    """A model with random weights and a tokenizer of made-up words; 514 positions hold 512 tokens of text."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=514, **SIZES[size])
    model = DiffusionBertForMaskedDiffusion(config).to(device).eval()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = specials + [f"word{i}" for i in range(len(specials), VOCAB_SIZE)]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    return forbid_specials(model, tokenizer), tokenizer


def forbid_specials(model, tokenizer):
    """Has `model` predict only what a text may hold: LLaDA2Pipeline writes all that is predicted, even masks."""
    forbidden = [i for i in tokenizer.all_special_ids if i != tokenizer.sep_token_id]
    model.get_output_embeddings().bias.data[forbidden] = -1e9
    return model


@torch.inference_mode()
def sample_textbook(model, canvas, mask_token_id: int, steps: int, generator) -> torch.LongTensor:
    """
    MDLM's ancestral sampler for its log-linear schedule, `alpha_t = 1 - t` (arXiv 2406.07524). On the way from t to s
    a masked position takes token k with probability `p_k (t - s) / t` and stays masked with `s / t`; others are
    carried over. `p` is the paper's SUBS parameterisation: no mask is predicted, and what is revealed is copied. The
    model is not told the time, so its prediction stands until a token is revealed.
    """
    sample, p_x0 = canvas, None
    for i in range(steps, 0, -1):
        t, s = i / steps, (i - 1) / steps
        if p_x0 is None:
            logits = model(sample).logits  # [batch, seq, vocab]
            logits[..., mask_token_id] = -torch.inf
            logits = logits - logits.logsumexp(dim=-1, keepdim=True)
            revealed = sample != mask_token_id
            logits[revealed] = -torch.inf
            logits[revealed, sample[revealed]] = 0
            p_x0 = logits.exp()
        q = p_x0 * (t - s)
        q[..., mask_token_id] = s
        # Gumbel's trick as a race of exponential times, with the guards against log 0 of MDLM's released code.
        times = 1e-10 - (torch.rand(q.shape, generator=generator, device=q.device) + 1e-10).log()
        drawn = (q / times).argmax(dim=-1)
        following = torch.where(sample == mask_token_id, drawn, sample)
        p_x0 = p_x0 if torch.equal(following, sample) else None
        sample = following
    return sample


def plan_events(setting: Setting, seed: int) -> list[tuple[int, torch.LongTensor]]:
    """
    The encoder calls of an exact sampler: for each, how many rows take part, and the flat positions over them that it
    reveals. A position is revealed in a step that is uniform among `steps`; the n-th such steps of all rows run side
    by side. Drawn as the scheduler draws, so that both have the same events for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    uniforms = 1 - torch.rand(setting.batch, setting.length, generator=generator, dtype=torch.float64)  # in (0, 1]
    events = (uniforms * setting.steps).ceil()  # [batch, length]
    order = torch.stack([(-row).unique(return_inverse=True)[1] for row in events])  # 0 at a row's first event
    plan = []
    for n in range(int(order.max()) + 1):
        due = order == n
        rows, columns = due[due.any(dim=1)].nonzero().T
        plan.append((int(rows.max()) + 1, rows * (setting.length + 2) + columns + 1))  # + 1: [CLS] comes first
    return plan


@torch.inference_mode()
def fastest_head(model, n: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head's product for `n` positions: as the model takes it, or as `W h^T`, faster on a CPU for a few."""
    head, states = model.get_output_embeddings(), torch.randn(n, model.config.hidden_size, device=model.device)

    def as_columns(states):  # [n, hidden]
        columns = (states if n > 1 else states.repeat(2, 1)).T  # a single column would take a slower kernel
        return torch.addmm(head.bias[:, None], head.weight, columns).T[:n]

    return min([head, as_columns], key=lambda h: min(timed(lambda: h(states), model.device)[0] for _ in range(6)))


@torch.inference_mode()
def run_floor(model, canvas, plan, heads: dict[int, Callable]):
    """The encoder calls of `plan`, and the head's logits at the revealed positions. Nothing is drawn."""
    for rows, positions in plan:
        hidden_states = model.bert(input_ids=canvas[:rows]).last_hidden_state
        heads[len(positions)](model.cls.predictions.transform(hidden_states.flatten(0, 1)[positions]))


def make_run(name: str, model, tokenizer, setting: Setting, seed: int = 0) -> Callable[[], torch.LongTensor | None]:
    """A run of sampler `name`, ready to be timed: it gives the texts' ids, `[batch, seq]`, `floor` nothing."""
    row = [tokenizer.cls_token_id, *[tokenizer.mask_token_id] * setting.length, tokenizer.sep_token_id]
    canvas = torch.tensor([row] * setting.batch, device=model.device)
    if name == "textbook":
        arguments = (model, canvas, tokenizer.mask_token_id, setting.steps)
        return lambda: sample_textbook(*arguments, torch.Generator(model.device).manual_seed(seed))
    if name == "floor":
        plan = [(rows, positions.to(model.device)) for rows, positions in plan_events(setting, seed)]
        heads = {n: fastest_head(model, n) for n in {len(positions) for _, positions in plan}}
        return lambda: run_floor(model, canvas, plan, heads)

    kwargs = {"gen_length": setting.length, "num_inference_steps": setting.steps, "output_type": "seq"}
    if name == "llada2":
        pipe = LLaDA2Pipeline(model, BlockRefinementScheduler(), tokenizer)
        # Blocks begin at position 0: the only one is the prompt, [CLS], and the text. Above 1 the threshold reveals
        # tokens evenly over the steps, of which there can be no more than tokens.
        kwargs |= {"block_length": 1 + setting.length, "num_inference_steps": min(setting.steps, setting.length)}
        kwargs |= {"threshold": 1.1, "editing_threshold": None, "eos_early_stop": False}
        kwargs |= {"input_ids": canvas[:, :1], "temperature": 1.0, "sampling_method": "multinomial"}
    else:
        schedule = {}
        if name == "spindle":  # words by Zipf's law, and a text of them every 64 tokens or so
            counts = [0 if i in tokenizer.all_special_ids else 10**6 // (1 + i) for i in range(len(tokenizer))]
            counts[tokenizer.sep_token_id] = sum(counts) // 64
            schedule = {"schedule": "spindle", "token_counts": counts}
        pipe = TextDiffusionPipeline(model, tokenizer, AbsorbingStateScheduler(**schedule))
        kwargs["num_texts_per_prompt"] = setting.batch
    pipe.set_progress_bar_config(disable=True)
    source = model.device if name == "llada2" else "cpu"  # ours may draw on the CPU whatever the model's device
    return lambda: torch.stack([*pipe(**kwargs, generator=torch.Generator(source).manual_seed(seed)).sequences])


def find_in(path: str, pattern: str) -> str | None:
    """The group of `pattern` in a file; None where it is not, as on systems without `/proc`."""
    found = re.search(pattern, Path(path).read_text() if Path(path).exists() else "")
    return found and found[1]


def start_peak(on_cuda: bool, release: bool) -> float:
    """MB in use, where a new peak begins; `release` first gives back what earlier runs left in the allocator."""
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    if Path("/proc/self/clear_refs").exists():
        if release:
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel keeps the peak: to watch it costs a run nothing
    return int(find_in("/proc/self/status", r"VmRSS:\s+(\d+)") or 0) / 1024


def timed(run: Callable, device, release: bool = False) -> tuple[float, float, torch.LongTensor | None]:
    """Seconds of `run()`, the growth of the peak of memory in MB, and what it gave."""
    on_cuda = torch.device(device).type == "cuda"
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    synchronize()
    before = start_peak(on_cuda, release)
    start = time.perf_counter()
    output = run()
    synchronize()
    seconds = time.perf_counter() - start
    peak_kb = int(find_in("/proc/self/status", r"VmHWM:\s+(\d+)") or 0)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else peak_kb / 1024
    return seconds, max(0.0, peak - before), output


def measure(runs: dict[str, Callable], repeats: int, device, label: str, check=lambda name, output: None) -> dict:
    """Median seconds and largest peak of each of `runs`, which take turns in alternating order."""
    measured = {name: [] for name in runs}
    for i in range(repeats):
        for name in list(runs) if i % 2 == 0 else reversed(runs):
            seconds, peak, output = timed(runs[name], device, release=i == 0)
            check(name, output)
            measured[name].append((seconds, peak))
            print(f"{label}: {name} {i + 1}/{repeats}: {seconds:.3f} s", flush=True)
    return {name: (statistics.median(s for s, _ in m), max(p for _, p in m)) for name, m in measured.items()}


def measure_setting(model, tokenizer, setting: Setting, samplers: list[str], repeats: int) -> list[dict]:
    """A row for each of `samplers`: its time, encoder calls and memory. Raises if one leaves masks."""
    calls, forwards = [], {}

    def check(name, ids):
        forwards[name] = len(calls)
        calls.clear()
        if ids is not None and (len(ids) != setting.batch or (ids == tokenizer.mask_token_id).any()):
            raise RuntimeError(f"{name} gave {len(ids)} texts, or masks in them, for {setting}.")

    runs = {name: make_run(name, model, tokenizer, setting) for name in samplers}
    with torch.no_grad():  # a model's first call is slower than the others
        model.bert(torch.ones(setting.batch, setting.length + 2, dtype=torch.long, device=model.device))
    with model.bert.encoder.register_forward_hook(lambda *_: calls.append(1)):
        measured = measure(runs, repeats, model.device, str(setting), check)
    return [
        {"sampler": name, **setting._asdict(), "seconds": seconds, "forwards": forwards[name], "peak_mb": peak}
        for name, (seconds, peak) in measured.items()
    ]


def precision_variant(model, name: str):
    """A copy of `model` in another number format, or compiled."""
    model = copy.deepcopy(model)
    if name == "bf16":
        return model.to(torch.bfloat16)
    if name == "int8":
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    if name == "compile":
        model.bert.compile()  # not the head, which sees another number of positions at each call
    return model


def measure_precision(setting: Setting, bound_model: str, repeats: int, device: str) -> list[dict]:
    """
    For each variant seconds of an encoder call and of sampling, and the held-out bound of the quickstart's model in
    nats per token, the noise being the same for all; None for what does not work on this machine.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from quickstart import QuickstartArguments, held_out_bound, load_texts

    model, tokenizer = make_model(setting.size, device)
    canvas = torch.ones(setting.batch, setting.length + 2, dtype=torch.long, device=device)
    pipe, args = TextDiffusionPipeline.from_pretrained(bound_model).to(device), QuickstartArguments()
    rows = pack_texts(load_texts(args)[1], pipe.tokenizer, args.max_length)[: args.eval_rows].to(device)
    runs, first = {}, {}
    for name in ("fp32", "bf16", "int8", "compile"):
        body, trained = precision_variant(model, name), precision_variant(pipe.model, name)
        runs[name, "10 encoder calls"] = torch.no_grad()(lambda body=body: [body.bert(canvas) for _ in range(10)])
        runs[name, "sampling"] = make_run("ours", body, tokenizer, setting)
        runs[name, "bound"] = lambda m=trained: held_out_bound(m, pipe.scheduler, rows, pipe.tokenizer, args.seed)[0]
    for key, run in runs.items():  # untimed first runs, which compile
        try:
            first[key] = run()
        except Exception as error:
            print(f"{key} does not work here: {error!r:.200}", flush=True)
    timed_runs = {key: runs[key] for key in first if key[1] != "bound"}
    seconds = {key: value[0] for key, value in measure(timed_runs, repeats, device, "precision").items()}
    return [
        {
            "variant": name,
            "encoder_seconds": seconds[name, "10 encoder calls"] / 10,
            "sampling_seconds": seconds.get((name, "sampling")),
            "bound": (bound := first.get((name, "bound"))),
            "bound_change": None if bound is None else bound - first["fp32", "bound"],
        }
        for name, what in seconds
        if what == "10 encoder calls"
    ]


def print_table(rows: list[dict]):
    """A column for each key, as wide as what it holds."""
    lines = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *lines)]
    for line in [rows[0], *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def with_targets(setting: Setting, rows: list[dict]) -> list[dict]:
    """The rows of `setting` with their time in units of ours, and whether its targets are met."""
    ours = next((row["seconds"] for row in rows if row["sampler"] == "ours"), math.nan)
    targets, extended = {} if math.isnan(ours) else TARGETS.get(setting, {}), []
    for row in rows:
        name, ratio = row["sampler"], row["seconds"] / ours
        extended.append({**row, "to ours": ratio, "target": ""})
        if name in targets:
            excess = targets[name] * ratio - 1 if name == "floor" else ratio - targets[name]
            wanted = f"ours/floor {1 / ratio:.2f} <=" if name == "floor" else f"{name}/ours {ratio:.1f} >="
            extended[-1]["target"] = f"{wanted} {targets[name]}: {'met' if excess >= 0 else 'missed'}"
    return extended


def write_json(path: str, results: dict):
    """Writes the file as a whole or not at all."""
    Path(f"{path}.tmp").write_text(json.dumps(results, indent=2) + "\n")
    os.replace(f"{path}.tmp", path)


def draw_plot(path: str, preset: str, measured: dict[Setting, list[dict]]):
    """Seconds against steps, or against what grows: a panel for each model and canvas, a line for each sampler."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    models = dict.fromkeys(setting[:3] for setting in measured)
    panels = [("steps", [setting for setting in measured if setting[:3] == model]) for model in models]
    panels = GROWTH.items() if preset == "growth" else panels
    columns, lines = min(4, len(panels)), math.ceil(len(panels) / 4)
    figure = Figure(figsize=(6 * columns, 5 * lines), layout="constrained")
    for i, (x, settings) in enumerate(panels, start=1):
        axis = figure.add_subplot(lines, columns, i)
        rows = [row for setting in settings for row in measured[setting]]
        for name in dict.fromkeys(row["sampler"] for row in rows):
            points = sorted((row[x], row["seconds"]) for row in rows if row["sampler"] == name)
            axis.plot(*zip(*points), marker="o", color=f"C{SAMPLERS.index(name)}", label=name)
        title = ", ".join(f"{field} {rows[0][field]}" for field in Setting._fields if field != x)
        axis.set(xscale="log", yscale="log", xlabel=x, ylabel="seconds", title=title)
        axis.set_xticks(ticks := sorted({row[x] for row in rows}), ticks, rotation=45)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(SAMPLERS))
    figure.savefig(path, dpi=150)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="quick", help="which settings to run")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, help="by default those the preset is about")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each sampler, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--bound_model", default="outputs/quickstart", help="pipeline whose bound `precision` takes")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", help="file for the plot, .png or .svg; `precision` has none")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    args.samplers = args.samplers or (["ours", "spindle"] if args.preset == "growth" else SAMPLERS[:4])
    return args


def main(arguments: list[str] | None = None):
    """Runs a preset and reports it."""
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    device = find_in("/proc/cpuinfo", r"model name\s*: (.*)") if args.device == "cpu" else torch.cuda.get_device_name()
    results = {"device": device or args.device, "threads": args.threads, "rows": []}
    measured, table, size = {}, [], None
    for setting in PRESETS[args.preset]:
        if args.preset == "precision":
            results["precision"] = table = measure_precision(setting, args.bound_model, args.repeats, args.device)
        else:
            if setting.size != size:
                size, (model, tokenizer) = setting.size, make_model(setting.size, args.device)
            measured[setting] = measure_setting(model, tokenizer, setting, args.samplers, args.repeats)
            results["rows"] += measured[setting]
            table += with_targets(setting, measured[setting])
        if args.json:  # after each setting: what is interrupted after hours leaves what it has
            write_json(args.json, results)
    print(f"\n{results['device']}, {args.threads} threads, torch {torch.__version__}")
    print_table(table)
    if args.plot and measured:
        draw_plot(args.plot, args.preset, measured)


if __name__ == "__main__":
    main()
