"""
The training loop of a text diffusion model, with nothing but accelerate around it. To be read, then changed.

    python examples/minimal_training_loop.py --model_name_or_path bert-base-uncased --train_file texts.txt
    accelerate launch --num_processes 4 examples/minimal_training_loop.py ...

`TextDiffusionTrainer` does the same with evaluation, averaged weights, checkpoints and resuming.
"""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

from diffusers_text import (
    AbsorbingStateScheduler,
    DataCollatorForTextDiffusion,
    TextDiffusionPipeline,
    continuous_time_bound,
    load_denoiser,
    logits_at,
    prepare_texts,
    token_settings,
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True, help="encoder checkpoint, folder or Hub id")
    parser.add_argument("--train_file", required=True, help="texts, one a line")
    parser.add_argument("--output_dir", default="outputs/minimal", help="where the pipeline is saved")
    parser.add_argument("--max_length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--max_steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--per_device_train_batch_size", type=int, default=32, help="rows of a process in a step")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="its peak")
    parser.add_argument("--seed", type=int, default=0, help="of order and noise")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = load_denoiser(args.model_name_or_path)
    scheduler = AbsorbingStateScheduler(**token_settings(tokenizer), gen_length=args.max_length - 2)

    with accelerator.main_process_first():  # the other processes find the rows in the cache
        texts = load_dataset("text", data_files=args.train_file, split="train")
        rows = prepare_texts(texts, tokenizer, args.max_length)
    loader = DataLoader(
        rows,
        batch_size=args.per_device_train_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=DataCollatorForTextDiffusion(tokenizer),
        generator=torch.Generator().manual_seed(args.seed),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if len(loader) == 0:
        batch = f"{accelerator.num_processes} x --per_device_train_batch_size {args.per_device_train_batch_size}"
        raise ValueError(f"{args.train_file} makes {len(rows)} rows, fewer than {batch}.")
    lr_schedule = get_linear_schedule_with_warmup(optimizer, args.max_steps // 20, args.max_steps)
    generator = torch.Generator().manual_seed(args.seed + accelerator.process_index)

    model.train()
    step, average = 0, None
    bar = tqdm(total=args.max_steps, desc="Training", unit=" steps", disable=not accelerator.is_main_process)
    while step < args.max_steps:
        for batch in loader:
            # 1. A time for each row, and noise: every token is masked with the probability that its time says.
            sample, maskable = batch["input_ids"], batch["labels"] != -100  # [batch, seq]
            times = scheduler.sample_timesteps(len(sample), generator=generator, time_epsilon=1e-3).to(sample.device)
            noisy = scheduler.add_noise(sample, times, maskable=maskable, generator=generator)
            # 2. The network predicts the masked tokens, and nothing else.
            positions = (maskable & (noisy == tokenizer.mask_token_id)).flatten().nonzero().flatten()  # [n]
            inputs = {"input_ids": noisy}
            if "attention_mask" in batch:
                inputs["attention_mask"] = batch["attention_mask"]
            logits = logits_at(model, positions, **inputs)  # [n, vocab]
            # 3. The bound on the negative log-likelihood, in nats per token.
            loss = continuous_time_bound(
                scheduler, logits, sample, noisy, times, positions=positions, maskable=maskable
            )
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_schedule.step()
            optimizer.zero_grad()

            step += 1
            average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
            bar.set_postfix_str(f"bound {average:.2f} nats/token", refresh=False)
            bar.update()
            if step == args.max_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        pipe = TextDiffusionPipeline(accelerator.unwrap_model(model), tokenizer, scheduler)
        pipe.save_pretrained(args.output_dir)
        for text in pipe(num_texts_per_prompt=2, generator=torch.Generator().manual_seed(0)).texts:
            print(f"  * {text}")


if __name__ == "__main__":
    main()
