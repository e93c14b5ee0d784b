"""Text generation by masked diffusion: prompts in, texts out."""

import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.utils import logging
from huggingface_hub import create_repo, file_exists, upload_folder
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..data.special_tokens import frame_ids, terminator_id, token_settings
from ..files import move_files
from ..layouts import FLAT_MARK, check_not_flat, replaced_by_parts
from ..models.sparse_head import (
    HiddenStateCache,
    conditions_on_time,
    has_adapter,
    is_compiled,
    max_sequence_length,
    unwrap_model,
)
from ..schedulers.sampling import check_generator, check_positive_int, check_shaping, described, is_number
from .canvas import Canvas
from .constraints import TokenConstraints, check_constraints
from .model_card import create_model_card
from .pipeline_output import TextDiffusionPipelineOutput
from .prediction import Predictor
from .prompts import Prompt, check_prompts, encode_ids, encode_texts

logger = logging.get_logger(__name__)

# These see the left side only; some classes serve for both.
CAUSAL_MODELS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} - {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
# More tokens than that, drawn without seeing each other, and they go together less and less.
MANY_TOKENS_PER_PASS = 8


class TextDiffusionPipeline(DiffusionPipeline):
    r"""
    Generates, continues and infills text with a masked language model as the denoiser.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            [`DiffusionBertForMaskedDiffusion`], or any `AutoModelForMaskedLM` model, which decodes time-agnostically.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): its tokenizer, with a mask token.
        scheduler ([`AbsorbingStateScheduler`], [`ConfidenceUnmaskingScheduler`] or [`ReMDMScheduler`]):
            Decides what is revealed when; each call plans on a copy of its own. Where its config leaves
            `mask_token_id`, `vocab_size` or `suppressed_token_ids` open, the pipeline holds one with the tokenizer's.

    Raises:
        ValueError: a tokenizer without mask token, a model without vocabulary head, or components that do not belong
            together.

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
        name = type(unwrap_model(model)).__name__
        if model.config.is_encoder_decoder or name in CAUSAL_MODELS:
            raise ValueError(f"`model` is a {name}; a denoiser must be an encoder, which sees both sides of a gap.")
        if unwrap_model(model).get_output_embeddings() is None:
            raise ValueError(f"`model` is a {type(model).__name__} without a vocabulary head: load it as a masked LM.")
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
        token_type_ids: torch.LongTensor | None = None,
        source: str | list[str] | None = None,
        gen_length: int | None = None,
        num_inference_steps: int | None = None,
        block_length: int | None = None,
        num_texts_per_prompt: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_scale: float = 1.0,
        suppress_tokens: list[int] | None = None,
        bad_words_ids: list[list[int]] | None = None,
        allowed_token_ids: torch.BoolTensor | Callable | None = None,
        logits_processor: LogitsProcessorList | None = None,
        eos_penalty: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        return_trajectory: bool = False,
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
            token_type_ids (`torch.LongTensor` of the shape of `input_ids`, *optional*): segments, where the model
                knows them; new tokens are in that of what they stand before.
            source (`str` or `list[str]`, *optional*):
                What the text shall be generated from, by a model that was trained on pairs: `[CLS] source [SEP] prompt
                [SEP]` with the tokenizer's token types. The texts that come back are without it.
            gen_length (`int`, *optional*):
                Text tokens to generate after the prompt. Without a prompt it defaults to
                `scheduler.config.gen_length`.
            num_inference_steps (`int`, *optional*):
                Steps T of the reverse process, in each block; None leaves their number to the strategy, in continuous
                time for [`AbsorbingStateScheduler`]. [`ReMDMScheduler`] needs a number.
            block_length (`int`, *optional*):
                Write semi-autoregressively, this many masked positions at a time from left to right. A text ends with
                the block in which it gets its terminator. It may then be longer than the model takes: each block is
                written in a window over the text, behind as much context as fits (MDLM, arXiv 2406.07524).
            num_texts_per_prompt (`int`, defaults to 1): texts for each prompt, one after another.
            temperature, top_k, top_p (*optional*):
                Shape the prediction, in place of the scheduler config's values; temperature 0 is greedy.
            guidance_scale (`float`, defaults to 1.0):
                Classifier-free guidance: logits `l0 + guidance_scale (l - l0)`, `l0` those with the prompt's tokens
                masked. Other values than 1 take twice the time.
            suppress_tokens (`list[int]`, *optional*): ids that are not written.
            bad_words_ids (`list[list[int]]`, *optional*): sequences of ids that are not written.
            allowed_token_ids (`torch.BoolTensor` of shape `[seq, vocab]` or `Callable`, *optional*):
                Which ids may stand at each position of the canvas; or a function of the canvas `[batch, seq]`, shorter
                rows padded, and the asked positions `[n]`, flat indices over it, that returns `[n, vocab]`.
            logits_processor ([`~transformers.LogitsProcessorList`], *optional*):
                Processors as for `generate`: each gets the ids to the left of a position, gaps among them as mask
                tokens, and the logits there, `[1, vocab]`. What other constraints rule out, none of them brings back.
            eos_penalty (`float`, defaults to 0.0):
                Nats taken from the terminator's logit, for longer texts; infinity bans it.
            generator (`torch.Generator` or list of them, *optional*):
                One for all texts, or one for each, so that a text does not depend on the others in the batch, but for
                rounding. It may live on the CPU whatever the model's device.
            output_type (`str`, defaults to `"text"`): `"text"`, or `"seq"` to leave the ids undecoded.
            return_dict (`bool`, defaults to `True`): return an output class, or the tuple of its fields.
            return_trajectory (`bool`, defaults to `False`): record what was written where and when.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipe, step, timestep, callback_kwargs)` after each forward pass, `timestep` being
                the time of each row, `[batch]`; may return a dictionary with a new `sample`. The plan is the call's
                own: `pipe.scheduler` knows nothing of it.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*):
                What `callback_kwargs` hold, of `"sample"` (default), `"attention_mask"`, `"positions"` and `"logits"`.
                They are of the window that the model sees; all but the logits lie on the CPU.

        Returns:
            [`TextDiffusionPipelineOutput`] or `tuple`.

        Raises:
            ValueError: an argument out of range, or a canvas longer than the model takes.
        """
        arguments = dict(locals())
        for name in ("self", "return_dict"):
            arguments.pop(name)
        canvas, steps = self.prepare(**arguments)
        for _ in steps:
            pass
        output = self.finish(canvas, output_type)
        return output if return_dict else output.to_tuple()

    def stream(self, *args, **kwargs) -> Iterator[TextDiffusionPipelineOutput]:
        """
        Generates as `__call__` does, with its arguments but `return_dict`, and yields after each forward pass the
        output so far, mask tokens in its texts where nothing is written yet. The last output is that of a call.
        """
        bound = inspect.signature(self.__call__).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "return_dict"}
        canvas, steps = self.prepare(**arguments)
        if not canvas.masked.any():  # nothing to wait for
            return iter([self.finish(canvas, arguments["output_type"])])
        return (self.finish(canvas, arguments["output_type"]) for _ in steps)

    def prepare(
        self,
        prompt,
        input_ids,
        attention_mask,
        token_type_ids,
        source,
        gen_length,
        num_inference_steps,
        block_length,
        num_texts_per_prompt,
        temperature,
        top_k,
        top_p,
        guidance_scale,
        suppress_tokens,
        bad_words_ids,
        allowed_token_ids,
        logits_processor,
        eos_penalty,
        generator,
        output_type,
        return_trajectory,
        callback_on_step_end,
        callback_on_step_end_tensor_inputs,
    ) -> tuple[Canvas, Iterator[None]]:
        """Checks the arguments of `__call__`; the canvas, and the forward passes that fill it, one at a time."""
        if isinstance(callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        if callback_on_step_end_tensor_inputs is None:
            callback_on_step_end_tensor_inputs = ["sample"]
        check_prompts(prompt, source, input_ids, attention_mask, token_type_ids, self.model.config.vocab_size)
        self.check_inputs(gen_length, num_texts_per_prompt, output_type)
        self.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        # Of its own: calls that run at the same time, as streams do, have a plan each.
        scheduler = copy.copy(_matched_scheduler(self.scheduler, token_settings(self.tokenizer)))
        config = scheduler.config
        check_shaping(config.temperature if temperature is None else temperature, top_k, top_p)
        vocab_size = len(self.tokenizer)
        check_constraints(eos_penalty, suppress_tokens, bad_words_ids, allowed_token_ids, logits_processor, vocab_size)
        if block_length is not None:
            check_positive_int("block_length", block_length)
        scheduler.set_timesteps(num_inference_steps)

        if prompt is None and input_ids is None and gen_length is None:
            gen_length = config.gen_length
        if input_ids is None:
            rows = encode_texts(self.tokenizer, prompt, source)
        else:
            rows = encode_ids(self.tokenizer, input_ids, attention_mask, token_type_ids)
        rows = [row for row in rows for _ in range(num_texts_per_prompt)]
        check_generator(generator, len(rows))
        canvas = self.prepare_canvas(rows, gen_length, block_length is not None)
        self.check_fit(canvas, gen_length, block_length, allowed_token_ids)
        self.check_guidance(canvas, guidance_scale)
        if return_trajectory:
            canvas.changes = []

        constraints = TokenConstraints(
            canvas.terminator,
            canvas.generated,
            eos_penalty,
            suppress_tokens or [],
            bad_words_ids or [],
            allowed_token_ids.cpu() if isinstance(allowed_token_ids, torch.Tensor) else allowed_token_ids,
            logits_processor,
            [*config.suppressed_token_ids, config.mask_token_id],
            vocab_size,
        )
        constraints.check(canvas.masked[:, :-1])
        sampling = {"generator": generator, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        callback = (callback_on_step_end, callback_on_step_end_tensor_inputs)
        return canvas, self.denoise(
            canvas, scheduler, num_inference_steps, block_length, constraints, guidance_scale, sampling, callback
        )

    def check_inputs(self, gen_length, num_texts_per_prompt, output_type):
        """Raises a `ValueError` for the first of these arguments of `__call__` that is out of range."""
        if gen_length is not None:
            check_positive_int("gen_length", gen_length)
        check_positive_int("num_texts_per_prompt", num_texts_per_prompt)
        if output_type not in ("text", "seq"):
            raise ValueError(f"`output_type` must be 'text' or 'seq', got {output_type!r}.")

    def check_callback(self, callback, callback_tensor_inputs):
        """Raises a `ValueError` for a callback that cannot be called, or tensors for it that do not exist."""
        if callback is not None and not callable(callback):
            raise ValueError(f"`callback_on_step_end` must be callable, got {callback!r}.")
        known = self._callback_tensor_inputs
        if not isinstance(callback_tensor_inputs, list) or not set(callback_tensor_inputs) <= set(known):
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` must be a list of {known}, got {callback_tensor_inputs!r}."
            )

    def check_fit(self, canvas, gen_length, block_length, allowed_token_ids):
        """Raises a `ValueError` for a canvas that the model does not take or `allowed_token_ids` do not cover."""
        longest, limit = max(canvas.lengths), max_sequence_length(self.model)
        if longest > limit and block_length is None:
            raise ValueError(
                f"The canvas would have {longest} tokens, special tokens and `gen_length` {gen_length} included; the"
                f" model takes at most {limit}. Pass `block_length` to write longer text block by block."
            )
        if longest > limit and (widest := canvas.widest_window(canvas.blocks(block_length))) > limit:
            raise ValueError(
                f"`block_length` {block_length} needs a window of {widest} tokens; the model takes at most {limit}."
            )
        if isinstance(allowed_token_ids, torch.Tensor) and len(allowed_token_ids) != longest:
            raise ValueError(
                f"`allowed_token_ids` must have one row for each of the canvas's {longest} positions, got"
                f" {len(allowed_token_ids)}."
            )

    def check_guidance(self, canvas, guidance_scale):
        """Raises a `ValueError` for a scale that is no number >= 0, or that has no prompt to work on."""
        if not is_number(guidance_scale) or not 0 <= guidance_scale < inf:
            raise ValueError(f"`guidance_scale` must be a finite number >= 0, got {guidance_scale!r}.")
        if guidance_scale != 1 and not canvas.given.any():
            raise ValueError(f"`guidance_scale` {guidance_scale} needs a prompt to guide by.")

    def prepare_canvas(self, rows: list[Prompt], gen_length: int | None, in_blocks: bool) -> Canvas:
        """The prompts' ids with `gen_length` masks each, before a closing separator, or at the end."""
        tokenizer = self.tokenizer
        closing = (tokenizer.sep_token_id, tokenizer.eos_token_id)
        ends = [len(row.ids) - (bool(row.ids) and row.ids[-1] in closing) for row in rows]
        mask = tokenizer.mask_token_id
        masks = [mask] * (gen_length or 0)
        texts = [row.ids[:end] + masks + row.ids[end:] for row, end in zip(rows, ends, strict=True)]
        types = [
            row.token_type_ids and row.token_type_ids[:end] + row.token_type_ids[-1:] * (len(text) - end)
            for row, end, text in zip(rows, ends, texts, strict=True)
        ]
        finished = sum(mask not in text for text in texts)
        if finished:
            logger.warning(
                f"{finished} of {len(texts)} texts have no {tokenizer.mask_token} to fill and are returned as they"
                " are. Pass `gen_length` to continue them."
            )
        generated = [range(end, end + len(masks)) for end in ends]
        suppressed = self.scheduler.config.suppressed_token_ids
        starts = [row.start for row in rows]
        return Canvas.of_texts(texts, generated, types, starts, tokenizer, suppressed, in_blocks)

    @torch.no_grad()
    def denoise(
        self, canvas, scheduler, num_inference_steps, block_length, constraints, guidance_scale, sampling, callback
    ) -> Iterator[None]:
        """Fills `canvas` by the reverse process of `scheduler`, block by block; yields after each forward pass."""
        masked = canvas.masked
        if not masked.any():
            return
        limit = max_sequence_length(self.model)
        revealed = passes = 0  # of all rows, rows that rest not counted
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with self.progress_bar(total=int(masked.sum())) as progress_bar:
                for active in canvas.blocks(block_length):
                    if block_length is not None:
                        active = active & ~canvas.ended()[:, None]
                    scheduler.set_timesteps(num_inference_steps)
                    index = canvas.window(active, limit)
                    steps = self.denoise_window(
                        canvas, scheduler, index, active, constraints, guidance_scale, sampling, callback
                    )
                    for newly_revealed, rows in steps:
                        revealed, passes = revealed + newly_revealed, passes + rows
                        progress_bar.update(int((masked & ~canvas.masked).sum()) - progress_bar.n)
                        yield
                progress_bar.update(progress_bar.total - progress_bar.n)  # in blocks, nothing follows a terminator
        finally:
            for module in in_training:
                module.training = True
            self.maybe_free_model_hooks()
        if revealed > MANY_TOKENS_PER_PASS * passes:
            logger.warning(
                f"{revealed / passes:.1f} tokens were revealed in a forward pass, independently of each other: above"
                f" {MANY_TOKENS_PER_PASS}, they go together badly. More steps take more time and improve the text."
            )

    def denoise_window(
        self, canvas, scheduler, index, active, constraints, guidance_scale, sampling, callback
    ) -> Iterator[tuple[int, int]]:
        """Fills `active` positions in the columns `index` [batch, width]; yields counts of new tokens and of rows."""
        callback, tensor_names = callback
        sample, active, given = (x.gather(1, index) for x in (canvas.sample, active, canvas.given))
        token_type_ids = None if canvas.token_type_ids is None else canvas.token_type_ids.gather(1, index)
        attention_mask = (index < torch.tensor(canvas.lengths)[:, None]).long()
        seq_len, device = sample.shape[1], self._execution_device
        # A rejected proposal leaves its row as it was: a time-agnostic model then needs its head only. Under
        # torch.compile that hook would mean a new graph a step.
        keeps_states = scheduler.noise.token_dependent and not conditions_on_time(self.model)
        cache = HiddenStateCache() if keeps_states and not is_compiled(self.model) else None
        predict = Predictor(
            self.model, device, attention_mask, token_type_ids, given, canvas.mask_token_id, guidance_scale, cache
        )

        positions, timestep = scheduler.next_positions(sample, sampling["generator"], active)
        while len(positions):
            rows = positions // seq_len
            on_canvas = rows * canvas.sample.shape[1] + index.flatten()[positions]
            pieces = predict(sample, positions, timestep)
            logits = (constraints.apply(piece, canvas.sample, on_canvas[part]) for part, piece in pieces)
            if "logits" in tensor_names:
                logits = torch.cat(list(logits))
            before = sample
            sample = scheduler.step(logits, timestep, sample, positions=positions, **sampling).prev_sample
            if constraints.bad_words_ids:
                written = canvas.sample.scatter(1, index, sample)
                sample = constraints.apart(canvas.sample, written, canvas.mask_token_id).gather(1, index)
            if callback is not None:
                tensors = {"sample": sample, "attention_mask": attention_mask, "positions": positions}
                tensors["logits"] = logits
                callback_kwargs = {name: tensors[name] for name in tensor_names}
                sample = _returned_sample(callback(self, canvas.step, timestep, callback_kwargs), sample)
            canvas.update(index, sample, timestep)
            newly_revealed = (before == canvas.mask_token_id) & (sample != canvas.mask_token_id)
            yield int(newly_revealed.sum()), len(rows.unique())
            positions, timestep = scheduler.next_positions(sample, sampling["generator"], active)

    def finish(self, canvas: Canvas, output_type: str) -> TextDiffusionPipelineOutput:
        """What is on the canvas, finished or not."""
        sequences = canvas.sequences(self._execution_device)
        texts = self.decode(sequences, canvas) if output_type == "text" else None
        return TextDiffusionPipelineOutput(sequences, texts, canvas.trajectories())

    def decode(self, sequences: list[torch.LongTensor], canvas: Canvas) -> list[str]:
        """
        Texts of the canvas without special tokens and sources, cut at the first terminator among the new tokens.
        """
        terminator = terminator_id(self.tokenizer)
        # A given unknown word stays, and so does a mask, of a text that is not finished.
        left_out = frame_ids(self.tokenizer) - {self.tokenizer.mask_token_id}
        texts = []
        for sequence, is_generated, start in zip(sequences, canvas.generated, canvas.starts, strict=True):
            sequence = sequence.tolist()
            ends = [i for i, token in enumerate(sequence) if token == terminator and is_generated[i]]
            texts.append([i for i in sequence[start : ends[0] if ends else None] if i not in left_out])
        return self.tokenizer.batch_decode(texts)

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
            ValueError: the model has a PEFT adapter that is not merged, which could not be loaded again; the folder
                has a pipeline as [`TextDiffusionTrainer`] saves it; or unknown arguments.
        """
        if push_kwargs and not push_to_hub:
            raise ValueError(f"`save_pretrained` does not know {sorted(push_kwargs)} without `push_to_hub=True`.")
        if has_adapter(self.model):
            raise ValueError(
                "`model` has an adapter that is not merged, which a pipeline cannot save: merge it first with"
                " `pipe.model = pipe.model.merge_and_unload()`."
            )
        save_directory = Path(save_directory)
        check_not_flat("save_directory", str(save_directory), (save_directory / FLAT_MARK).exists())
        save_directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=save_directory, prefix=".saving-") as folder:
            super().save_pretrained(folder, safe_serialization, variant, max_shard_size)
            move_files(Path(folder), save_directory, replaced_by_parts(variant))
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

        Raises:
            ValueError: the repository has a pipeline as [`TextDiffusionTrainer`] pushes it.
        """
        repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        check_not_flat("repo_id", repo_id, file_exists(repo_id, FLAT_MARK, token=token))
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
                delete_patterns=replaced_by_parts(variant),  # but for what is uploaded
            )


def _returned_sample(returned: dict | None, sample: torch.LongTensor) -> torch.LongTensor:
    """What a callback made of `sample` [batch, width]; raises unless it is one of its kind."""
    if returned is None:
        return sample
    if not isinstance(returned, dict):
        raise ValueError(f"`callback_on_step_end` must return a dict or None, got {type(returned).__name__}.")
    new = returned.get("sample", sample)
    if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (sample.shape, sample.dtype):
        given = described(new) if isinstance(new, torch.Tensor) else type(new).__name__
        raise ValueError(f"`callback_on_step_end` must return a `sample` as {described(sample)}, got {given}.")
    return new


def _matched_scheduler(scheduler, settings: dict):
    """`scheduler`, or a copy that has what its config left open; raises when it belongs to another tokenizer."""
    if not isinstance(scheduler, SchedulerMixin) or "suppressed_token_ids" not in scheduler.config:
        raise ValueError(
            f"`scheduler` is a {type(scheduler).__name__}, which unmasks no text: pass one of this library, such as"
            " AbsorbingStateScheduler."
        )
    config = scheduler.config
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
