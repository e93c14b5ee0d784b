"""What the papers compare with, on BERT's own weights: BERT-Mouth, and a decoder that writes from left to right."""

import math
import shutil

import torch
from study import Data, StudyArguments, checkpoint_of, model_settings, run_folder, training_settings
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

CLASSES = {"BERT-Mouth": AutoModelForMaskedLM, "autoregressive decoder": AutoModelForCausalLM}


def train_baseline(args: StudyArguments, data: Data, name: str, seed: int) -> PreTrainedModel:
    """One of `CLASSES` after as many steps as the others take; it goes on where it was, and is not trained twice."""
    folder = run_folder(args, name, seed)
    if (folder / "model.safetensors").exists():
        return CLASSES[name].from_pretrained(folder).eval()
    set_seed(seed)
    is_masked = name == "BERT-Mouth"
    settings = model_settings(args) if is_masked else {**model_settings(args), "is_decoder": True}
    trainer = Trainer(
        CLASSES[name].from_pretrained(checkpoint_of(args), **settings),
        TrainingArguments(str(folder), **training_settings(args, seed)),
        train_dataset=data.train.select_columns("input_ids"),
        data_collator=DataCollatorForLanguageModeling(data.tokenizer, mlm=is_masked),  # 15% of the tokens, as BERT
    )
    trainer.train(resume_from_checkpoint=True if [*folder.glob("checkpoint-*")] else None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
    return trainer.accelerator.unwrap_model(trainer.model).eval()


@torch.no_grad()
def exact_nats(model: PreTrainedModel, data: Data) -> float:
    """The negative log-likelihood of the held-out rows under the decoder, in nats per token."""
    nats, rows = [], torch.tensor(data.held_out["input_ids"][:])
    for batch in rows.to(model.device).split(32):
        logits = model(input_ids=batch).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), batch[:, 1:], reduction="none")
        nats.append(losses.double().sum().item())
    return math.fsum(nats) / rows[:, 1:].numel()


@torch.no_grad()
def gibbs_samples(model: PreTrainedModel, data: Data, num_texts: int, length: int, num_steps: int) -> list[list[int]]:
    """
    BERT-Mouth (Wang and Cho, arXiv 1902.04094): a token at a time is masked and drawn anew, first each of them once,
    in random order, then any of them. `num_steps` forward passes.
    """
    tokenizer, texts = data.tokenizer, []
    suppressed = [i for i in tokenizer.all_special_ids if i != tokenizer.sep_token_id]
    for start in tqdm(range(0, num_texts, 32), "Gibbs sampling"):
        rows = torch.arange(min(32, num_texts - start))
        canvas = torch.full((len(rows), length + 2), tokenizer.mask_token_id)
        canvas[:, 0], canvas[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
        order = torch.rand(len(rows), length).argsort(dim=1)
        for step in range(num_steps):
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
