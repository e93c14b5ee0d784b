"""A picture of a training run."""

from pathlib import Path

from matplotlib.figure import Figure


def draw_training(log_history: list[dict], path: Path):
    r"""
    Draws the bound in training and evaluation over the steps, and the masked cross-entropy beside it.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        path (`Path`): the image, written whole or not at all.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.add_subplot()
    lines = {"bound": ("bound, training", "C0-"), "masked_cross_entropy": ("masked cross-entropy, training", "C1-")}
    names = dict.fromkeys(name for entry in log_history for name in entry)
    evaluated = [name for name in names if name.startswith("eval_") and name.endswith("_bound")]  # of each dataset
    for i, name in enumerate(evaluated, start=2):
        dataset = name.removeprefix("eval_").removesuffix("bound").rstrip("_")
        lines[name] = (f"bound, evaluation {dataset}".rstrip(), f"C{i}o-")
    for name, (label, style) in lines.items():
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axis.plot(*zip(*points), style, markersize=4, linewidth=1, label=label)
    axis.set(xlabel="step", ylabel="nats per token")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format=path.suffix[1:])
    temporary.replace(path)
