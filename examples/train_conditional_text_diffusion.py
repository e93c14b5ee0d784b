"""
Trains a text diffusion model on pairs: the source is given, the target generated.

    python examples/train_conditional_text_diffusion.py --model_name_or_path bert-base-uncased --train_file pairs.csv

The output folder is a pipeline that writes with `pipe(source="...")`, and for prompts and completions with
`pipe("...", gen_length=...)`. `--help` lists all options: those of transformers' TrainingArguments among them.
"""

import sys
from dataclasses import dataclass, field

from transformers import AutoTokenizer, HfArgumentParser, set_seed

from diffusers_text import TextDiffusionTrainer, TextDiffusionTrainingArguments, load_denoiser, load_splits


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "Encoder checkpoint, folder or Hub id."})
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset, Hub id or folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Training files: .json, .jsonl, .csv, .tsv or .parquet."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "Validation files."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share of the training data to hold out where there is no validation data."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first rows of the training data."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Only the first rows of the validation data."}
    )


def take(dataset, rows):
    """The first `rows` of a dataset, all for None."""
    return dataset if rows is None else dataset.select(range(min(rows, len(dataset))))


def main(arguments: list[str] | None = None):
    parser = HfArgumentParser((ScriptArguments, TextDiffusionTrainingArguments))
    parser.set_defaults(packing=False, fill_rows=True)
    script_args, args = parser.parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    if args.corpus_name is None:
        args.corpus_name = script_args.dataset_name or ", ".join(script_args.train_file or [])

    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = load_denoiser(script_args.model_name_or_path, args.time_conditioning)
    train, validation = load_splits(
        script_args.dataset_name,
        script_args.dataset_config_name,
        script_args.train_file,
        script_args.validation_file,
        script_args.validation_split_percentage,
    )
    missing = {args.source_column, args.target_column} - set(train.column_names)
    if missing and {args.prompt_column, args.completion_column} - set(train.column_names):
        parser.error(
            f"the data has the columns {train.column_names}: name its pairs with --source_column and"
            " --target_column, or with --prompt_column and --completion_column"
        )
    trainer = TextDiffusionTrainer(
        model,
        args,
        processing_class=tokenizer,
        train_dataset=take(train, script_args.max_train_samples),
        eval_dataset=take(validation, script_args.max_eval_samples),
    )
    trainer.train()
    if trainer.was_stopped:
        print(
            f"Stopped at step {trainer.state.global_step}. Go on with --resume_from_checkpoint True", file=sys.stderr
        )
        return

    metrics = trainer.evaluate()  # prints sources with what the model writes for them
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset=script_args.dataset_name)
    else:
        trainer.create_model_card(dataset=script_args.dataset_name)


if __name__ == "__main__":
    main()
