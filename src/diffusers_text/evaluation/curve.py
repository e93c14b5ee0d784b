"""Quality against diversity, as a parameter of sampling varies."""

import json
from pathlib import Path

from accelerate import PartialState

from ..files import write_text
from .generation import generate_texts
from .quality import generation_metrics, generative_perplexity

# What may vary, and the type of its values.
PARAMETERS = {"temperature": float, "top_k": int, "top_p": float, "num_inference_steps": int}


def quality_curve(
    pipe,
    references: list[str],
    parameter: str,
    values: list[float | int],
    *,
    output_dir: str | Path,
    num_texts: int = 1000,
    gen_length: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    judge: tuple | None = None,
    judge_max_length: int | None = None,
) -> list[dict]:
    r"""
    Measures of texts for each value of a sampling parameter, all by the same seeds.

    Args:
        pipe ([`TextDiffusionPipeline`]): what generates.
        references (`list[str]`): what texts should be like, spelled as the model spells.
        parameter (`str`): `"temperature"`, `"top_k"`, `"top_p"` or `"num_inference_steps"`.
        values (`list`): its values.
        output_dir (`str` or `Path`):
            Where texts are kept, as they come, so that an interrupted run goes on, and then as a whole
            (`temperature-0.5.jsonl`).
        num_texts (`int`, defaults to 1000), gen_length (`int`, *optional*), batch_size (`int`, defaults to 32), seed
            (`int`, defaults to 0): of each value's texts.
        judge (`tuple`, *optional*), judge_max_length (`int`, *optional*): a causal language model and its tokenizer,
            and how many tokens of a text it looks at, for [`generative_perplexity`].

    Returns:
        `list[dict]`: for each value `parameter`, `value`, [`generation_metrics`] and `judge`; of several processes in
        the first.
    """
    if parameter not in PARAMETERS:
        raise ValueError(f"`parameter` must be one of {[*PARAMETERS]}, got {parameter!r}.")
    rows = []
    call_args = {} if gen_length is None else {"gen_length": gen_length}
    state = PartialState()
    if judge is not None:
        judge[0].to(pipe.device)
    for value in values:
        resume_file = str(Path(output_dir, f"{parameter}-{value}"))
        texts = generate_texts(
            pipe,
            num_texts,
            batch_size=batch_size,
            seed=seed,
            resume_file=resume_file,
            **call_args,
            **{parameter: value},
        )
        if not state.is_main_process:
            continue
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        write_text(Path(f"{resume_file}.jsonl"), "".join(lines))
        row = {"parameter": parameter, "value": value, **generation_metrics(texts, references)}
        if judge is not None:
            row["judge"] = generative_perplexity(
                texts, *judge, max_length=judge_max_length, progress_bar=pipe.progress_bar
            )
        rows.append(row)
    return rows


def save_curve(output_dir: str | Path, parameter: str, rows: list[dict], settings: dict):
    """Writes `curve.json` and `curve.png` of what [`quality_curve`] returns."""
    figures = settings | {"parameter": parameter, "rows": rows}
    write_text(Path(output_dir, "curve.json"), json.dumps(figures, indent=2) + "\n")
    plot_curve(rows, Path(output_dir, "curve.png"))


def plot_curve(rows: list[dict], path: Path):
    """BLEU against self-BLEU, as in DiffusionBERT's figure, and the judge's perplexity against entropy."""
    from matplotlib.figure import Figure  # only needed here

    panels = [("self_bleu", "bleu", "self-BLEU (lower is more diverse)", "BLEU-4 (higher is better)", rows)]
    if "judge" in rows[0]:
        judged = [row["judge"] | {"value": row["value"]} for row in rows]
        panels.append(
            ("entropy", "perplexity", "entropy in nats (higher is more diverse)", "judge's perplexity", judged)
        )
    figure = Figure(figsize=(4.8 * len(panels), 4), layout="constrained")
    for axes, (x, y, x_label, y_label, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        axes.plot([point[x] for point in points], [point[y] for point in points], "o-")
        for point in points:
            axes.annotate(f"{point['value']:g}", (point[x], point[y]), (7, -11), textcoords="offset points")
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.margins(0.12)
        axes.grid(alpha=0.3)
    figure.suptitle(rows[0]["parameter"].replace("_", " "))
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=150, format=path.suffix[1:])
    temporary.replace(path)
