"""`diffusers-text`: the library's public functions from a shell."""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from diffusers.utils.logging import disable_progress_bar
from transformers.utils import logging

from ..data.loading import load_rows, load_texts
from ..data.preparation import prepare_pairs
from ..evaluation.curve import PARAMETERS, quality_curve, save_curve
from ..evaluation.detokenizers import RULES, detokenizer
from ..evaluation.generation import generate_texts
from ..evaluation.judge import load_judge
from ..evaluation.likelihood import likelihood_bound
from ..evaluation.quality import generation_metrics, generative_perplexity, rouge_l, spelled_by
from ..evaluation.zero_shot import PUBLISHED, table
from ..files import write_text
from ..models.sparse_head import max_sequence_length
from ..pipelines.pipeline_text_diffusion import TextDiffusionPipeline
from ..resuming import remove_parts
from ..schedulers.scheduling_absorbing_state import AbsorbingStateScheduler

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Pipeline = Annotated[str, typer.Argument(help="Saved pipeline: a folder, or an id on the Hub.")]
DatasetOption = Annotated[
    str,
    typer.Option("--dataset", help="Texts: a .txt (one a line), .jsonl, .csv or .parquet file, or an id on the Hub."),
]
ConfigName = Annotated[str | None, typer.Option(help="Configuration of a dataset on the Hub.")]
Split = Annotated[str, typer.Option(help="Split of a dataset on the Hub.")]
TextColumn = Annotated[str, typer.Option(help="Column of the texts.")]
Limit = Annotated[int | None, typer.Option(min=1, help="First texts to take, all by default.")]
Detokenizer = Annotated[str | None, typer.Option(help=f"Whose spacing to undo: {', '.join(RULES)}.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a row, by default as in training.")]
Packing = Annotated[bool, typer.Option(help="Cut the joined texts into rows, or keep a text a row.")]
FillRows = Annotated[bool, typer.Option(help="Fill rows with end-of-text tokens, for a model trained so.")]
LongTexts = Annotated[str, typer.Option(help="Without packing, 'split' or 'error' for a text over --max-length.")]
Schedule = Annotated[str | None, typer.Option(help="Another noise schedule than the pipeline's.")]
Steps = Annotated[int | None, typer.Option(help="T of the bound in steps, continuous time by default.")]
EstimatorOption = Annotated[
    str | None, typer.Option("--estimator", help="'count', 'nonempty' or 'independent', the best one by default.")
]
NumDraws = Annotated[int, typer.Option(help="Forward passes for each row, an even number of at least 4.")]
StandardError = Annotated[float | None, typer.Option(help="Draw until the standard error is at most this, in nats.")]
TimeEpsilon = Annotated[float, typer.Option(help="Smallest time of 'independent'; the figure is then no bound.")]
BatchSize = Annotated[int, typer.Option(help="Rows or texts at once, in each process.")]
NumTexts = Annotated[int, typer.Option(min=0, help="Texts to generate and measure; the papers take 1,000.")]
GenLength = Annotated[int | None, typer.Option(help="Tokens of a generated text, by default as in training.")]
Seed = Annotated[int, typer.Option(help="Of the generated texts.")]
Judge = Annotated[str | None, typer.Option(help="Causal language model for the perplexity of texts, gpt2 say.")]
JudgeFile = Annotated[str | None, typer.Option(help="Name of the judge's GGUF file, where it is one.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="File for the figures.")]
OutputDir = Annotated[Path, typer.Option(help="Folder for figures, plot and texts.")]


@app.command()
def evaluate(
    pipeline: Pipeline,
    dataset: DatasetOption,
    config_name: ConfigName = None,
    split: Split = "test",
    text_column: TextColumn = "text",
    limit: Limit = None,
    detokenize: Detokenizer = None,
    max_length: MaxLength = None,
    packing: Packing = True,
    long_texts: LongTexts = "split",
    fill_rows: FillRows = False,
    schedule: Schedule = None,
    num_inference_steps: Steps = None,
    estimator: EstimatorOption = None,
    num_draws: NumDraws = 8,
    standard_error: StandardError = None,
    time_epsilon: TimeEpsilon = 0.0,
    batch_size: BatchSize = 32,
    num_texts: NumTexts = 0,
    gen_length: GenLength = None,
    seed: Seed = 0,
    judge: Judge = None,
    judge_gguf_file: JudgeFile = None,
    json_file: JsonFile = None,
):
    """
    The likelihood bound of a corpus, and measures of generated texts. The same command, started again after an
    interruption, goes on where it was, if --json is given.
    """
    state = start_processes()
    texts = read_corpus(dataset, config_name, split, text_column, limit, detokenize)
    pipe = load_pipeline(pipeline, schedule)
    if num_texts and judge is not None:
        model, tokenizer = load_judge(judge, judge_gguf_file)
    resume = None if json_file is None else str(json_file)
    bound = likelihood_bound(
        pipe,
        texts,
        max_length=max_length,
        packing=packing,
        long_texts=long_texts,
        fill_rows=fill_rows,
        num_inference_steps=num_inference_steps,
        estimator=estimator,
        num_draws=num_draws,
        standard_error=standard_error,
        time_epsilon=time_epsilon,
        batch_size=batch_size,
        corpus_name=dataset,
        resume_file=resume and f"{resume}.bound",
    )
    figures = {"pipeline": pipeline, "bound": bound.to_dict()}
    say(state, f"bound: {bound}")
    if num_texts:
        call_args = {} if gen_length is None else {"gen_length": gen_length}
        resume = resume and f"{resume}.texts"
        generated = generate_texts(pipe, num_texts, batch_size=batch_size, seed=seed, resume_file=resume, **call_args)
        references = spelled_by(pipe.tokenizer, [text for text in texts if text.strip()][:num_texts])
        figures["generation"] = generation_metrics(generated, references)
        if judge is not None:
            model.to(pipe.device)
            judged = generative_perplexity(generated, model, tokenizer, progress_bar=bars(state, pipe))
            figures["generation"]["judge"] = {"model": judge} | judged
        say(state, describe_generation(figures["generation"]))
    finish(state, json_file, figures)
    if resume and state.is_main_process:
        remove_parts(resume)


@app.command()
def evaluate_pairs(
    pipeline: Pipeline,
    dataset: DatasetOption,
    source_column: Annotated[str, typer.Option(help="Column of what is given.")] = "source",
    target_column: Annotated[str, typer.Option(help="Column of what is generated.")] = "target",
    config_name: ConfigName = None,
    split: Split = "test",
    limit: Limit = None,
    max_length: MaxLength = None,
    fill_rows: FillRows = False,
    num_draws: NumDraws = 8,
    batch_size: BatchSize = 32,
    num_sources: Annotated[int, typer.Option(min=0, help="First sources to write texts for.")] = 0,
    texts_per_source: Annotated[int, typer.Option(min=1, help="Texts for each of them.")] = 1,
    gen_length: GenLength = None,
    seed: Seed = 0,
    rouge: Annotated[str, typer.Option(help="ROUGE of `evaluate`: its name on the Hub, or a folder.")] = "rouge",
    json_file: JsonFile = None,
):
    """
    The bound of targets given their sources, and how texts for sources compare with the targets: ROUGE-L, and the
    measures of `evaluate`. Goes on where it was interrupted, if --json is given.
    """
    from evaluate import load as load_metric  # takes a second, and nothing else needs it

    state = start_processes()
    if num_sources and num_sources * texts_per_source < 2:
        raise ValueError("`--num-sources` times `--texts-per-source` must be at least 2, to compare texts.")
    if fill_rows and max_length is None:
        raise ValueError("`--fill-rows` needs `--max-length`, the length of rows in training.")
    pipe = load_pipeline(pipeline, None)
    with state.main_process_first():  # the others find what it has cached
        pairs = load_rows(dataset, config_name, split, [source_column, target_column])
        pairs = pairs.select(range(min(limit or len(pairs), len(pairs))))
        length = max_length or max_sequence_length(pipe.model)
        rows = prepare_pairs(pairs, pipe.tokenizer, length, source_column, target_column)
        metric = load_metric(rouge) if num_sources else None
    resume = None if json_file is None else str(json_file)
    bound = likelihood_bound(
        pipe,
        rows,
        max_length=length,
        fill_rows=fill_rows,
        num_draws=num_draws,
        batch_size=batch_size,
        corpus_name=dataset,
        resume_file=resume and f"{resume}.bound",
    )
    figures = {"pipeline": pipeline, "bound": bound.to_dict() | {"left_out": len(pairs) - len(rows)}}
    say(state, f"bound: {bound}")
    if num_sources:
        kept = [(row[source_column], row[target_column]) for row in pairs]
        kept = [pair for pair in kept if all(part and part.strip() for part in pair)][:num_sources]
        sources, targets = [source for source, _ in kept], spelled_by(pipe.tokenizer, [target for _, target in kept])
        call_args = {} if gen_length is None else {"gen_length": gen_length}
        resume = resume and f"{resume}.texts"
        texts = generate_texts(
            pipe,
            texts_per_source,
            sources=sources,
            batch_size=batch_size,
            seed=seed,
            resume_file=resume,
            **call_args,
        )
        figures["generation"] = generation_metrics(texts, targets, texts_per_source)
        wanted = [target for target in targets for _ in range(texts_per_source)]
        figures["generation"]["rouge_l"] = rouge_l(texts, wanted, metric)
        say(state, f"ROUGE-L {figures['generation']['rouge_l']:.4f}, {describe_generation(figures['generation'])}")
    finish(state, json_file, figures)
    if resume and state.is_main_process:
        remove_parts(resume)


@app.command()
def zero_shot(
    pipeline: Pipeline,
    dataset: Annotated[
        list[str],
        typer.Option(help="NAME=FILE or NAME=ID[:CONFIG[:SPLIT]], several times; known names are detokenized."),
    ],
    text_column: TextColumn = "text",
    limit: Limit = None,
    max_length: MaxLength = None,
    schedule: Schedule = None,
    num_draws: NumDraws = 8,
    batch_size: BatchSize = 32,
    json_file: JsonFile = None,
):
    """
    The bound of one pipeline on several corpora, laid out as in MDLM's table, with the published rows beside it. These
    are of other models, trained on other texts, and tokens of theirs are no tokens of yours.
    """
    state = start_processes()
    pipe = load_pipeline(pipeline, schedule)
    corpora = [parse_corpus(spec) for spec in dataset]
    bounds = {}
    for name, source, config_name, split in corpora:
        texts = read_corpus(source, config_name, split, text_column, limit, name if name in RULES else None)
        bound = likelihood_bound(
            pipe,
            texts,
            max_length=max_length,
            num_draws=num_draws,
            batch_size=batch_size,
            corpus_name=name,
            resume_file=None if json_file is None else f"{json_file}.{name}",
        )
        say(state, f"{name}: {bound}")
        bounds[name] = bound.to_dict()
    say(state, "\n" + table(pipeline, bounds))
    finish(state, json_file, {"pipeline": pipeline, "bounds": bounds, "published": PUBLISHED})


@app.command()
def curve(
    pipeline: Pipeline,
    dataset: DatasetOption,
    output_dir: OutputDir,
    parameter: Annotated[str, typer.Option(help=f"What to vary: {', '.join(PARAMETERS)}.")] = "temperature",
    values: Annotated[str, typer.Option(help="Its values, with commas between them.")] = "0.5,0.7,0.8,0.9,1.0",
    config_name: ConfigName = None,
    split: Split = "test",
    text_column: TextColumn = "text",
    num_texts: NumTexts = 1000,
    gen_length: GenLength = None,
    batch_size: BatchSize = 32,
    seed: Seed = 0,
    judge: Judge = None,
    judge_gguf_file: JudgeFile = None,
):
    """
    Quality against diversity: texts at several temperatures (or top-k, top-p, numbers of steps), their BLEU against
    self-BLEU, and their perplexity under a judge against their entropy. Goes on where it was interrupted.
    """
    state = start_processes()
    texts = read_corpus(dataset, config_name, split, text_column, None, None)
    pipe = load_pipeline(pipeline, None)
    references = spelled_by(pipe.tokenizer, [text for text in texts if text.strip()][:num_texts])
    rows = quality_curve(
        pipe,
        references,
        parameter,
        parse_values(parameter, values),
        num_texts=num_texts,
        gen_length=gen_length,
        batch_size=batch_size,
        seed=seed,
        judge=None if judge is None else load_judge(judge, judge_gguf_file),
        output_dir=output_dir,
    )
    if state.is_main_process:
        settings = {"pipeline": pipeline, "dataset": dataset, "judge": judge, "num_texts": num_texts, "seed": seed}
        save_curve(output_dir, parameter, rows, settings)
    say(state, f"{output_dir}/curve.json, {output_dir}/curve.png")


def start_processes() -> PartialState:
    """The processes that this one is of; alone unless accelerate started it."""
    # accelerate sees several processes without an accelerator only when told to use the CPU.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())


def load_pipeline(pipeline: str, schedule: str | None) -> TextDiffusionPipeline:
    """The pipeline on this process's device, perhaps with another schedule of its noise."""
    state = PartialState()
    disable_progress_bar()
    logging.disable_progress_bar()
    with state.main_process_first():  # it downloads
        pipe = TextDiffusionPipeline.from_pretrained(pipeline).to(state.device)
    if schedule is not None:
        pipe.scheduler = AbsorbingStateScheduler.from_config(pipe.scheduler.config, schedule=schedule)
    return pipe


def read_corpus(dataset, config_name, split, text_column, limit, detokenize) -> list[str]:
    """The texts of a corpus, as people write them."""
    undo = detokenizer(detokenize)
    with PartialState().main_process_first():
        texts = load_texts(dataset, config_name, split, text_column)
    return [undo(text) if isinstance(text, str) else text for text in texts[:limit]]


def parse_corpus(spec: str) -> tuple[str, str, str | None, str]:
    """Name, source, configuration and split out of `NAME=SOURCE[:CONFIG[:SPLIT]]`."""
    name, separator, source = spec.partition("=")
    if not separator or not name or not source:
        raise ValueError(f"`--dataset` must be NAME=FILE or NAME=ID[:CONFIG[:SPLIT]], got {spec!r}.")
    source, *rest = source.split(":")
    config_name, split = [*rest, None, None][:2]
    return name, source, config_name or None, split or "test"


def parse_values(parameter: str, values: str) -> list[float | int]:
    """The values of a parameter, out of text with commas."""
    if parameter not in PARAMETERS:
        raise ValueError(f"`--parameter` must be one of {[*PARAMETERS]}, got {parameter!r}.")
    try:
        return [PARAMETERS[parameter](value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"`--values` must be numbers with commas between them, got {values!r}.") from None


def describe_generation(metrics: dict) -> str:
    """The measures in a few lines. A perplexity never stands without the entropy."""
    names = ("bleu", "self_bleu", "distinct_1", "div_4", "repetition_4", "unique", "entropy", "length_mean")
    text = f"{metrics['num_texts']} texts: " + ", ".join(f"{name} {metrics[name]:.4f}" for name in names)
    if "judge" in metrics:
        judge = metrics["judge"]
        text += f"\njudge: perplexity {judge['perplexity']:.2f} at an entropy of {judge['entropy']:.3f} nats"
    return text


def bars(state: PartialState, pipe):
    """The pipeline's progress bars, in the first process."""
    return pipe.progress_bar if state.is_main_process else None


def say(state: PartialState, text: str):
    """Prints in the first process."""
    if state.is_main_process:
        print(text, flush=True)


def finish(state: PartialState, json_file: Path | None, figures: dict):
    """Writes the figures, in the first process."""
    if json_file is not None and state.is_main_process:
        write_text(json_file, json.dumps(figures, indent=2) + "\n")
    state.wait_for_everyone()


def main():
    """The command; what the library has to say of wrong input is printed without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
