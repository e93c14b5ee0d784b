"""
Study 2: the rows of the papers' tables, all trained on one budget, and what the number of steps does to the best.

    python examples/reproduce/tables.py --output_dir outputs/tables --seeds 0

The same command, started again, goes on where it was. It measures the seconds last, of all models in turn, and each
time anew: on a machine that does nothing else. `--preset lm1b` and `--preset owt` have the papers' sizes, for
`accelerate launch`.
"""

import json
import math
import statistics
import time
from pathlib import Path

import torch
from accelerate import PartialState
from baselines import decoder_samples, exact_nats, gibbs_samples, load_baseline, train_baseline
from matplotlib.figure import Figure
from study import (
    Data,
    StudyArguments,
    frequency_nats,
    held_out_bound,
    load_data,
    load_pipeline,
    parse_study_args,
    provenance,
    run_folder,
    train_once,
)
from transformers import set_seed

from diffusers_text import generation_metrics
from diffusers_text.evaluation.generation import generate_texts
from diffusers_text.files import write_text

NUM_STEPS = 128
# D3PM's hybrid loss of 2048 steps, which DiffusionBERT takes as well.
HYBRID = {"objective": "discrete"}
MDLM = {"objective": "continuous", "mask_sampling": "independent", "time_power": 1.0}
DENOISERS = {
    "D3PM": {**HYBRID, "from_scratch": True, "time_conditioning": "layerwise"},
    "DiffusionBERT, layer-wise": {**HYBRID, "time_conditioning": "layerwise"},
    "DiffusionBERT, prefix": {**HYBRID, "time_conditioning": "prefix"},
    "DiffusionBERT, time-agnostic": HYBRID,
    "DiffusionBERT, layer-wise, spindle": {**HYBRID, "time_conditioning": "layerwise", "schedule": "spindle"},
    "DiffusionBERT, prefix, spindle": {**HYBRID, "time_conditioning": "prefix", "schedule": "spindle"},
    "DiffusionBERT, time-agnostic, spindle": {**HYBRID, "schedule": "spindle"},
    "MDLM": {**MDLM, "from_scratch": True},
    "MDLM, from BERT": MDLM,
    "defaults of this library": {},
}
BASELINES = ["BERT-Mouth", "autoregressive decoder"]
STEPPED = "DiffusionBERT, time-agnostic, spindle"  # the paper's best, tilted; its steps are varied
STEPS = [2, 8, 16, 64, 128, 512]
TEXT_FIGURES = ["bleu", "self_bleu", "entropy", "length_mean", "num_texts", "num_references"]


def measure(args: StudyArguments, data: Data, name: str, seed: int) -> dict:
    """The figures of a row, trained first if need be; kept in its folder."""
    folder = run_folder(args, name, seed)
    if name in BASELINES:
        model = train_baseline(args, data, name, seed)
        rows = data.test_rows(args.test_rows, seed)
        nats, error = exact_nats(model, rows) if name == "autoregressive decoder" else None, 0.0
        texts = baseline_texts(data, name, model, args, folder, seed)
    else:
        record = train_once(args, data, name, seed, **DENOISERS[name])
        nats, error = record["bound"], record["standard_error"]
        texts = texts_in_steps(args, folder, NUM_STEPS, seed)
    return {"name": name, "seed": seed, "nats": nats, "error": error, **quality(args, texts, data)}


def measure_steps(args: StudyArguments, data: Data, seed: int) -> list[dict]:
    """The bound, and the texts, of processes with fewer and more steps."""
    folder, rows = run_folder(args, STEPPED, seed), []
    pipe = load_pipeline(folder)
    for steps in STEPS:
        bound_file = folder / f"bound-{steps}.json"
        if not bound_file.exists():
            bound = held_out_bound(args, data, pipe, seed, steps)
            if PartialState().is_main_process:
                write_text(bound_file, json.dumps(bound.to_dict()) + "\n")
            PartialState().wait_for_everyone()
        bound = json.loads(bound_file.read_text())
        nats, error = bound["nats_per_token"], bound["standard_error"]
        texts = texts_in_steps(args, folder, steps, seed)
        rows.append({"steps": steps, "seed": seed, "nats": nats, "error": error, **quality(args, texts, data)})
    return rows


def texts_in_steps(args: StudyArguments, folder: Path, steps: int, seed: int) -> list[str]:
    """Texts of a trained pipeline, kept as they come."""
    kept = str(folder / f"texts-{steps}")
    return generate_texts(
        load_pipeline(folder), args.num_texts, seed=seed, num_inference_steps=steps, batch_size=32, resume_file=kept
    )


def baseline_texts(data, name, model, args, folder, seed) -> list[str]:
    """Texts of a baseline, kept when they are whole."""
    file = folder / f"texts-{args.num_texts}.json"
    if PartialState().is_main_process and not file.exists():
        set_seed(seed)
        samples = baseline_samples(data, name, model, args, args.num_texts)
        write_text(file, json.dumps([spell(ids, data) for ids in samples]))
    PartialState().wait_for_everyone()
    return json.loads(file.read_text())


