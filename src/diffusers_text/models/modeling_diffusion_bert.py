"""BERT as the denoiser of a masked diffusion model."""

import torch
from diffusers.models.embeddings import TimestepEmbedding, get_timestep_embedding
from torch import nn
from transformers import BertForMaskedLM
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertLayer
from transformers.utils import can_return_tuple, logging

from .configuration_diffusion_bert import DiffusionBertConfig

logger = logging.get_logger(__name__)

# Diffusion time lies in (0, 1]; sinusoids were designed for integer steps up to about a thousand.
TIME_SCALE = 1000


class ZeroInitializedLinear(nn.Linear):
    """
    A linear layer that `_init_weights` sets to zero. It has a class of its own because transformers does not call
    `_init_weights` of custom code for a module without parameters of its own, such as the MLP around it.
    """


class LayerTimeEmbedding(TimestepEmbedding):
    """Two-layer MLP from a sinusoid of the time to a layer's addition: zero at step 0, so BERT starts as it was."""

    def __init__(self, size: int):
        super().__init__(size, size)
        self.linear_2 = ZeroInitializedLinear(size, size)


class DiffusionBertLayer(BertLayer):
    """
    A BERT layer that may add its own embedding of the time, `time_embeddings[layer_idx]` [batch, hidden], to its
    input, and as the last one computes its output at `positions_to_predict` [n] only: `[1, n, hidden]`.
    """

    def __init__(self, config: DiffusionBertConfig, layer_idx: int):
        super().__init__(config, layer_idx=layer_idx)
        self.layer_idx = layer_idx
        self.is_last = layer_idx == config.num_hidden_layers - 1

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args,
        time_embeddings: list[torch.Tensor] | None = None,
        positions_to_predict: torch.LongTensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if time_embeddings is not None:
            hidden_states = hidden_states + time_embeddings[self.layer_idx][:, None]
        if positions_to_predict is None or not self.is_last:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        # Every position attends and is attended to; what follows concerns each position alone.
        context, _ = self.attention.self(hidden_states, attention_mask, **kwargs)
        context, hidden_states = (x.flatten(0, 1)[positions_to_predict][None] for x in (context, hidden_states))
        return self.feed_forward_chunk(self.attention.output(context, hidden_states))


