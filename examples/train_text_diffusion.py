"""
Continues the pre-training of an encoder as a text diffusion model, or trains one from scratch.

    python examples/train_text_diffusion.py --model_name_or_path bert-base-uncased --train_file texts.txt

The output folder, `--output_dir`, is a pipeline for `TextDiffusionPipeline.from_pretrained`, with a model card.
`--help` lists all options: those of transformers' TrainingArguments among them.
"""

import sys
from dataclasses import dataclass, field

from transformers import AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import has_length

from diffusers_text import TextDiffusionTrainer, TextDiffusionTrainingArguments, load_denoiser, load_splits


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Encoder checkpoint, folder or Hub id."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    from_scratch: bool = field(default=False, metadata={"help": "Take the checkpoint's config, not its weights."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter in place of all weights."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the adapter."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["query", "value"], metadata={"help": "Layers that get an adapter, by name."}
    )


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Dataset, Hub id or folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Training files: .txt (a text a line), .json, .jsonl, .csv, .tsv or .parquet."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "Validation files."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share of the training data to hold out where there is no validation data."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the data while training; needs --max_steps."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first rows of the training data."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Only the first rows of the validation data."}
    )


def take(dataset, rows):
    """The first `rows` of a dataset or stream, all for None."""
    return dataset if rows is None else dataset.take(min(rows, len(dataset)) if has_length(dataset) else rows)


def add_adapter(model, args: ModelArguments, time_conditioning: str | None):
    from peft import LoraConfig, get_peft_model

    # New parts of the model, which tell it the time, are trained whole.
    new = None if time_conditioning in (None, "none") else ["time_mlp"]
    config = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, modules_to_save=new
    )
    return get_peft_model(model, config)


def main(arguments: list[str] | None = None):
    parser = HfArgumentParser((ModelArguments, DataArguments, TextDiffusionTrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    if args.corpus_name is None:
        args.corpus_name = data_args.dataset_name or ", ".join(data_args.train_file or [])

    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = load_denoiser(model_args.model_name_or_path, args.time_conditioning, model_args.from_scratch)
    if model_args.use_peft:
        model = add_adapter(model, model_args, args.time_conditioning)
    train, validation = load_splits(
        data_args.dataset_name,
        data_args.dataset_config_name,
        data_args.train_file,
        data_args.validation_file,
        data_args.validation_split_percentage,
        data_args.streaming,
    )
    trainer = TextDiffusionTrainer(
        model,
        args,
        processing_class=tokenizer,
        train_dataset=take(train, data_args.max_train_samples),
        eval_dataset=take(validation, data_args.max_eval_samples),
    )
    trainer.train()
    if trainer.was_stopped:
        print(
            f"Stopped at step {trainer.state.global_step}. Go on with --resume_from_checkpoint True", file=sys.stderr
        )
        return

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset=data_args.dataset_name)
    else:
        trainer.create_model_card(dataset=data_args.dataset_name)


if __name__ == "__main__":
    main()