def baseline_samples(data, name, model, args, num_texts) -> list[list[int]]:
    """Token ids of texts as long as the diffusion models write them."""
    if name == "BERT-Mouth":
        return gibbs_samples(model, data, num_texts, args.max_length - 2)
    return decoder_samples(model, data, num_texts, args.max_length - 2)


def spell(ids: list[int], data: Data) -> str:
    """The text up to its first terminator, as the pipeline gives it."""
    end = data.tokenizer.sep_token_id
    ids = ids[: ids.index(end)] if end in ids else ids
    return data.tokenizer.decode(ids, skip_special_tokens=True)


def quality(args: StudyArguments, texts: list[str], data: Data) -> dict:
    """The measures of texts against at most as many held-out rows, which end at their first terminator as well."""
    metrics = generation_metrics(texts, held_out_texts(args, data, 0))
    return {name: metrics[name] for name in TEXT_FIGURES}


def held_out_texts(args: StudyArguments, data: Data, seed: int) -> list[str]:
    """The beginnings of a seed's test rows."""
    return [spell(ids[1:], data) for ids in data.test_rows(args.num_texts, seed)["input_ids"]]


def measure_seconds(args: StudyArguments, data: Data) -> dict[str, float]:
    """Seconds for 32 texts, the median of three rounds in which all models take their turn."""
    seed = args.seeds[0]
    writers = {}
    for name in DENOISERS:
        pipe = load_pipeline(run_folder(args, name, seed))
        for steps in STEPS if name == STEPPED else [NUM_STEPS]:
            writers[f"{name}: {steps}"] = lambda pipe=pipe, steps=steps: pipe(
                num_texts_per_prompt=32, num_inference_steps=steps, generator=torch.Generator().manual_seed(seed)
            )
    for name in BASELINES:
        # Trained already; only the first process comes here.
        model = load_baseline(run_folder(args, name, seed), name)
        writers[name] = lambda name=name, model=model: baseline_samples(data, name, model, args, 32)
    seconds = {name: [] for name in writers}
    for _ in range(4):  # the first round warms up
        for name, write in writers.items():
            start = time.perf_counter()
            write()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def mean_rows(rows: list[dict], key: str, tokens_per_word: float) -> list[dict]:
    """
    The mean over seeds of the rows that have the same `key`, with perplexities. `error` is that over seeds, or of a
    single one that of the bound's noise.
    """
    means = []
    for value in dict.fromkeys(row[key] for row in rows):
        same = [row for row in rows if row[key] == value]
        mean = {key: value, "seeds": [row["seed"] for row in same]}
        for name in ("nats", "error", *TEXT_FIGURES):
            values = [row[name] for row in same]
            mean[name] = None if None in values else statistics.mean(values)
        if len(same) > 1 and mean["nats"] is not None:
            mean["error"] = statistics.stdev(row["nats"] for row in same) / len(same) ** 0.5
        nats = mean["nats"]
        mean["perplexity_per_token"] = None if nats is None else math.exp(nats)
        mean["perplexity_per_word"] = None if nats is None else math.exp(nats * tokens_per_word)
        means.append(mean)
    return means


def markdown_tables(results: dict) -> str:
    """Two tables: the models, and the steps of one of them."""
    head = "| nats per token | perplexity per token | per word | BLEU | self-BLEU | entropy | words | seconds |\n"
    tables = []
    for key, rows in (("name", results["models"]), ("steps", results["steps"])):
        lines = [f"| {'model' if key == 'name' else 'steps'} " + head + "|---|" + "---:|" * 8]
        for row in rows:
            texts = ["", "", ""]
            if row["nats"] is not None:
                error = f" ± {row['error']:.3f}" if row["error"] else ""
                texts = [f"{row['nats']:.3f}{error}"]
                texts += [f"{row[name]:.1f}" for name in ("perplexity_per_token", "perplexity_per_word")]
            lines.append(f"| {row[key]} | {' | '.join(texts)} | {text_columns(row)} | {row['seconds']:.2f} |")
        if key == "name":
            nats = results["token_frequencies"]
            per_token, per_word = math.exp(nats), math.exp(nats * results["tokens_per_word"])
            lines.append(f"| token frequencies | {nats:.3f} | {per_token:.1f} | {per_word:.1f} |" + " |" * 5)
            lines.append(f"| other held-out text | | | | {text_columns(results['held_out_text'])} | |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def text_columns(row: dict) -> str:
    """What a row says of texts."""
    return f"{row['bleu']:.4f} | {row['self_bleu']:.4f} | {row['entropy']:.2f} | {row['length_mean']:.1f}"


def draw_plot(path: Path, results: dict):
    """Perplexity, BLEU and seconds against the number of steps, the decoder as a line."""
    rows = results["steps"]
    decoder = next(row for row in results["models"] if row["name"] == "autoregressive decoder")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    labels = {
        "perplexity_per_word": "perplexity per word, at most (decoder: exact)",
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
    seconds, tokens_per_word = measure_seconds(args, data), data.tokens_per_word
    results = {**provenance(), "settings": vars(args), "tokens_per_word": tokens_per_word}
    results["token_frequencies"] = statistics.mean(frequency_nats(args, data, args.seeds))
    # As many texts of no model, from rows that are neither measured nor references.
    results["held_out_text"] = quality(args, held_out_texts(args, data, 1), data)
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
