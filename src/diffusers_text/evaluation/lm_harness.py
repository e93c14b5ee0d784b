r"""
A model of EleutherAI's lm-evaluation-harness by the name "diffusers_text". Importing this module registers it, and its
command line is the harness's:

    python -m diffusers_text.evaluation.lm_harness run --model diffusers_text \
        --model_args pretrained=outputs/run,num_draws=16 --tasks lambada_openai
"""

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.special_tokens import start_id, terminator_id
from ..models.sparse_head import max_sequence_length
from ..pipelines.pipeline_text_diffusion import TextDiffusionPipeline
from ..schedulers.scheduling_confidence_unmasking import ConfidenceUnmaskingScheduler
from .scoring import encode_pairs, score_rows

logger = logging.get_logger(__name__)

# What tasks call the length of a text.
LENGTH_NAMES = ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]


@register_model("diffusers_text")
class TextDiffusionLM(LM):
    r"""
    A saved [`TextDiffusionPipeline`] for the harness.

    Log-likelihoods are negative bounds ([`likelihood_bound`]), or pseudo-log-likelihoods with `method="pseudo"`. A
    continuation is greedy if it is what the pipeline writes in its place, the most certain token first. Where a
    context and what follows are too long, the context loses its beginning.

    Args:
        pretrained (`str`): folder or Hub id of a pipeline.
        method (`str`, defaults to `"bound"`), num_draws (`int`, defaults to 16): as in [`score`].
        batch_size (`int`, defaults to 32): rows of a forward pass.
        max_length (`int`, *optional*): tokens of a row that is scored, by default as in [`likelihood_bound`].
        max_gen_toks (`int`, defaults to 64): tokens of a generated text where the task does not say.
        seed (`int`, defaults to 0): of texts that are sampled, one after another.
        device (`str`, *optional*): where the model runs; the CPU in place of a GPU that is not there.
        max_batch_size: the harness passes it; not used.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "bound",
        num_draws: int = 16,
        batch_size: int | str = 32,
        max_length: int | None = None,
        max_gen_toks: int = 64,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        if device is None and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator().type
        elif device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "cpu"  # the harness's command line asks for "cuda:0" by itself
        self.pipe = TextDiffusionPipeline.from_pretrained(pretrained).to(device)
        config = self.pipe.scheduler.config
        certain_first = ConfidenceUnmaskingScheduler.from_config(config, temperature=0.0)
        self.greedy_pipe = TextDiffusionPipeline(self.pipe.model, self.pipe.tokenizer, certain_first)
        for pipe in (self.pipe, self.greedy_pipe):
            pipe.set_progress_bar_config(disable=True)
        self.method, self.num_draws, self.max_gen_toks = method, num_draws, max_gen_toks
        self.batch_size = 32 if str(batch_size).startswith("auto") else int(batch_size)
        self.generator = torch.Generator().manual_seed(seed)
        self.longest = max_sequence_length(self.pipe.model)
        self.limit = min(self.longest, config.gen_length + 2) if max_length is None else max_length
        if not 3 <= self.limit <= self.longest:
            raise ValueError(f"`max_length` must lie in [3, {self.longest}], got {max_length}.")

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is greedy."""
        contexts, continuations = ([request.args[i] for request in requests] for i in (0, 1))
        rows = encode_pairs(self.pipe.tokenizer, continuations, contexts, with_terminator=False)
        rows = [self._without_beginning(row, self.limit) for row in rows]
        scores = score_rows(self.pipe, rows, self.method, self.num_draws, self.batch_size)
        return [(value, self._is_greedy(row)) for value, row in zip(scores.log_likelihoods, tqdm(rows, "Greedy"))]

    def loglikelihood_rolling(self, requests) -> list[float]:
        """The log-likelihood of each text, in rows of `max_length` that do not know of each other."""
        texts = [request.args[0] for request in requests]
        rows, owners = [], []
        for owner, row in enumerate(encode_pairs(self.pipe.tokenizer, texts, [""] * len(texts), False)):
            given, ids = row["prompt_length"], row["input_ids"]
            for first in range(given, len(ids), self.limit - given):
                part = ids[first : first + self.limit - given]
                rows.append({"input_ids": [*ids[:given], *part], "prompt_length": given})
                owners.append(owner)
        totals = [0.0] * len(texts)
        scores = score_rows(self.pipe, rows, self.method, self.num_draws, self.batch_size)
        for owner, value in zip(owners, scores.log_likelihoods):
            totals[owner] += value
        return totals

    def generate_until(self, requests) -> list[str]:
        """Continues each context up to the first of the stop strings, at temperature 0 where nothing else is asked."""
        return [self._continue(*request.args) for request in tqdm(requests, "Generating")]

    def _continue(self, context: str, settings: dict) -> str:
        settings = {name: value for name, value in settings.items() if value is not None}
        stops = settings.get("until", [])
        lengths = [settings[name] for name in LENGTH_NAMES if name in settings]
        gen_length = lengths[0] if lengths else self.max_gen_toks
        temperature = settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0)
        if settings.get("do_sample") is False:
            temperature = 0.0
        pipe, sampling = self.greedy_pipe, {}
        if temperature > 0:
            pipe = self.pipe
            sampling = {name: settings[name] for name in ("temperature", "top_k", "top_p") if name in settings}
        (row,) = encode_pairs(pipe.tokenizer, [context], [""], with_terminator=False)
        row = self._without_beginning(row | {"prompt_length": len(row["input_ids"])}, self.longest - gen_length)
        output = pipe(
            input_ids=torch.tensor([row["input_ids"]]),
            gen_length=gen_length,
            generator=self.generator,
            output_type="seq",
            **sampling,
        )
        new = output.sequences[0][len(row["input_ids"]) :].tolist()
        terminator = terminator_id(pipe.tokenizer)
        new = new[: new.index(terminator)] if terminator in new else new
        text = pipe.tokenizer.decode(new, skip_special_tokens=True)
        found = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        return text[: min([place for place in found if place >= 0], default=len(text))]

    def _is_greedy(self, row: dict) -> bool:
        ids, given = torch.tensor([row["input_ids"]]), row["prompt_length"]
        masked = ids.clone()
        masked[:, given:] = self.pipe.tokenizer.mask_token_id
        output = self.greedy_pipe(input_ids=masked, generator=self.generator, output_type="seq")
        return torch.equal(output.sequences[0], ids[0])

    def _without_beginning(self, row: dict, limit: int) -> dict:
        """The row with a context so short that it has at most `limit` tokens."""
        ids, given = row["input_ids"], row["prompt_length"]
        start = int(start_id(self.pipe.tokenizer) is not None)
        surplus = min(max(0, len(ids) - limit), given - start)
        if surplus:
            logger.warning_once(f"A context was cut: with what follows it is over {limit} tokens.")
        return {"input_ids": [*ids[:start], *ids[start + surplus :]], "prompt_length": given - surplus}


if __name__ == "__main__":
    cli_evaluate()
