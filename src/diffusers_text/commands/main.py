"""`diffusers-text`: the library's public functions from a shell."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from diffusers.utils.logging import disable_progress_bar
from transformers.utils import logging

from ..data.loading import READERS, load_rows, load_texts
from ..data.preparation import prepare_pairs
from ..evaluation.curve import PARAMETERS, quality_curve, save_curve
from ..evaluation.detokenizers import RULES, detokenizer
from ..evaluation.generation import generate_texts
from ..evaluation.judge import load_judge
from ..evaluation.likelihood import likelihood_bound
from ..evaluation.quality import generation_metrics, generative_perplexity, rouge_l, spelled_by
from ..evaluation.zero_shot import CORPORA, PUBLISHED, table
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
JudgeMaxLength = Annotated[int | None, typer.Option(help="Tokens of a text that are judged, all by default.")]
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
    judge_max_length: JudgeMaxLength = None,
    json_file: JsonFile = None,
):
    """
    The likelihood bound of a corpus, and measures of generated texts. The same command, started again after an
    interruption, goes on where it was, if --json is given.
    """
    state = start_processes(json_file)
    if judge is not None and not num_texts:
        raise ValueError("`--judge` judges generated texts: it needs `--num-texts`.")
    texts = read_corpus(dataset, config_name, split, text_column, limit, detokenize)
    pipe = load_pipeline(pipeline, schedule)
    if num_texts:
        call_args = checked_call(pipe, num_texts, gen_length)
        loaded_judge = None if judge is None else load_judge(judge, judge_gguf_file)
    corpus = {"dataset": dataset, "config_name": config_name, "split": split, "text_column": text_column}
    figures = {"pipeline": pipeline, "corpus": {**corpus, "limit": limit, "detokenize": detokenize}}
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
        resume_file=json_file and f"{json_file}.bound",
    )
    figures["bound"] = bound.to_dict()
    say(state, f"bound: {bound}")
    if num_texts:
        generated = generate_texts(
            pipe,
            num_texts,
            batch_size=batch_size,
            seed=seed,
            resume_file=json_file and f"{json_file}.texts",
            **call_args,
        )
        if state.is_main_process:
            references = spelled_by(pipe.tokenizer, [text for text in texts if text and text.strip()][:num_texts])
            figures["generation"] = generation_metrics(generated, references) | sampling_of(pipe, seed, call_args)
            if judge is not None:
                loaded_judge[0].to(pipe.device)
                judged = generative_perplexity(
                    generated, *loaded_judge, max_length=judge_max_length, progress_bar=pipe.progress_bar
                )
                figures["generation"]["judge"] = {"model": judge, "max_length": judge_max_length} | judged
            print(describe_generation(figures["generation"]), flush=True)
    finish(state, json_file, figures, ["bound", "texts"])


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
    state = start_processes(json_file)
    if fill_rows and max_length is None:
        raise ValueError("`--fill-rows` needs `--max-length`, the length of rows in training.")
    pipe = load_pipeline(pipeline, None)
    length = max_sequence_length(pipe.model) if max_length is None else max_length
    with state.main_process_first():  # the others find what it has cached
        pairs = load_rows(dataset, config_name, split, [source_column, target_column])
        pairs = pairs if limit is None else pairs.select(range(min(limit, len(pairs))))
        rows = prepare_pairs(pairs, pipe.tokenizer, length, source_column, target_column)
    if num_sources:
        sources, targets = first_pairs(pipe, pairs, source_column, target_column, length, num_sources)
        call_args = checked_call(pipe, len(sources) * texts_per_source, gen_length, sources)
        metric = load_rouge(rouge)
    corpus = {"dataset": dataset, "config_name": config_name, "split": split, "limit": limit}
    corpus |= {"source_column": source_column, "target_column": target_column, "left_out": len(pairs) - len(rows)}
    figures = {"pipeline": pipeline, "corpus": corpus}
    bound = likelihood_bound(
        pipe,
        rows,
        max_length=length,
        fill_rows=fill_rows,
        num_draws=num_draws,
        batch_size=batch_size,
        corpus_name=dataset,
        resume_file=json_file and f"{json_file}.bound",
    )
    figures["bound"] = bound.to_dict()
    say(state, f"bound: {bound}")
    if num_sources:
        generated = generate_texts(
            pipe,
            texts_per_source,
            sources=sources,
            batch_size=batch_size,
            seed=seed,
            resume_file=json_file and f"{json_file}.texts",
            **call_args,
        )
        if state.is_main_process:
            found = generation_metrics(generated, targets, texts_per_source) | sampling_of(pipe, seed, call_args)
            found["rouge_l"] = rouge_l(generated, [t for t in targets for _ in range(texts_per_source)], metric)
            figures["generation"] = found
            print(f"ROUGE-L {found['rouge_l']:.4f}, {describe_generation(found)}", flush=True)
    finish(state, json_file, figures, ["bound", "texts"])


@app.command()
def zero_shot(
    pipeline: Pipeline,
    dataset: Annotated[
        list[str],
        typer.Option(
            help="NAME=FILE[#COLUMN] or NAME=ID[:CONFIG[:SPLIT]][#COLUMN], several times; known names are detokenized."
        ),
    ],
    limit: Limit = None,
    max_length: MaxLength = None,
    schedule: Schedule = None,
    num_draws: NumDraws = 8,
    batch_size: BatchSize = 32,
    json_file: JsonFile = None,
):
    """
    The bound of one pipeline on several corpora, laid out as in MDLM's table, with the published rows beside it. These
    are of other models, trained on other texts, and tokens of theirs are no tokens of yours. Goes on where it was
    interrupted, if --json is given.
    """
    state = start_processes(json_file)
    specs = [parse_corpus(spec) for spec in dataset]
    names = [spec["name"] for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"`--dataset` must have a name for each corpus, got {names}.")
    corpora = {}
    for spec in specs:
        name, where = spec["name"], [spec[key] for key in ("dataset", "config_name", "split", "text_column")]
        spec["detokenize"] = name if name in RULES else None
        corpora[name] = read_corpus(*where, limit, spec["detokenize"])
    pipe = load_pipeline(pipeline, schedule)
    bounds = {}
    for name, texts in corpora.items():
        bound = likelihood_bound(
            pipe,
            texts,
            max_length=max_length,
            num_draws=num_draws,
            batch_size=batch_size,
            corpus_name=name,
            resume_file=json_file and f"{json_file}.{name}",
        )
        say(state, f"{name}: {bound}")
        bounds[name] = bound.to_dict()
    say(state, "\n" + table(pipeline, bounds))
    published = {model: dict(zip(CORPORA, values)) for model, values in PUBLISHED.items()}
    figures = {"pipeline": pipeline, "corpora": [spec | {"limit": limit} for spec in specs], "bounds": bounds}
    finish(state, json_file, figures | {"published_perplexity_per_token": published}, names)


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
    judge_max_length: JudgeMaxLength = None,
):
    """
    Quality against diversity: texts at several temperatures (or top-k, top-p, numbers of steps), their BLEU against
    self-BLEU, and their perplexity under a judge against their entropy. Goes on where it was interrupted.
    """
    state = start_processes(output_dir / "curve.json")
    texts = read_corpus(dataset, config_name, split, text_column, None, None)
    pipe = load_pipeline(pipeline, None)
    all_values = parse_values(parameter, values)
    for value in all_values:
        call_args = checked_call(pipe, num_texts, gen_length, **{parameter: value})
    references = spelled_by(pipe.tokenizer, [text for text in texts if text and text.strip()][:num_texts])
    rows = quality_curve(
        pipe,
        references,
        parameter,
        all_values,
        num_texts=num_texts,
        gen_length=gen_length,
        batch_size=batch_size,
        seed=seed,
        judge=None if judge is None else load_judge(judge, judge_gguf_file),
        judge_max_length=judge_max_length,
        output_dir=output_dir,
    )
    if state.is_main_process:
        del call_args[parameter]
        corpus = {"dataset": dataset, "config_name": config_name, "split": split, "text_column": text_column}
        judged = {"judge": judge, "judge_max_length": judge_max_length}
        settings = {"pipeline": pipeline, "corpus": corpus, **judged, **sampling_of(pipe, seed, call_args)}
        save_curve(output_dir, parameter, rows, settings)
        for value in all_values:
            remove_parts(str(output_dir / f"{parameter}-{value}"))
    state.wait_for_everyone()
    say(state, f"{output_dir}/curve.json, {output_dir}/curve.png")


def start_processes(output_file: Path | None) -> PartialState:
    """The processes that this one is of, alone unless accelerate started it; raises where nothing can be written."""
    if output_file is not None and output_file.is_dir():
        raise ValueError(f"`--json` must be a file, got the folder {str(output_file)!r}.")
    # accelerate sees several processes without an accelerator only when told to use the CPU. What one is done with may
    # take others long.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu, timeout=timedelta(days=7))


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


def parse_corpus(spec: str) -> dict:
    """Name, dataset, configuration, split and column out of `NAME=SOURCE[:CONFIG[:SPLIT]][#COLUMN]`."""
    name, _, rest = spec.partition("=")
    source, _, column = rest.partition("#")
    dataset, *details = source.split(":", 2)
    if not name or not dataset or (details and Path(dataset).suffix in READERS):
        raise ValueError(f"`--dataset` must be NAME=FILE[#COLUMN] or NAME=ID[:CONFIG[:SPLIT]][#COLUMN], got {spec!r}.")
    config_name, split = [*details, None, None][:2]
    return {
        "name": name,
        "dataset": dataset,
        "config_name": config_name or None,
        "split": split or "test",
        "text_column": column or "text",
    }


def first_pairs(pipe, pairs, source_column, target_column, length, number) -> tuple[list[str], list[str]]:
    """The first pairs that are rows of the bound as well: neither part blank, and together not too long."""
    sources, targets = [], []
    for pair in pairs:
        source, target = pair[source_column], pair[target_column]
        if not source or not source.strip() or not target or not target.strip():
            continue
        if len(pipe.tokenizer(source, target, verbose=False)["input_ids"]) <= length:
            sources.append(source)
            targets.append(target)
        if len(sources) == number:
            break
    return sources, spelled_by(pipe.tokenizer, targets)


def checked_call(pipe, num_texts: int, gen_length: int | None, sources: list[str] | None = None, **call_args) -> dict:
    """The arguments of the pipeline's call; raises its error for those it does not take, before anything is done."""
    if num_texts < 2:
        raise ValueError(f"There must be two texts at least, to be compared, got {num_texts}.")
    if gen_length is not None:
        call_args["gen_length"] = gen_length
    pipe.stream(**({} if sources is None else {"source": sources}), **call_args)  # checks at once, writes when read
    return call_args


def sampling_of(pipe, seed: int, call_args: dict) -> dict:
    """What generated texts depend on beside the model."""
    config = pipe.scheduler.config
    sampling = {"scheduler": type(pipe.scheduler).__name__, "seed": seed}
    sampling |= {name: call_args.get(name, config[name]) for name in ("gen_length", "temperature", "top_k", "top_p")}
    return {"sampling": sampling | {"num_inference_steps": call_args.get("num_inference_steps")}}


def load_rouge(name: str):
    """ROUGE of `evaluate`."""
    from evaluate import load  # takes a second, and nothing else needs it

    with PartialState().main_process_first():  # it downloads
        return load(name)


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


def say(state: PartialState, text: str):
    """Prints in the first process."""
    if state.is_main_process:
        print(text, flush=True)


def finish(state: PartialState, json_file: Path | None, figures: dict, parts: list[str]):
    """Writes the figures, in the first process; what was kept beside the file by the names `parts` is done with."""
    if json_file is not None and state.is_main_process:
        write_text(json_file, json.dumps(figures, indent=2) + "\n")
        for name in parts:
            remove_parts(f"{json_file}.{name}")
    state.wait_for_everyone()


def main():
    """The command; what the library has to say of wrong input is printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
