"""
Study 2: the rows of the papers' tables, all trained on one budget, and what the number of steps does to the best.

    python examples/reproduce/tables.py --output_dir outputs/tables --seeds 0

The same command, started again, goes on where it was. It measures the seconds last, of all models in turn, and each
time anew: on a machine that does nothing else. `--preset lm1b` and `--preset owt` are the papers' settings, for
`accelerate launch`.
"""

import json
import math
import statistics
import time
from pathlib import Path

import torch
from accelerate import PartialState
from baselines import decoder_samples, exact_nats, gibbs_samples, train_baseline
from matplotlib.figure import Figure
from study import Data, StudyArguments, load_data, parse_study_args, run_folder, train_once
from transformers import set_seed

from diffusers_text import TextDiffusionPipeline, generation_metrics, likelihood_bound
from diffusers_text.evaluation.generation import generate_texts
from diffusers_text.files import write_text

NUM_STEPS = 128
# D3PM's hybrid loss of 2048 steps, which DiffusionBERT takes as well.
HYBRID = {"objective": "discrete"}
DENOISERS = {
    "D3PM": {**HYBRID, "from_scratch": True, "time_conditioning": "layerwise"},
    "DiffusionBERT, layer-wise": {**HYBRID, "time_conditioning": "layerwise"},
    "DiffusionBERT, prefix": {**HYBRID, "time_conditioning": "prefix"},
    "DiffusionBERT, time-agnostic": HYBRID,
    "DiffusionBERT, layer-wise, spindle": {**HYBRID, "time_conditioning": "layerwise", "schedule": "spindle"},
    "DiffusionBERT, prefix, spindle": {**HYBRID, "time_conditioning": "prefix", "schedule": "spindle"},
    "DiffusionBERT, time-agnostic, spindle": {**HYBRID, "schedule": "spindle"},
    "MDLM": {"objective": "continuous", "mask_sampling": "independent", "time_power": 1.0, "from_scratch": True},
    "defaults of this library": {},
}
BASELINES = ["BERT-Mouth", "autoregressive decoder"]
STEPPED = "DiffusionBERT, time-agnostic, spindle"  # the paper's best, whose steps are varied
STEPS = [2, 8, 16, 64, 128, 512]


def measure(args: StudyArguments, data: Data, name: str, seed: int) -> dict:
    """The figures of a row, trained first if need be; kept in its folder."""
    folder = run_folder(args, name, seed)
    if name in BASELINES:
        model = train_baseline(args, data, name, seed)
        nats = exact_nats(model, data) if name == "autoregressive decoder" else None
        texts = baseline_texts(data, name, model, args, folder, seed)
    else:
        nats = train_once(args, data, name, seed, **DENOISERS[name])["bound"]
        texts = texts_in_steps(args, folder, NUM_STEPS, seed)
    return {"name": name, "seed": seed, "nats": nats, **quality(args, texts, data)}


def measure_steps(args: StudyArguments, data: Data, seed: int) -> list[dict]:
    """The bound, and the texts, of processes with fewer and more steps."""
    folder, rows = run_folder(args, STEPPED, seed), []
    pipe = load(folder)
    for steps in STEPS:
        bound_file = folder / f"bound-{steps}.json"
        if not bound_file.exists():
            bound = likelihood_bound(pipe, data.held_out, num_inference_steps=steps, batch_size=64)
            if PartialState().is_main_process:
                write_text(bound_file, json.dumps(bound.to_dict()) + "\n")
            PartialState().wait_for_everyone()
        nats = json.loads(bound_file.read_text())["nats_per_token"]
        texts = texts_in_steps(args, folder, steps, seed)
        rows.append({"steps": steps, "seed": seed, "nats": nats, **quality(args, texts, data)})
    return rows


