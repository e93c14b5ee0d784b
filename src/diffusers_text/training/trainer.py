"""Training of masked diffusion models with transformers' Trainer."""

import copy
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy, has_length, rotate_checkpoints
from transformers.utils import logging

from ..data.collators import DataCollatorForTextDiffusion
from ..data.special_tokens import terminator_id
from ..evaluation.estimators import choose_estimator, draw_estimates
from ..files import move_files
from ..layouts import REPLACED_BY_FLAT
from ..losses import BoundTerms
from ..models.loading import load_denoiser
from ..models.sparse_head import conditions_on_time, has_adapter, logits_at, max_sequence_length, sum_over_logits
from ..noising import NoisyRows, bound_terms, row_key
from ..pipelines.pipeline_text_diffusion import TextDiffusionPipeline
from ..schedulers.scheduling_absorbing_state import AbsorbingStateScheduler
from .arguments import TextDiffusionTrainingArguments
from .callbacks import EMA_NAME, BeginRun, PlotLog, StopOnSigterm, WeightAverage
from .card import create_training_card
from .checkpoints import STAGING_NAME, check_folder, explained_failure, find_checkpoint
from .hub import upload_checkpoint, upload_output
from .metrics import COUNTED, evaluation_figures, figures, row_sums
from .noise import training_noise
from .order import RowOrder
from .samples import sample_texts, write_samples
from .setup import (
    check_components,
    create_scheduler,
    prepare_dataset,
    prepare_evaluation,
    resumed_scheduler,
    with_choices,
)

logger = logging.get_logger(__name__)


