"""Text generation by masked diffusion: prompts in, texts out."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.utils import logging
from diffusers.utils.torch_utils import is_compiled_module
from huggingface_hub import create_repo, file_exists, upload_folder
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.special_tokens import terminator_id, token_settings
from ..models.sparse_head import HiddenStateCache, conditions_on_time, has_adapter, logits_at, max_sequence_length
from ..schedulers.sampling import check_generator, check_positive_int, check_shaping
from .model_card import create_model_card
from .pipeline_output import TextDiffusionPipelineOutput

logger = logging.get_logger(__name__)


class TextDiffusionPipeline(DiffusionPipeline):
    r"""
    Generates, continues and infills text with a masked language model as the denoiser.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            [`DiffusionBertForMaskedDiffusion`], or any `AutoModelForMaskedLM` model, which decodes time-agnostically.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): its tokenizer, with a mask token.
        scheduler ([`AbsorbingStateScheduler`]):
            Decides what is revealed when. Where its config leaves `mask_token_id`, `vocab_size` or
            `suppressed_token_ids` open, the pipeline holds a copy of it with the tokenizer's.

    Raises:
        ValueError: a tokenizer without mask token, or components that do not belong together.

    Example:

    ```python
    >>> from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

    >>> pipe = TextDiffusionPipeline(model, tokenizer, AbsorbingStateScheduler())
    >>> pipe.set_progress_bar_config(disable=True)
    >>> len(pipe(num_texts_per_prompt=2, gen_length=4).texts)
    2
    ```
    """

    model_cpu_offload_seq = "model"
    _callback_tensor_inputs = ["sample", "attention_mask", "positions", "logits"]

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, scheduler: SchedulerMixin):
        super().__init__()
        token_settings(tokenizer)  # raises without a mask token
        if model.config.is_encoder_decoder:
            raise ValueError(f"`model` is a {type(model).__name__}; a denoiser must be an encoder.")
        if model.config.vocab_size < len(tokenizer):
            raise ValueError(
                f"`model` has {model.config.vocab_size} token embeddings for a tokenizer of {len(tokenizer)}: call"
                " `model.resize_token_embeddings(len(tokenizer))`, then train."
            )
        self.register_modules(model=model, tokenizer=tokenizer, scheduler=scheduler)

    def __setattr__(self, name, value):
        if name == "scheduler":  # also one that is assigned later must know the tokenizer's ids
            value = _matched_scheduler(value, token_settings(self.tokenizer))
        super().__setattr__(name, value)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        gen_length: int | None = None,
        num_inference_steps: int | None = None,
        num_texts_per_prompt: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> TextDiffusionPipelineOutput | tuple:
        r"""
        Generates texts.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                Text to complete. Mask tokens in it are filled in; without a prompt, text is generated from nothing.
            input_ids (`torch.LongTensor` of shape `[batch, seq]` or `[seq]`, *optional*):
                Token ids in place of `prompt`, special tokens included; they come back exactly.
            attention_mask (`torch.Tensor` of the shape of `input_ids`, *optional*):
                1 for tokens, 0 for padding; by default everything but the padding token counts, or everything where
                the padding token is the terminator.
            gen_length (`int`, *optional*):
                Text tokens to generate after the prompt. Without a prompt it defaults to
                `scheduler.config.gen_length`.
            num_inference_steps (`int`, *optional*):
                Steps T of the reverse process; None is continuous time. At most `min(T, masked positions)` forward
                passes are made, unless the schedule depends on the token.
            num_texts_per_prompt (`int`, defaults to 1): texts for each prompt, one after another.
            temperature, top_k, top_p (*optional*):
                Shape the prediction, in place of the scheduler config's values; temperature 0 is greedy.
            generator (`torch.Generator` or list of them, *optional*):
                One for all texts, or one for each, so that a text does not depend on the others in the batch. It may
                live on the CPU whatever the model's device.
            output_type (`str`, defaults to `"text"`): `"text"`, or `"seq"` to leave the ids undecoded.
            return_dict (`bool`, defaults to `True`): return an output class, or the tuple of its fields.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipe, step, timestep, callback_kwargs)` after each forward pass, `timestep` being
                the time of each row, `[batch]`; may return a dictionary with a new `sample`.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*):
                What `callback_kwargs` hold, of `"sample"` (default), `"attention_mask"`, `"positions"` and `"logits"`.

        Returns:
            [`TextDiffusionPipelineOutput`] or `tuple`.

        Raises:
            ValueError: an argument out of range, or a canvas longer than the model takes.
        """
        if isinstance(callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        if callback_on_step_end_tensor_inputs is None:
            callback_on_step_end_tensor_inputs = ["sample"]
        self.check_inputs(
            prompt,
            input_ids,
            attention_mask,
            gen_length,
            num_texts_per_prompt,
            output_type,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
        )
        config = self.scheduler.config
        check_shaping(config.temperature if temperature is None else temperature, top_k, top_p)

        if prompt is None and input_ids is None and gen_length is None:
            gen_length = config.gen_length
        rows = self.encode_prompt(prompt, input_ids, attention_mask)
        rows = [row for row in rows for _ in range(num_texts_per_prompt)]
        check_generator(generator, len(rows))
        device = self._execution_device
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        sample, lengths, generated = self.prepare_canvas(rows, gen_length)

        sample = sample.to(device)
        shaping = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        sample = self.denoise(
            sample, lengths, generated, generator, shaping, callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        self.maybe_free_model_hooks()

        sequences = [row[:length] for row, length in zip(sample, lengths, strict=True)]
        texts = self.decode(sequences, generated) if output_type == "text" else None
        return TextDiffusionPipelineOutput(sequences, texts) if return_dict else (sequences, texts)

    def check_inputs(
        self,
        prompt,
        input_ids,
        attention_mask,
        gen_length,
        num_texts_per_prompt,
        output_type,
        callback,
        callback_tensor_inputs,
    ):
        """Raises a `ValueError` for the first argument of `__call__` that is out of range."""
        if prompt is not None and input_ids is not None:
            raise ValueError("Pass either `prompt` or `input_ids`, not both.")
        if prompt is not None and not isinstance(prompt, str):
            if not isinstance(prompt, list) or not all(isinstance(text, str) for text in prompt):
                raise ValueError(f"`prompt` must be a string or a list of strings, got {prompt!r}.")
            if not prompt:
                raise ValueError(
                    "`prompt` is an empty list; pass at least one text, or None to generate from nothing."
                )
        if input_ids is not None:
            if (
                not isinstance(input_ids, torch.Tensor)
                or input_ids.dtype != torch.long
                or input_ids.ndim not in (1, 2)
            ):
                given = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
                raise ValueError(f"`input_ids` must be a LongTensor of shape [batch, seq] or [seq], got {given}.")
            if input_ids.numel() == 0:
                raise ValueError(f"`input_ids` is empty: its shape is {list(input_ids.shape)}.")
            vocab_size = self.model.config.vocab_size
            if input_ids.min() < 0 or input_ids.max() >= vocab_size:
                raise ValueError(
                    f"`input_ids` must lie in [0, {vocab_size}), got {input_ids.min()} to {input_ids.max()}."
                )
        mask_shape = attention_mask.shape if isinstance(attention_mask, torch.Tensor) else None
        if attention_mask is not None and (input_ids is None or mask_shape != input_ids.shape):
            raise ValueError("`attention_mask` goes with `input_ids` and must be a tensor of its shape.")
        if gen_length is not None:
            check_positive_int("gen_length", gen_length)
        check_positive_int("num_texts_per_prompt", num_texts_per_prompt)
        if output_type not in ("text", "seq"):
            raise ValueError(f"`output_type` must be 'text' or 'seq', got {output_type!r}.")
        if callback is not None and not callable(callback):
            raise ValueError(f"`callback_on_step_end` must be callable, got {callback!r}.")
        known = self._callback_tensor_inputs
        if not isinstance(callback_tensor_inputs, list) or not set(callback_tensor_inputs) <= set(known):
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` must be a list of {known}, got {callback_tensor_inputs!r}."
            )

    def encode_prompt(self, prompt, input_ids, attention_mask) -> list[list[int]]:
        """The prompts' token ids, special tokens included, without padding."""
        if input_ids is None:
            texts = [prompt or ""] if not isinstance(prompt, list) else prompt
            return self.tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]
        input_ids = input_ids.reshape(-1, input_ids.shape[-1])
        if attention_mask is not None:
            keep = attention_mask.reshape(input_ids.shape) != 0
        elif self.tokenizer.pad_token_id in (None, terminator_id(self.tokenizer)):
            keep = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            keep = input_ids != self.tokenizer.pad_token_id
        if not keep.any(dim=1).all():
            raise ValueError("`input_ids` has a row of nothing but padding.")
        return [row[kept].tolist() for row, kept in zip(input_ids, keep, strict=True)]

    def prepare_canvas(
        self, rows: list[list[int]], gen_length: int | None
    ) -> tuple[torch.LongTensor, list[int], torch.BoolTensor]:
        """
        The padded canvas `[batch, seq]`, the length of each row, and which positions lie in its `gen_length` new
        tokens, `[batch, seq]`. New tokens stand before a closing separator, or at the end.
        """
        mask_token_id = self.tokenizer.mask_token_id
        canvases, starts = [], []
        for row in rows:
            closed = bool(row) and row[-1] in (self.tokenizer.sep_token_id, self.tokenizer.eos_token_id)
            starts.append(len(row) - closed)
            canvases.append(row[: starts[-1]] + [mask_token_id] * (gen_length or 0) + row[starts[-1] :])
        lengths = [len(canvas) for canvas in canvases]

        longest, limit = max(lengths), max_sequence_length(self.model)
        if longest > limit:
            raise ValueError(
                f"The canvas would have {longest} tokens, special tokens and `gen_length` {gen_length} included; the"
                f" model takes at most {limit}."
            )
        finished = sum(mask_token_id not in canvas for canvas in canvases)
        if finished:
            logger.warning(
                f"{finished} of {len(canvases)} texts have no {self.tokenizer.mask_token} to fill and are returned as"
                " they are. Pass `gen_length` to continue them."
            )
        # Padding is attended to by nothing and returned to nobody. It must be no mask, and no terminator, which a
        # sentence's mean would count.
        suppressed = self.scheduler.config.suppressed_token_ids
        padding = self.tokenizer.pad_token_id
        if padding not in suppressed:
            padding = suppressed[0] if suppressed else int(mask_token_id == 0)
        sample = torch.full((len(canvases), longest), padding)
        generated = torch.zeros(sample.shape, dtype=torch.bool)
        for i, canvas in enumerate(canvases):
            sample[i, : lengths[i]] = torch.tensor(canvas)
            generated[i, starts[i] : starts[i] + (gen_length or 0)] = True
        return sample, lengths, generated

    def denoise(
        self, sample, lengths, generated, generator, shaping, callback, callback_tensor_inputs
    ) -> torch.LongTensor:
        """Runs the reverse process of `self.scheduler` on `sample` [batch, seq] until nothing is masked."""
        seq_len = sample.shape[1]
        attention_mask = (torch.arange(seq_len) < torch.tensor(lengths)[:, None]).long().to(sample.device)
        padded = min(lengths) < seq_len  # without padding the model is spared the mask
        # A rejected proposal leaves its row as it was: a time-agnostic model then needs its head only. Under
        # torch.compile that hook would mean a new graph a step.
        keeps_states = self.scheduler.noise.token_dependent and not conditions_on_time(self.model)
        cache = HiddenStateCache() if keeps_states and not is_compiled_module(self.model) else None

        positions, timestep = self.scheduler.next_positions(sample, generator)
        if not len(positions):
            return sample
        forward_passes, masked = self.scheduler.num_forward_passes, self._masked_count(sample)
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with self.progress_bar(total=masked if forward_passes is None else forward_passes) as progress_bar:
                step = 0
                while len(positions):
                    logits = self.predict(sample, attention_mask if padded else None, positions, timestep, cache)
                    self._forbid_terminator(logits, ~generated.flatten()[positions])
                    sample = self.scheduler.step(
                        logits, timestep, sample, positions=positions, generator=generator, **shaping
                    ).prev_sample
                    if callback is not None:
                        tensors = {"sample": sample, "attention_mask": attention_mask}
                        tensors |= {"positions": positions, "logits": logits}
                        callback_kwargs = {name: tensors[name] for name in callback_tensor_inputs}
                        returned = callback(self, step, timestep, callback_kwargs) or {}
                        sample = returned.get("sample", sample)
                    step += 1
                    done = step if forward_passes is not None else masked - self._masked_count(sample)
                    progress_bar.update(done - progress_bar.n)
                    positions, timestep = self.scheduler.next_positions(sample, generator)
        finally:
            for module in in_training:
                module.training = True
        return sample

    def _forbid_terminator(self, logits, in_gap):
        """A terminator ends a text, so it may stand where text is written, not where a gap is filled. In place."""
        terminator = terminator_id(self.tokenizer)
        if terminator is not None:
            logits[:, terminator].masked_fill_(in_gap.to(logits.device), -torch.inf)

    def predict(self, sample, attention_mask, positions, timestep, cache) -> torch.Tensor:
        """Logits `[n, vocab]` at flat `positions` of `sample` [batch, seq]; rows without positions are not run."""
        if cache is not None:
            return cache.logits_at(self.model, positions.to(sample.device), sample, attention_mask)
        seq_len = sample.shape[1]
        rows, row_of_position = torch.unique(positions // seq_len, return_inverse=True)
        inputs = {"input_ids": sample[rows.to(sample.device)]}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask[rows.to(sample.device)]
        if conditions_on_time(self.model):
            inputs["timesteps"] = timestep[rows].float().to(sample.device)
        positions = row_of_position * seq_len + positions % seq_len
        return logits_at(self.model, positions.to(sample.device), **inputs)

    def decode(self, sequences: list[torch.LongTensor], generated: torch.BoolTensor) -> list[str]:
        """
        Texts of the canvases without special tokens, cut at the first terminator among the `generated` positions.
        """
        terminator = terminator_id(self.tokenizer)
        left_out = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}  # a given unknown word stays
        texts = []
        for sequence, is_generated in zip(sequences, generated, strict=True):
            sequence = sequence.tolist()
            ends = [i for i, token in enumerate(sequence) if token == terminator and is_generated[i]]
            texts.append([i for i in sequence[: ends[0] if ends else None] if i not in left_out])
        return self.tokenizer.batch_decode(texts)

    def _masked_count(self, sample) -> int:
        return int((sample == self.tokenizer.mask_token_id).sum())

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        **push_kwargs,
    ):
        r"""
        Saves the pipeline as [`~diffusers.DiffusionPipeline.save_pretrained`] does, but into a temporary folder first,
        so that a save that fails leaves the old files.

        Args:
            save_directory (`str` or `os.PathLike`): folder, made when missing; other files in it stay.
            safe_serialization, variant, max_shard_size: as in the base class.
            push_to_hub (`bool`, defaults to `False`):
                Whether to call [`push_to_hub`] as well, with `push_kwargs`; `repo_id` defaults to the folder's name.

        Raises:
            ValueError: the model has a PEFT adapter that is not merged, which could not be loaded again; or unknown
                arguments.
        """
        if push_kwargs and not push_to_hub:
            raise ValueError(f"`save_pretrained` does not know {sorted(push_kwargs)} without `push_to_hub=True`.")
        if has_adapter(self.model):
            raise ValueError(
                "`model` has an adapter that is not merged, which a pipeline cannot save: merge it first with"
                " `pipe.model = pipe.model.merge_and_unload()`."
            )
        save_directory = Path(save_directory)
        save_directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=save_directory, prefix=".saving-") as folder:
            super().save_pretrained(folder, safe_serialization, variant, max_shard_size)
            for new in [path for path in Path(folder).rglob("*") if path.is_file()]:
                target = save_directory / new.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                new.replace(target)
        if push_to_hub:
            repo_id = push_kwargs.pop("repo_id", save_directory.resolve().name)
            self.push_to_hub(repo_id, variant=variant, max_shard_size=max_shard_size, **push_kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        license: str | None = None,
        datasets: str | list[str] | None = None,
    ):
        r"""
        Uploads the pipeline with a model card. A card that the repository already has is kept.

        Args:
            repo_id (`str`): `"user/name"`.
            commit_message, private, token, create_pr: as in [`~diffusers.DiffusionPipeline.push_to_hub`].
            variant (`str`, *optional*), max_shard_size (`int` or `str`, *optional*): as in [`save_pretrained`].
            license (`str`, *optional*): the card's licence, an identifier of the Hub such as `"apache-2.0"`.
            datasets (`str` or `list[str]`, *optional*): ids of the training data for the card.

        Returns:
            [`~huggingface_hub.CommitInfo`]: the commit.
        """
        repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, variant=variant, max_shard_size=max_shard_size)
            if not file_exists(repo_id, "README.md", token=token):
                create_model_card(self, repo_id, license, datasets).save(Path(folder, "README.md"))
            return upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                token=token,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                create_pr=create_pr,
            )


def _matched_scheduler(scheduler, settings: dict):
    """`scheduler`, or a copy that has what its config left open; raises when it belongs to another tokenizer."""
    config = scheduler.config
    if "mask_token_id" not in config:
        raise ValueError(
            f"`scheduler` is a {type(scheduler).__name__}, which unmasks no text: pass AbsorbingStateScheduler."
        )
    for name in ("mask_token_id", "vocab_size"):
        if config[name] is not None and config[name] != settings[name]:
            raise ValueError(
                f"`scheduler` has `{name}` {config[name]}, the tokenizer's is {settings[name]}: build it with"
                " `token_settings(tokenizer)`."
            )
    missing = set(settings["suppressed_token_ids"]) - set(config.suppressed_token_ids or [])
    if config.suppressed_token_ids is not None and missing:
        raise ValueError(
            f"`scheduler` would sample special tokens, {sorted(missing)}: build it with `token_settings(tokenizer)`."
        )
    still_open = {name: value for name, value in settings.items() if config[name] is None}
    return type(scheduler).from_config(config, **still_open) if still_open else scheduler


__all__ = ["TextDiffusionPipeline"]