def load(folder: Path) -> TextDiffusionPipeline:
    """A trained pipeline, with the bar of a whole evaluation only."""
    pipe = TextDiffusionPipeline.from_pretrained(folder).to(PartialState().device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def texts_in_steps(args: StudyArguments, folder: Path, steps: int, seed: int) -> list[str]:
    """Texts of a trained pipeline, kept as they come."""
    kept = str(folder / f"texts-{steps}")
    return generate_texts(
        load(folder), args.num_texts, seed=seed, num_inference_steps=steps, batch_size=32, resume_file=kept
    )


def baseline_texts(data, name, model, args, folder, seed) -> list[str]:
    """Texts of a baseline, kept when they are whole."""
    file = folder / "texts.json"
    if PartialState().is_main_process and not file.exists():
        set_seed(seed)
        samples = baseline_samples(data, name, model, args, args.num_texts)
        write_text(file, json.dumps([spell(ids, data) for ids in samples]))
    PartialState().wait_for_everyone()
    return json.loads(file.read_text())


def baseline_samples(data, name, model, args, num_texts) -> list[list[int]]:
    """Token ids of texts as long as the diffusion models write them."""
    model.to(PartialState().device)
    if name == "BERT-Mouth":
        return gibbs_samples(model, data, num_texts, args.max_length - 2, NUM_STEPS)
    return decoder_samples(model, data, num_texts, args.max_length - 2)


def spell(ids: list[int], data: Data) -> str:
    """The text up to its first terminator, as the pipeline gives it."""
    end = data.tokenizer.sep_token_id
    ids = ids[: ids.index(end)] if end in ids else ids
    return data.tokenizer.decode(ids, skip_special_tokens=True)


def quality(args: StudyArguments, texts: list[str], data: Data) -> dict:
    """The measures of texts against as many held-out rows, which end at their first terminator as well."""
    references = [spell(ids[1:], data) for ids in data.held_out["input_ids"][: args.num_texts]]
    metrics = generation_metrics(texts, references)
    return {name: metrics[name] for name in ("bleu", "self_bleu", "entropy", "num_texts", "num_references")}


def measure_seconds(args: StudyArguments, data: Data) -> dict[str, float]:
    """Seconds for 32 texts, the median of three rounds in which all models take their turn."""
    seed = args.seeds[0]
    writers = {}
    for name in DENOISERS:
        pipe = load(run_folder(args, name, seed))
        for steps in STEPS if name == STEPPED else [NUM_STEPS]:
            writers[f"{name}: {steps}"] = lambda pipe=pipe, steps=steps: pipe(
                num_texts_per_prompt=32, num_inference_steps=steps, generator=torch.Generator().manual_seed(seed)
            )
    for name in BASELINES:
        model = train_baseline(args, data, name, seed)
        writers[name] = lambda name=name, model=model: baseline_samples(data, name, model, args, 32)
    seconds = {name: [] for name in writers}
    for _ in range(4):  # the first round warms up
        for name, write in writers.items():
            start = time.perf_counter()
            write()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def mean_rows(rows: list[dict], key: str, tokens_per_word: float) -> list[dict]:
    """The mean over seeds of the rows that have the same `key`, with perplexities."""
    means = []
    for value in dict.fromkeys(row[key] for row in rows):
        same = [row for row in rows if row[key] == value]
        mean = {key: value, "seeds": [row["seed"] for row in same]}
        for name in ("nats", "bleu", "self_bleu", "entropy"):
            values = [row[name] for row in same]
            mean[name] = None if None in values else statistics.mean(values)
        nats = mean["nats"]
        mean["perplexity_per_token"] = None if nats is None else math.exp(nats)
        mean["perplexity_per_word"] = None if nats is None else math.exp(nats * tokens_per_word)
        means.append(mean)
    return means


def markdown_tables(results: dict) -> str:
    """Two tables: the models, and the steps of one of them."""
    head = "| nats per token | perplexity per token | per word | BLEU | self-BLEU | entropy | seconds |\n"
    tables = []
    for key, rows in (("name", results["models"]), ("steps", results["steps"])):
        lines = [f"| {'model' if key == 'name' else 'steps'} " + head + "|---|" + "---:|" * 7]
        for row in rows:
            figures = [row["nats"], row["perplexity_per_token"], row["perplexity_per_word"]]
            texts = ["" if value is None else f"{value:.{digits}f}" for value, digits in zip(figures, (3, 1, 1))]
            texts += [
                f"{row['bleu']:.4f}",
                f"{row['self_bleu']:.4f}",
                f"{row['entropy']:.2f}",
                f"{row['seconds']:.2f}",
            ]
            lines.append(f"| {row[key]} | " + " | ".join(texts) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def draw_plot(path: Path, results: dict):
    """Perplexity, BLEU and seconds against the number of steps, the decoder as a line."""
    rows = results["steps"]
    decoder = next(row for row in results["models"] if row["name"] == "autoregressive decoder")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    labels = {
        "perplexity_per_word": "perplexity per word, at most",
        "bleu": "BLEU-4 against held-out text",
        "seconds": "seconds for 32 texts",
    }
    for axes, (name, label) in zip(figure.subplots(1, 3), labels.items()):
        axes.plot([row["steps"] for row in rows], [row[name] for row in rows], "o-", label=STEPPED)
        axes.axhline(decoder[name], color="black", linestyle="--", label=decoder["name"])
        axes.set(xlabel="steps", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(STEPS, [str(steps) for steps in STEPS], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)


def main(arguments: list[str] | None = None):
    args = parse_study_args(arguments)
    every = [*DENOISERS, *BASELINES]
    names = every if args.only is None else args.only
    if unknown := sorted(set(names) - set(every)):
        raise ValueError(f"`only` must be of {every}, got {unknown}.")
    data = load_data(args)
    models, steps = [], []
    for seed in args.seeds:
        for name in names:
            models.append(measure(args, data, name, seed))
            if PartialState().is_main_process:
                print(models[-1], flush=True)
        if STEPPED in names:
            steps += measure_steps(args, data, seed)
    if PartialState().is_main_process and len(names) == len(every):
        report(args, data, models, steps)


def report(args: StudyArguments, data: Data, models: list[dict], steps: list[dict]):
    """Writes `results.json`, `tables.md` and `plot.png`."""
    rows = data.held_out["input_ids"][:]
    words = sum(len(data.tokenizer.decode(ids, skip_special_tokens=True).split()) for ids in rows)
    tokens_per_word = sum(len(ids) - 1 for ids in rows) / words
    seconds = measure_seconds(args, data)
    results = {"settings": vars(args), "tokens_per_word": tokens_per_word}
    results["models"] = [
        row | {"seconds": seconds.get(f"{row['name']}: {NUM_STEPS}", seconds.get(row["name"]))}
        for row in mean_rows(models, "name", tokens_per_word)
    ]
    results["steps"] = [
        row | {"seconds": seconds[f"{STEPPED}: {row['steps']}"]} for row in mean_rows(steps, "steps", tokens_per_word)
    ]
    output = Path(args.output_dir)
    write_text(output / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(output / "tables.md", markdown_tables(results) + "\n")
    draw_plot(output / "plot.png", results)
    print("\n" + markdown_tables(results))


if __name__ == "__main__":
    main()
