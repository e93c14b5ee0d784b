"""What the papers compare with, on BERT's own weights: BERT-Mouth, and a decoder that writes from left to right."""

import math
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from study import (
    Data,
    StudyArguments,
    begin_run,
    checkpoint_of,
    finish_run,
    last_checkpoint,
    model_settings,
    run_folder,
    training_settings,
)
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from diffusers_text import logits_at

GIBBS_SWEEPS = 12
CLASSES = {"BERT-Mouth": AutoModelForMaskedLM, "autoregressive decoder": AutoModelForCausalLM}


def train_baseline(args: StudyArguments, data: Data, name: str, seed: int) -> PreTrainedModel:
    """One of `CLASSES` after as many steps as the others take; it goes on where it was, and is not trained twice."""
    folder = run_folder(args, name, seed)
    begin_run(args, folder, {})
    if not (folder / "model").exists():
        set_seed(seed)
        is_masked = name == "BERT-Mouth"
        settings = model_settings(args) if is_masked else {**model_settings(args), "is_decoder": True}
        rows = data.train.select_columns("input_ids")
        if is_masked:
            # BERT's 15%, of the terminator as well, which the collator would leave out.
            given = {data.tokenizer.cls_token_id, data.tokenizer.pad_token_id}
            rows = rows.map(lambda row: {"special_tokens_mask": [int(i in given) for i in row["input_ids"]]})
        trainer = Trainer(
            CLASSES[name].from_pretrained(checkpoint_of(args), **settings),
            TrainingArguments(str(folder), remove_unused_columns=False, **training_settings(args, seed)),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(data.tokenizer, mlm=is_masked),
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(folder, args.max_steps))
        trainer.save_model(str(folder / "unfinished"))
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            (folder / "unfinished").replace(folder / "model")
        finish_run(folder, folder / "done.json", {"steps": trainer.state.global_step})
    return load_baseline(folder, name)


def load_baseline(folder: Path, name: str) -> PreTrainedModel:
    """A trained baseline."""
    return CLASSES[name].from_pretrained(folder / "model").eval().to(PartialState().device)


@torch.no_grad()
def exact_nats(model: PreTrainedModel, rows: Dataset) -> float:
    """The negative log-likelihood of rows under the decoder, in nats per token."""
    nats, rows = [], torch.tensor(rows["input_ids"][:])
    for batch in rows.to(model.device).split(32):
        logits = model(input_ids=batch).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), batch[:, 1:], reduction="none")
        nats.append(losses.cpu().double().sum().item())
    return math.fsum(nats) / rows[:, 1:].numel()


@torch.no_grad()
def gibbs_samples(model: PreTrainedModel, data: Data, num_texts: int, length: int) -> list[list[int]]:
    """
    BERT-Mouth (Wang and Cho, arXiv 1902.04094): from nothing but masks, a token at a time, any of them, is masked and
    drawn anew, `GIBBS_SWEEPS` times for each on average. None is left out of the draw, as their top 100 would.
    """
    tokenizer, texts = data.tokenizer, []
    suppressed = [i for i in tokenizer.all_special_ids if i != tokenizer.sep_token_id]
    for start in tqdm(range(0, num_texts, 32), "Gibbs sampling"):
        rows = torch.arange(min(32, num_texts - start))
        canvas = torch.full((len(rows), length + 2), tokenizer.mask_token_id)
        canvas[:, 0], canvas[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
        # Each once in random order, so that no mask is left, then any.
        order = torch.rand(len(rows), length).argsort(dim=1)
        for step in range(GIBBS_SWEEPS * length):
            columns = 1 + (order[:, step] if step < length else torch.randint(length, (len(rows),)))
            canvas[rows, columns] = tokenizer.mask_token_id
            places = rows * canvas.shape[1] + columns
            logits = logits_at(model, places.to(model.device), input_ids=canvas.to(model.device)).float().cpu()
            logits[:, suppressed] = -torch.inf
            canvas[rows, columns] = logits.softmax(dim=-1).multinomial(1)[:, 0]
        texts += canvas[:, 1:-1].tolist()
    return texts


@torch.no_grad()
def decoder_samples(model: PreTrainedModel, data: Data, num_texts: int, length: int) -> list[list[int]]:
    """Texts of the decoder, from left to right."""
    tokenizer, texts = data.tokenizer, []
    suppressed = [i for i in tokenizer.all_special_ids if i != tokenizer.sep_token_id]
    for start in tqdm(range(0, num_texts, 32), "Decoding"):
        begin = torch.full((min(32, num_texts - start), 1), tokenizer.cls_token_id, device=model.device)
        rows = model.generate(
            input_ids=begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=length,
            do_sample=True,
            top_k=0,
            suppress_tokens=suppressed,
            eos_token_id=tokenizer.sep_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts += rows[:, 1:].tolist()
    return texts