class TextDiffusionTrainer(Trainer):
    r"""
    Fine-tunes a masked language model as the denoiser of a text diffusion model: by the cross-entropy of masked
    tokens, or the likelihood bound (`args.objective`).

    What it logs is over everything seen since the last log, in all processes: `loss` (the objective in nats per
    maskable token), the figures of [`~training.metrics.figures`] and `tokens_per_second`. An evaluation draws the same
    noise every time, by the tokens of a row alone, so that its figures compare between checkpoints, and between
    machines. Each checkpoint is a pipeline, and a checkpoint of transformers that training resumes from.

    Args:
        model ([`~transformers.PreTrainedModel`] or `str`): the denoiser, or where [`load_denoiser`] finds it.
        args ([`TextDiffusionTrainingArguments`]): the arguments, of which `trainer.args` is a copy.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): the tokenizer.
        train_dataset, eval_dataset (`datasets.Dataset`, `datasets.IterableDataset`; for evaluation a `dict` as well):
            With a column of texts, of pairs or of prompts and completions by the names in `args`, which are tokenized
            here; or with `input_ids`, as [`prepare_texts`] and its like make them.
        scheduler ([`AbsorbingStateScheduler`], *optional*):
            The noise; by default what `args` say, with the token counts of `train_dataset` for the spindle.
        kwargs: as in [`~transformers.Trainer`].

    Raises:
        ValueError: components or arguments that do not belong together.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from diffusers_text import TextDiffusionTrainer, TextDiffusionTrainingArguments

    >>> args = TextDiffusionTrainingArguments("outputs/run", max_steps=2, max_length=8, use_cpu=True)
    >>> dataset = Dataset.from_dict({"text": ["We agree that no is no.", "Yes, we do agree."]})
    >>> trainer = TextDiffusionTrainer(model, args, processing_class=tokenizer, train_dataset=dataset)
    >>> trainer.train().global_step
    {'train_runtime': ...}
    2
    >>> trainer.save_model()  # a pipeline in outputs/run
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: TextDiffusionTrainingArguments,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict | None = None,
        scheduler: AbsorbingStateScheduler | None = None,
        **kwargs,
    ):
        if isinstance(model, str):
            model = load_denoiser(model, args.time_conditioning)
        for name in ("model_init", "compute_loss_func", "compute_metrics"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` has no place here: the loss and its figures are those of the bound.")
        check_components(model, processing_class, scheduler, args)
        check_folder(args.output_dir)
        self.resumed_from = find_checkpoint(args.output_dir, args.resume_from_checkpoint)
        train_dataset = prepare_dataset(train_dataset, processing_class, args)
        eval_dataset = prepare_evaluation(eval_dataset, processing_class, args)
        if scheduler is None:
            scheduler = create_scheduler(args, processing_class, train_dataset, self.resumed_from)
        args = with_choices(args, scheduler)
        if isinstance(train_dataset, IterableDataset):
            # To the Trainer a stream has no passes, and so no place to take up again in the second one.
            train_dataset = train_dataset.repeat(None)
        # Also checks that the parts belong together, and knows their classes however the model will be wrapped.
        self.pipeline = TextDiffusionPipeline(model, processing_class, scheduler)
        self.pipeline.set_progress_bar_config(disable=True)
        self.max_sequence_length = max_sequence_length(model)

        if kwargs.get("data_collator") is None:
            fill_to = args.max_length if args.fill_rows else None
            kwargs["data_collator"] = DataCollatorForTextDiffusion(processing_class, fill_to=fill_to)
        self.push_in_progress = None  # the Trainer sets it in the first process only
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=self._evaluation_figures,
            **kwargs,
        )
        self._check_devices()
        self.model_accepts_loss_kwargs = True  # the loss is divided by the number of items of the whole step
        self.ema = None
        self.was_stopped = False
        self.samples = []
        self.row_order = None
        self._staging = None  # the folder in which a checkpoint is being written
        self.begin_figures()
        self.add_callback(BeginRun(self))
        if args.ema_decay > 0:
            self.add_callback(WeightAverage(self))
        self.add_callback(PlotLog())
        self.stop_on_sigterm = StopOnSigterm(self)
        self.add_callback(self.stop_on_sigterm)  # last: what it saves must be whole

    # --- Set-up ---

    def _check_devices(self):
        args, plugin = self.args, self.accelerator.state.deepspeed_plugin
        sharded = self.is_fsdp_enabled or (self.is_deepspeed_enabled and plugin.zero_stage == 3)
        for name, value in (("ema_decay", args.ema_decay > 0), ("head_chunk_size", args.head_chunk_size is not None)):
            if sharded and value:
                raise ValueError(f"`{name}` needs whole parameters on each device, not those of FSDP or ZeRO-3.")
        self._can_sample = not sharded
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            raise ValueError("`fsdp_state_dict_type` must be FULL_STATE_DICT: a checkpoint is a whole model.")

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer changes, and so what the moving average is of."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    # --- Data ---

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        strategy = self.args.train_sampling_strategy
        if not has_length(dataset) or strategy not in ("random", "group_by_length"):
            return super()._get_train_sampler(dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = None
        if strategy == "group_by_length":
            name = self.args.length_column_name
            has_column = isinstance(dataset, Dataset) and name in dataset.column_names
            lengths = dataset[name][:] if has_column else [len(row["input_ids"]) for row in dataset]
        self.row_order = RowOrder(len(dataset), seed, lengths, self._rows_in_step)
        return self.row_order

    def _get_eval_sampler(self, eval_dataset):
        # As they come: nothing depends on the order.
        return torch.utils.data.SequentialSampler(eval_dataset) if has_length(eval_dataset) else None

    @property
    def _rows_in_step(self) -> int:
        """Rows of an optimizer step in all processes and accumulated batches."""
        return self._train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The Trainer's, with the number of each row among those of the optimizer step in `rows_of_step`."""
        batches = []
        for i in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            size, total = self._train_batch_size, self._train_batch_size * self.args.world_size
            first = self.args.process_index * size
            if self.accelerator.gradient_state.end_of_dataloader and has_length(self.train_dataset):
                # accelerate fills the last batches up with rows that were seen before.
                rest = len(self.train_dataset) % total or total
                batch["labels"][max(0, rest - first) :] = -100
            first += i * total
            batch["rows_of_step"] = [*range(first, first + len(batch["labels"]))]
            batches.append(batch)
        return batches, self._get_num_items_in_batch(batches, device)

    # --- Loss ---

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        r"""
        The objective's sum over the batch's masked tokens, divided by the number of maskable tokens of the whole step
        (all processes and accumulated batches), and times the number of processes, over which gradients are averaged.
        """
        maskable = inputs["labels"] != -100
        rows = inputs["rows_of_step"]
        step = self.state.global_step
        noise = training_noise(
            self.pipeline.scheduler, inputs["input_ids"], maskable, self.args, step, rows, self._rows_in_step
        )
        nats, terms = self.masked_loss(model, inputs, noise)
        if not nats.isfinite():
            raise FloatingPointError(self._describe_rows(nats.item(), inputs, rows))
        self._tally(row_sums(terms, noise, terminator_id(self.processing_class)).sum(dim=0), nats.detach())
        # A step may consist of rows in which nothing can be masked.
        loss = nats / num_items_in_batch.clamp_min(1) * self.accelerator.num_processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def masked_loss(self, model, inputs, noise: NoisyRows) -> tuple[torch.Tensor, BoundTerms]:
        """The objective's sum over masked tokens, in nats, and what each has to do with the bound."""
        seq_len = noise.sample.shape[1]
        if seq_len > self.max_sequence_length:
            raise ValueError(f"A row has {seq_len} tokens; the model takes at most {self.max_sequence_length}.")
        model_inputs = {"input_ids": noise.noisy}
        model_inputs |= {name: inputs[name] for name in ("attention_mask", "token_type_ids") if name in inputs}
        if conditions_on_time(model):
            model_inputs["timesteps"] = noise.timesteps
        scheduler = self.pipeline.scheduler

        def loss_of(logits, positions):
            terms = bound_terms(scheduler, logits, positions, noise, overwrite_logits=True)  # nobody else sees them
            return self.objective(terms, noise).sum(), BoundTerms(*(values.detach() for values in terms))

        chunk_size = self.args.head_chunk_size
        if chunk_size is None:
            return loss_of(logits_at(model, noise.positions, **model_inputs), noise.positions)
        nats, parts = sum_over_logits(model, noise.positions, chunk_size, loss_of, **model_inputs)
        return nats, BoundTerms(*(torch.cat(values) for values in zip(*parts)))

    def objective(self, terms: BoundTerms, noise: NoisyRows) -> torch.Tensor:
        """What is minimised, in nats for each masked token, [n]."""
        if self.args.objective == "continuous":
            return terms.nats
        weights = noise.weights[terms.rows].to(terms.nats)
        if self.args.objective == "mlm":
            return -weights * terms.log_pi
        # D3PM's weight is against the divergence of one step.
        return terms.nats - self.args.num_diffusion_steps * self.args.cross_entropy_weight * weights * terms.log_p

    def _describe_rows(self, nats, inputs, rows) -> str:
        """Which rows a loss that is not finite comes from."""
        if self.row_order is not None:
            per_epoch = -(-len(self.train_dataset) // self._rows_in_step)
            first = self.state.global_step % per_epoch * self._rows_in_step
            order = self.row_order.indices
            rows = [order[(first + row) % len(order)] for row in rows]
        texts = self.processing_class.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        shown = "; ".join(f"row {row}: {text[:60]!r}" for row, text in zip(rows, texts))
        return f"The loss is {nats} in step {self.state.global_step + 1}. Its batch holds {shown}."

    # --- Figures ---

    def _tally(self, sums, nats):
        """Adds a batch to what is logged next and to what is logged at the end."""
        batch = torch.cat([nats[None].to(sums), sums])  # [1 + figures]
        self._seen = batch if self._seen is None else self._seen + batch

    def begin_figures(self):
        """Forgets what was seen: sums since the last log, and since training began."""
        self._seen = self._total = None
        self._window_start = time.perf_counter()

    def _collect(self) -> torch.Tensor:
        """What all processes have seen since the last call, added to the whole as well."""
        seen = self.accelerator.reduce(self._seen, "sum").cpu()
        self._total = seen if self._total is None else self._total + seen
        self._seen = None
        return seen

    def log(self, logs, start_time=None):
        """The Trainer's, with the loss over all tokens seen, not a mean of steps, and the figures of the bound."""
        if "loss" in logs:
            seen, now = self._collect(), time.perf_counter()
            logs["loss"] = loss_per_token(seen)
            logs |= figures(seen[1:])
            logs["tokens_per_second"] = seen[1 + COUNTED.index("tokens")].item() / (now - self._window_start)
            self._window_start = now
        if "train_loss" in logs and self._seen is not None:
            self._collect()
        if "train_loss" in logs and self._total is not None:
            logs["train_loss"] = loss_per_token(self._total)
        super().log(logs, start_time)

    # --- Evaluation ---

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        r"""
        The bound with the averaged weights, as all figures of the noise that every evaluation draws, and texts.

        Returns:
            `dict`: among others `eval_bound` in nats per maskable token (in continuous time without any cut, or of
            `args.num_diffusion_steps` steps where the objective is discrete), `eval_bound_bits`,
            `eval_bound_standard_error` (of the noise), `eval_masked_cross_entropy`, `eval_masked_accuracy`;
            `eval_loss` is the bound.
        """
        is_outermost, start = metric_key_prefix == "eval", time.perf_counter()
        eval_dataset = prepare_evaluation(eval_dataset, self.processing_class, self.args)
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if is_outermost and self.args.eval_samples > 0 and self._can_sample:
            with self.ema_weights():
                self._write_samples(self.eval_dataset if eval_dataset is None else eval_dataset)
        if is_outermost:
            self._window_start += time.perf_counter() - start
        return metrics

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
        """[`evaluate`] under another name: `metrics` are its figures, `predictions` the sums they are made of."""
        test_dataset = prepare_evaluation(test_dataset, self.processing_class, self.args)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, *args, **kwargs):
        """The Trainer's, with the averaged weights."""
        with self.ema_weights():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """No loss; [`~training.metrics.row_sums`] of each draw, and the number of maskable tokens of each row."""
        inputs = self._prepare_inputs(inputs)
        sample, maskable = inputs["input_ids"], inputs["labels"] != -100
        inside = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(maskable)
        numbers = inputs["copy_number"].tolist() if "copy_number" in inputs else [0] * len(sample)
        rows = zip(sample.cpu(), inside.cpu(), numbers)
        keys = [(row_key(row[kept].tolist()), number) for row, kept, number in rows]
        scheduler = self.pipeline.scheduler
        num_steps = self.args.num_diffusion_steps if self.args.objective == "discrete" else None
        estimator = choose_estimator(scheduler, None, num_steps)
        sums = []

        def terms_of(noise):
            return self.masked_loss(model, inputs, noise)[1]

        draws = range(self.args.eval_draws)
        with torch.no_grad(), self.compute_loss_context_manager():
            for noise, terms, nats in draw_estimates(
                scheduler, sample, maskable, keys, draws, terms_of, estimator, num_steps
            ):
                sums.append(row_sums(terms, noise, terminator_id(self.processing_class)))
                sums[-1][:, COUNTED.index("nats")] = nats
        sums = torch.stack(sums, dim=1)  # [batch, draws, figures]
        return None, sums.flatten(1), sums[:, 0, 1]

    def _evaluation_figures(self, prediction):
        sums = prediction.predictions.reshape(len(prediction.predictions), self.args.eval_draws, -1)
        result = evaluation_figures(sums)
        return {"loss": result["bound"], **result}

    def _write_samples(self, dataset):
        """Texts of the model, on the screen and in `samples/` of the output folder, by the same seeds every time."""
        if self.is_world_process_zero():
            self.samples = sample_texts(self.pipeline, self.args, dataset)
            write_samples(self.samples, Path(self.args.output_dir, "samples"), self.state.global_step)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def ema_weights(self):
        """While open, the model has the averaged weights, if training keeps an average."""
        if self.ema is None or self.ema.temp_stored_params is not None:  # in place already
            yield
            return
        parameters = self.trained_parameters()
        self.ema.store(parameters)
        self.ema.copy_to(parameters)
        try:
            yield
        finally:
            self.ema.restore(parameters)

    # --- Checkpoints ---

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        r"""
        Trains, from where a checkpoint was if there is one: same order of rows, same noise, same weights and averages.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint's folder, or True for the last whole one in `args.output_dir`; by default
                `args.resume_from_checkpoint`.
            kwargs: as in [`~transformers.Trainer.train`].

        Raises:
            FloatingPointError: a loss that is not finite, with the rows of its batch.
            OSError: a checkpoint that could not be saved.
            ValueError: no whole checkpoint, or one of another noise.
        """
        args = self.args
        if resume_from_checkpoint is None:
            resume_from_checkpoint = args.resume_from_checkpoint
        self.resumed_from = find_checkpoint(args.output_dir, resume_from_checkpoint)
        if self.resumed_from is not None:
            self.pipeline.scheduler = resumed_scheduler(self.pipeline.scheduler, self.resumed_from)
        if args.should_save:
            shutil.rmtree(Path(args.output_dir, STAGING_NAME), ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with self.stop_on_sigterm.installed():
            output = super().train(resume_from_checkpoint=self.resumed_from, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def load_ema(self, checkpoint: str):
        """Takes up the average that a checkpoint holds; a checkpoint without one leaves it as it is."""
        path = Path(checkpoint, EMA_NAME)
        if not path.exists():
            logger.warning(f"{checkpoint} holds no {EMA_NAME}: the average of the weights begins anew.")
            return
        self.ema.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.ema.decay = self.args.ema_decay
        self.ema.to(device=self.args.device, dtype=torch.float32)

    def _load_best_model(self):
        super()._load_best_model()
        if self.ema is not None:
            self.load_ema(self.state.best_model_checkpoint)

    def _get_output_dir(self, trial):
        return super()._get_output_dir(trial) if self._staging is None else self._staging

    def _save_checkpoint(self, model, trial):
        """The Trainer's, but in a folder that gets its name when all processes have written it."""
        start, run_dir = time.perf_counter(), self._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        self._staging = str(Path(run_dir, STAGING_NAME))
        staged, final = Path(self._staging, name), Path(run_dir, name)
        try:
            with explained_failure(name, run_dir):
                super()._save_checkpoint(model, trial)
                if self.args.should_save and self.ema is not None:
                    torch.save(self.ema.state_dict(), staged / EMA_NAME)
                if self.state.best_model_checkpoint == str(staged):
                    self.state.best_model_checkpoint = str(final)
                    if self.args.should_save:
                        self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if final.exists():  # of an earlier run: out of the way at once, not file by file
                final.replace(staged.with_name("replaced"))
            staged.replace(final)
            shutil.rmtree(staged.parent)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_dir, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        self._window_start += time.perf_counter() - start

    def save_model(self, output_dir=None, _internal_call=False):
        r"""
        Saves a pipeline with the averaged weights, which is a checkpoint of transformers as well, each file replaced
        at once. An adapter of PEFT is merged into the pipeline, and saved alone in `adapter/`.

        Args:
            output_dir (`str`, *optional*): folder, `args.output_dir` by default.
        """
        if self._staging is not None:  # a checkpoint, with the weights as they are
            super().save_model(output_dir, _internal_call=True)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        check_folder(output_dir)
        staging = Path(output_dir, STAGING_NAME)
        with explained_failure("The model", output_dir), self.ema_weights():
            super().save_model(str(staging), _internal_call=True)
            if self.args.should_save:
                if has_adapter(self.model):
                    self._save_merged(staging)
                move_files(staging, Path(output_dir), REPLACED_BY_FLAT)
                shutil.rmtree(staging)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        """The Trainer's, and what makes a pipeline of it: model_index.json and the scheduler's config."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.pipeline.scheduler.save_pretrained(output_dir)
            if not has_adapter(self.model):
                self.pipeline.save_config(output_dir)

    def _save_merged(self, folder: Path):
        """Moves the adapter in `folder` into `adapter/`, and saves the pipeline with a merged copy of the model."""
        adapter = folder / "adapter"
        adapter.mkdir()
        for path in folder.glob("adapter_*"):
            path.replace(adapter / path.name)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's
        merged = copy.deepcopy(self.accelerator.unwrap_model(self.model)).merge_and_unload()
        merged.save_pretrained(folder)
        pipeline = TextDiffusionPipeline(merged, self.processing_class, self.pipeline.scheduler)
        pipeline.save_config(folder)

    # --- Hub ---

    def create_model_card(self, license: str | None = None, dataset: str | list[str] | None = None):
        r"""
        Writes the pipeline's card to the output folder: data, schedule, arguments, figures and texts.

        Args:
            license (`str`, *optional*): identifier of the licence on the Hub.
            dataset (`str` or `list[str]`, *optional*): ids of the training data on the Hub.
        """
        if self.is_world_process_zero():
            path = Path(self.args.output_dir, "README.md")
            create_training_card(self, license, dataset).save(path.with_name(".README.md"))
            path.with_name(".README.md").replace(path)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs,
    ):
        r"""
        Saves the pipeline with the averaged weights and pushes it with its model card.

        Args:
            commit_message, blocking, token, revision: as in [`~transformers.Trainer.push_to_hub`].
            kwargs: of [`create_model_card`].

        Returns:
            [`~huggingface_hub.CommitInfo`] in the first process, or a `Future` of it unless `blocking`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        revision = self.args.hub_revision if revision is None else revision
        return upload_output(self, commit_message, token, revision, blocking)

    def _push_from_checkpoint(self, checkpoint_folder):
        """Uploads the pipeline with the averaged weights, and the checkpoint where `hub_strategy` says so."""
        if self._staging is not None:  # not whole yet
            return
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        waits = [self.args.hub_strategy == HubStrategy.END or (is_busy and not self.args.hub_always_push)]
        if broadcast_object_list(waits)[0]:  # only the first process uploads, and knows
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if self.is_world_process_zero():
            self.create_model_card()
            upload_checkpoint(self, checkpoint_folder)


def loss_per_token(seen: torch.Tensor) -> float:
    """The objective's sum, which stands before the sums of [`~training.metrics.row_sums`], over maskable tokens."""
    return (seen[0] / seen[1 + COUNTED.index("tokens")].clamp_min(1)).item()


__all__ = ["TextDiffusionTrainer"]
