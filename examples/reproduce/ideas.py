"""
Study 1: does each idea of DiffusionBERT and MDLM help? Trainings that differ in one thing, at equal steps, batches
and targets, and the held-out bound by step.

    python examples/reproduce/ideas.py --output_dir outputs/ideas

The same command, started again, goes on where it was; seeds can be divided among processes (`--seeds 0`), and a last
call puts all together. `--preset lm1b` and `--preset owt` have the papers' sizes, for `accelerate launch`.
"""

import json
import statistics
from pathlib import Path

from accelerate import PartialState
from matplotlib.figure import Figure
from study import Data, StudyArguments, frequency_nats, load_data, parse_study_args, provenance, train_once

from diffusers_text.files import write_text

# All minimise the bound in continuous time, as MDLM does, with independent masks unless the idea is another. But times
# are squares of uniform ones, and weighted to match, which is this library's way; MDLM's is "uniform times". The last
# run changes three things: no weights, counts, and uniform ones.
BASE = {"objective": "continuous", "mask_sampling": "independent"}
SPINDLE = {**BASE, "schedule": "spindle"}
RUNS = {
    "baseline": BASE,
    "random start": {**BASE, "from_scratch": True},
    "layer-wise time": {**BASE, "time_conditioning": "layerwise"},
    "prefix time": {**BASE, "time_conditioning": "prefix"},
    "spindle, paper's h, tilted": SPINDLE,
    "spindle, paper's h, untilted": {**SPINDLE, "tilt": False},
    "spindle, code's h, tilted": {**SPINDLE, "spindle_information": "log_count"},
    "spindle, code's h, untilted": {**SPINDLE, "spindle_information": "log_count", "tilt": False},
    "counts": {**BASE, "mask_sampling": "count"},
    "uniform times": {**BASE, "time_power": 1.0},
    "cross-entropy, counts": {"objective": "mlm", "mask_sampling": "count"},
}
# Panels of the plot: the baseline's name in each, and what it is compared with.
IDEAS = {
    "pretrained weights": ("pretrained", ["random start"]),
    "telling the time": ("time-agnostic", ["layer-wise time", "prefix time"]),
    "noise schedule": ("linear", [name for name in RUNS if name.startswith("spindle")]),
    "drawing masks": ("independent, times squared", ["uniform times", "counts", "cross-entropy, counts"]),
}


def summarise(args: StudyArguments, records: list[dict]) -> dict:
    """
    Means over seeds with their standard errors. Differences to the baseline are of the same seeds, and so of the same
    rows. Curves are of fewer rows and draws: each is shifted to end at its run's bound.
    """
    by_name = {name: {record["seed"]: record for record in records if record["name"] == name} for name in RUNS}
    rows = []
    for name, runs in by_name.items():
        if not runs:
            continue
        bounds = [run["bound"] for run in runs.values()]
        common = [seed for seed in runs if seed in by_name["baseline"]]
        differences = [runs[seed]["bound"] - by_name["baseline"][seed]["bound"] for seed in common]
        curves = [shifted_curve(run) for run in runs.values()]
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        rows.append(
            {
                "name": name,
                "seeds": [*runs],
                "bound": mean_and_error(bounds),
                "difference": mean_and_error(differences),
                "noise": statistics.mean(run["standard_error"] for run in runs.values()),
                "curve": [[step, *mean_and_error([curve[step] for curve in curves])] for step in steps],
            }
        )
    names = [name for name in records[0]["settings"] if name in vars(args)]
    shared = [{name: record["settings"][name] for name in names} for record in records]
    if differing := [settings for settings in shared if settings != shared[0]]:
        raise ValueError(f"`output_dir` holds runs of different settings: {shared[0]} and {differing[0]}.")
    return {"settings": shared[0], "rows": rows}


def shifted_curve(record: dict) -> dict[int, float]:
    """The bound at each measured step, moved by what the last of them is off."""
    shift = record["bound"] - record["curve"][-1][1]
    return {step: bound + shift for step, bound in record["curve"]}


def mean_and_error(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and its standard error, None where there are too few values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return (statistics.mean(values) if values else None), error


def markdown_table(summary: dict) -> str:
    """A row for each kind of training."""
    lines = [
        "| training | bound, nats per token | noise | against the baseline | seeds |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in summary["rows"]:
        difference = "" if row["name"] == "baseline" else figure(row["difference"], "+")
        figures = [figure(row["bound"]), f"{row['noise']:.3f}", difference, str(len(row["seeds"]))]
        lines.append(f"| {row['name']} | " + " | ".join(figures) + " |")
    lines.append(f"| token frequencies | {figure(summary['token_frequencies'])} | | | |")
    return "\n".join(lines)


def figure(value_and_error: tuple[float | None, float | None], sign: str = "") -> str:
    """A value with its error as text."""
    value, error = value_and_error
    return "" if value is None else f"{value:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")


def draw_plot(path: Path, summary: dict):
    """The held-out bound by step: a panel for each idea, bands of one standard error over seeds."""
    rows = {row["name"]: row for row in summary["rows"]}
    panels = Figure(figsize=(11, 8), layout="constrained")
    for axes, (idea, (name, others)) in zip(panels.subplots(2, 2).flat, IDEAS.items()):
        for label, row in [(name, rows.get("baseline")), *((other, rows.get(other)) for other in others)]:
            if row is None:
                continue
            steps, means, errors = zip(*[point for point in row["curve"] if point[0] > 0])  # the start is off the page
            axes.plot(steps, means, label=label, color="black" if row["name"] == "baseline" else None)
            if None not in errors:
                low, high = ([mean + sign * error for mean, error in zip(means, errors)] for sign in (-1, 1))
                axes.fill_between(steps, low, high, alpha=0.25, color="black" if row["name"] == "baseline" else None)
        axes.set(title=idea, xlabel="step", ylabel="held-out bound, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
    temporary = path.with_name(f".{path.name}")
    panels.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)


def main(arguments: list[str] | None = None):
    args = parse_study_args(arguments)
    names = [*RUNS] if args.only is None else args.only
    if unknown := sorted(set(names) - set(RUNS)):
        raise ValueError(f"`only` must be of {[*RUNS]}, got {unknown}.")
    data = load_data(args)
    for seed in args.seeds:
        for name in names:
            record = train_once(args, data, name, seed, **RUNS[name])
            if PartialState().is_main_process:
                print(f"{name}, seed {seed}: {record['bound']:.4f}", flush=True)
    if PartialState().is_main_process:
        report(args, data)


def report(args: StudyArguments, data: Data):
    """Writes `results.json`, `table.md` and `plot.png` of all runs that are done."""
    output = Path(args.output_dir)
    records = [json.loads(path.read_text()) for path in sorted(output.glob("runs/*/*/record.json"))]
    seeds = sorted({record["seed"] for record in records})
    frequencies = mean_and_error(frequency_nats(args, data, seeds))
    summary = {**provenance(), **summarise(args, records), "token_frequencies": frequencies}
    write_text(output / "results.json", json.dumps(summary, indent=1) + "\n")
    write_text(output / "table.md", markdown_table(summary) + "\n")
    draw_plot(output / "plot.png", summary)
    print("\n" + markdown_table(summary))


if __name__ == "__main__":
    main()