class DiffusionBertForMaskedDiffusion(BertForMaskedLM):
    r"""
    BERT with a masked-LM head that predicts the clean token at every masked position, optionally told the diffusion
    time (DiffusionBERT, arXiv 2211.15029; `config.time_conditioning`). Without time conditioning it is the
    architecture of [`~transformers.BertForMaskedLM`], whose checkpoints load as they are.

    Example:

    ```python
    >>> import torch
    >>> from diffusers_text import DiffusionBertConfig, DiffusionBertForMaskedDiffusion

    >>> config = DiffusionBertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = DiffusionBertForMaskedDiffusion(config).eval()
    >>> input_ids = torch.randint(100, (2, 8))
    >>> model(input_ids).logits.shape
    torch.Size([2, 8, 100])
    >>> model(input_ids, positions_to_predict=torch.tensor([3, 9])).logits.shape
    torch.Size([2, 100])
    ```
    """

    config_class = DiffusionBertConfig
    _no_split_modules = ["BertEmbeddings", "DiffusionBertLayer"]
    # Parts of other BERT checkpoints that a denoiser has no use for.
    _keys_to_ignore_on_load_unexpected = [r"pooler\.", r"cls\.seq_relationship\."]

    def __init__(self, config: DiffusionBertConfig):
        if not isinstance(config, DiffusionBertConfig):  # a BertConfig is a time-agnostic denoiser's
            settings = {**config.to_dict(), "model_type": DiffusionBertConfig.model_type}
            config = DiffusionBertConfig.from_dict(settings, attn_implementation=config._attn_implementation)
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.bert.encoder.layer = nn.ModuleList(DiffusionBertLayer(config, layer_idx=i) for i in layers)
        if config.time_conditioning == "layerwise":
            # Not inside the layers: `self.bert` initialises what it holds, and knows nothing of zeros.
            self.time_mlp = nn.ModuleList(LayerTimeEmbedding(config.hidden_size) for _ in layers)
        elif config.time_conditioning == "prefix":
            self.time_mlp = TimestepEmbedding(config.hidden_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ZeroInitializedLinear):
            init.zeros_(module.weight)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        r"""
        Loads any BERT checkpoint; arguments as in [`~transformers.PreTrainedModel.from_pretrained`].

        Warns when the checkpoint has no masked-LM head, as those of sentence encoders.
        """
        # transformers takes a head that is absent as a whole for a damaged one, because its biases are tied.
        loading_logger = logging.get_logger("transformers.modeling_utils")

        def is_no_false_alarm(record):
            return "checkpoint seem corrupted" not in record.getMessage()

        loading_logger.addFilter(is_no_false_alarm)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        finally:
            loading_logger.removeFilter(is_no_false_alarm)
        missing = info["missing_keys"]
        if any(key.startswith("cls.") for key in missing) and not any(key.startswith("bert.") for key in missing):
            logger.warning(
                f"{pretrained_model_name_or_path} has no masked-LM head: `cls.*` is newly initialised and predicts at"
                " random. Train the model before you sample from it."
            )
        return (model, info) if output_loading_info else model

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence that `forward` takes, special tokens included, in tokens."""
        return self.config.max_position_embeddings - (self.config.time_conditioning == "prefix")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        timesteps: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        positions_to_predict: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | MaskedLMOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `[batch, seq]`):
                The canvas, masked positions holding the mask token.
            attention_mask, token_type_ids, position_ids, inputs_embeds:
                As in [`~transformers.BertForMaskedLM`].
            timesteps (`torch.FloatTensor` of shape `[batch]`, *optional*):
                Diffusion time of each row in (0, 1]; required when `config.time_conditioning` is not `"none"`.
            labels (`torch.LongTensor` of shape `[batch, seq]`, *optional*):
                Clean tokens, -100 where there is nothing to predict. The head then runs at the other positions only,
                in row-major order, unless `positions_to_predict` says where; `loss` is the mean cross-entropy over the
                labelled positions in nats (0 when there is none), or their sum over `num_items_in_batch`.
            positions_to_predict (`torch.LongTensor` of shape `[n]`, *optional*):
                Flat indices over `batch * seq` at which the head runs: `logits` are then `[n, vocab]`.
            num_items_in_batch (`int`, *optional*):
                Divisor of the summed loss, as [`~transformers.Trainer`] passes it.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`] with `logits` of shape `[batch, seq, vocab]` or
            `[n, vocab]`.

        Raises:
            ValueError: timesteps missing, not wanted, or no times; a sequence over `max_sequence_length`;
                `position_ids` with the prefix; `positions_to_predict` that are no flat indices.
        """
        ids_or_embeds = input_ids if input_ids is not None else inputs_embeds
        if ids_or_embeds is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        batch_size, seq_len = ids_or_embeds.shape[:2]
        if seq_len > self.max_sequence_length:
            raise ValueError(
                f"The sequence has {seq_len} tokens; this model takes at most {self.max_sequence_length}."
            )
        self._check_timesteps(timesteps, batch_size)
        if positions_to_predict is not None and (
            positions_to_predict.ndim != 1 or positions_to_predict.dtype != torch.long
        ):
            raise ValueError(
                "`positions_to_predict` must be a LongTensor of shape [n] with flat indices, got"
                f" {positions_to_predict.dtype} of shape {list(positions_to_predict.shape)}."
            )
        if labels is not None and positions_to_predict is None:
            positions_to_predict = (labels.flatten() != -100).nonzero().flatten()

        # The last layer's states of all positions are computed where a caller wants to see them.
        wants_states = kwargs.get("output_hidden_states") or self.config.output_hidden_states
        asked = None if wants_states else positions_to_predict
        outputs = self._encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, timesteps, asked, **kwargs
        )
        hidden_states = outputs.last_hidden_state  # [batch, seq, hidden], or [1, n, hidden] at the asked positions
        if asked is not None:
            hidden_states = hidden_states[0]
        elif positions_to_predict is not None:
            hidden_states = hidden_states.flatten(0, 1)[positions_to_predict]  # [n, hidden]
        logits = self.cls(hidden_states)

        loss = None
        if labels is not None:
            targets = labels.flatten()[positions_to_predict]
            loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=-100)
            loss = loss / ((targets != -100).sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _check_timesteps(self, timesteps: torch.Tensor | None, batch_size: int):
        conditioning = self.config.time_conditioning
        if conditioning == "none":
            if timesteps is not None:
                raise ValueError("`timesteps` were passed to a model with `time_conditioning='none'`.")
            return
        if timesteps is None:
            raise ValueError(f"`timesteps` are required: the model has `time_conditioning={conditioning!r}`.")
        if timesteps.shape != (batch_size,) or not timesteps.is_floating_point():
            raise ValueError(
                f"`timesteps` must be floats of shape [{batch_size}], got {timesteps.dtype} of shape"
                f" {list(timesteps.shape)}."
            )
        # Looking at the values on an accelerator would wait for it.
        can_look = timesteps.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_look and not ((timesteps > 0) & (timesteps <= 1)).all():
            raise ValueError(f"`timesteps` must lie in (0, 1], got {timesteps.tolist()}.")

    def _encode(
        self, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, timesteps, asked, **kwargs
    ):
        """
        Runs BERT's body with the time fed in the configured way; `last_hidden_state` is `[batch, seq, hidden]`, or
        `[1, n, hidden]` at the positions that are `asked` [n].
        """
        if asked is not None:
            kwargs["positions_to_predict"] = asked
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if timesteps is None:
            return self.bert(**inputs, return_dict=True, **kwargs)

        time_features = get_timestep_embedding(timesteps * TIME_SCALE, self.config.hidden_size).to(self.dtype)
        if self.config.time_conditioning == "layerwise":
            time_embeddings = [time_mlp(time_features) for time_mlp in self.time_mlp]
            return self.bert(**inputs, time_embeddings=time_embeddings, return_dict=True, **kwargs)

        if position_ids is not None:
            raise ValueError("`position_ids` cannot be combined with `time_conditioning='prefix'`, which shifts them.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if asked is not None:
            seq_len = inputs_embeds.shape[1]
            kwargs["positions_to_predict"] = asked + asked // seq_len + (asked % seq_len > 0)  # behind the time token
        time_token = self.time_mlp(time_features)[:, None]  # [batch, 1, hidden]
        inputs["input_ids"] = None
        inputs["inputs_embeds"] = torch.cat([inputs_embeds[:, :1], time_token, inputs_embeds[:, 1:]], dim=1)
        for name in ("attention_mask", "token_type_ids"):
            if inputs[name] is not None:  # the time token shares the segment of position 0 and is always attended to
                extra = torch.ones_like(attention_mask[:, :1]) if name == "attention_mask" else token_type_ids[:, :1]
                inputs[name] = torch.cat([inputs[name][:, :1], extra, inputs[name][:, 1:]], dim=1)
        outputs = self.bert(**inputs, return_dict=True, **kwargs)
        if asked is None:
            outputs.last_hidden_state = _without_time_token(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(_without_time_token(states) for states in outputs.hidden_states)
        return outputs


def _without_time_token(hidden_states: torch.Tensor) -> torch.Tensor:
    """[batch, 1 + seq, hidden] -> [batch, seq, hidden], the prefix at position 1 left out."""
    return torch.cat([hidden_states[:, :1], hidden_states[:, 2:]], dim=1)


__all__ = ["DiffusionBertForMaskedDiffusion"]
