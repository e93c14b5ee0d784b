"""The vocabulary head at chosen positions only, for any masked language model of transformers."""

import copy
import sys
from contextlib import contextmanager

import torch
from accelerate.utils import extract_model_from_parallel
from diffusers.utils.torch_utils import is_compiled_module
from torch import nn
from transformers import PreTrainedModel

from .modeling_diffusion_bert import DiffusionBertForMaskedDiffusion


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, distributed wrappers and PEFT."""
    if isinstance(model, PreTrainedModel):  # looking for wrappers takes a while
        return model
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    peft = sys.modules.get("peft")  # a model can only come from it once it is imported
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` runs under `torch.compile`, by `torch.compile(model)` or `model.compile()`."""
    return is_compiled_module(model) or model._compiled_call_impl is not None


def computes_all_logits(model: nn.Module) -> bool:
    """Whether the head of `model` cannot be kept from other positions: compiled code sees no hook."""
    return is_compiled(model) and not isinstance(unwrap_model(model), DiffusionBertForMaskedDiffusion)


def has_adapter(model: nn.Module) -> bool:
    """Whether `model` holds a PEFT adapter that is not merged."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


@contextmanager
def evaluation_mode(model: nn.Module):
    """While open, nothing is dropped out."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def conditions_on_time(model: nn.Module) -> bool:
    """Whether `model` wants `timesteps`: only [`DiffusionBertForMaskedDiffusion`] can."""
    model = unwrap_model(model)
    return isinstance(model, DiffusionBertForMaskedDiffusion) and model.config.time_conditioning != "none"


def max_sequence_length(model: nn.Module) -> int:
    """Longest sequence that `model` takes, special tokens included, in tokens."""
    model = unwrap_model(model)
    if isinstance(model, DiffusionBertForMaskedDiffusion):
        return model.max_sequence_length
    # RoBERTa and its kin start counting positions after the padding index.
    offsets = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    # Models with relative positions only have no limit and no such entry.
    limit = getattr(model.config, "max_position_embeddings", sys.maxsize)
    return limit - max(offsets, default=0)


def logits_at(model: nn.Module, positions: torch.LongTensor, **inputs) -> torch.Tensor:
    r"""
    Logits of a masked language model at flat positions; the vocabulary head sees no other.

    [`DiffusionBertForMaskedDiffusion`] takes positions itself. Other encoder-only `AutoModelForMaskedLM` models
    swallow arguments they do not know, so a forward hook on their `base_model`, in place during the call, hands the
    head those rows. Compiled code sees no hook: there the logits of all positions are computed.

    Args:
        model: the model, possibly compiled or wrapped for several devices.
        positions (`torch.LongTensor` of shape `[n]`): flat indices over `batch * seq`.
        inputs: keyword arguments of the model's forward: `input_ids`, `attention_mask`, `timesteps`, ...

    Returns:
        `torch.Tensor` of shape `[n, vocab]`.

    Raises:
        ValueError: `timesteps` for a model that does not condition on time.

    Example:

    ```python
    >>> import torch
    >>> from transformers import DistilBertConfig, DistilBertForMaskedLM
    >>> from diffusers_text import logits_at

    >>> model = DistilBertForMaskedLM(DistilBertConfig(vocab_size=50, dim=16, hidden_dim=32, n_layers=1, n_heads=2))
    >>> logits_at(model, torch.tensor([2, 9]), input_ids=torch.randint(50, (2, 8))).shape
    torch.Size([2, 50])
    ```
    """
    if isinstance(unwrap_model(model), DiffusionBertForMaskedDiffusion):
        with _head_for_few_rows(model):
            return model(**inputs, positions_to_predict=positions, return_dict=True).logits
    if "timesteps" in inputs:
        raise ValueError(
            f"`timesteps` were passed, but {type(unwrap_model(model)).__name__} does not condition on time."
        )
    if computes_all_logits(model):
        return model(**inputs, return_dict=True).logits.flatten(0, 1)[positions]
    with _hidden_states_replaced(model, lambda states: states.flatten(0, 1)[positions][None]):  # [1, n, hidden]
        return model(**inputs, return_dict=True).logits[0]


def sum_over_logits(
    model: nn.Module, positions: torch.LongTensor, chunk_size: int, function, **inputs
) -> tuple[torch.Tensor, list]:
    r"""
    The sum of a loss over chunks of positions, whose logits are in memory a chunk at a time. The encoder runs once. A
    chunk's gradient is taken as soon as its loss is known, so that nothing is computed twice.

    Args:
        model: the model, possibly wrapped for several devices, but not compiled and with whole parameters.
        positions (`torch.LongTensor` of shape `[n]`): flat indices over `batch * seq`.
        chunk_size (`int`): positions in a chunk.
        function: `function(logits [m, vocab], positions [m]) -> (loss, result)`, the loss a scalar.
        inputs: keyword arguments of the model's forward, as for [`logits_at`].

    Returns:
        `torch.Tensor`, a scalar, and the list of the chunks' results, which carry no gradient.
    """
    inner = unwrap_model(model)
    chosen = {"positions_to_predict": positions} if isinstance(inner, DiffusionBertForMaskedDiffusion) else {}
    kept = []

    def keep(states):
        kept.append(states[0] if chosen else states.flatten(0, 1)[positions])  # [n, hidden]
        return states[:1, :0]  # nothing is left for the head

    with _hidden_states_replaced(model, keep) as outputs:
        model(**inputs, **chosen, return_dict=True)
    first_row = {name: value[:1] for name, value in inputs.items()}
    results = []

    def loss_of(states, chunk):
        encoder_output = copy.copy(outputs[0])
        encoder_output.last_hidden_state = states[None]  # [1, m, hidden]
        own = {"positions_to_predict": chunk} if chosen else {}
        with _encoder_skipped(model, encoder_output):
            logits = inner(**first_row, **own, return_dict=True).logits
        loss, result = function(logits.flatten(0, -2), chunk)
        results.append(result)
        return loss

    if not torch.is_grad_enabled():
        pieces = zip(kept[0].split(chunk_size), positions.split(chunk_size))
        return torch.stack([loss_of(*piece) for piece in pieces]).sum(), results
    parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    return _LossOfChunks.apply(kept[0], positions, chunk_size, loss_of, *parameters), results


class _LossOfChunks(torch.autograd.Function):
    """The sum of `loss_of(states, positions)` over chunks of `states` [n, hidden], with the gradients of each."""

    @staticmethod
    def forward(ctx, states, positions, chunk_size, loss_of, *parameters):
        total, of_states, of_parameters = states.new_zeros((), dtype=torch.float32), [], [None] * len(parameters)
        for rows, chunk in zip(states.split(chunk_size), positions.split(chunk_size)):
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                loss = loss_of(rows, chunk)
                of_rows, *gradients = torch.autograd.grad(loss, [rows, *parameters], allow_unused=True)
            total = total + loss.detach()
            of_states.append(of_rows)
            for i in range(len(parameters)):  # one by one: a vocabulary's gradient is as large as many logits
                gradient, gradients[i] = gradients[i], None
                if of_parameters[i] is None:
                    of_parameters[i] = gradient
                elif gradient is not None:
                    of_parameters[i] += gradient
                del gradient
        ctx.of_states, ctx.of_parameters = torch.cat(of_states), of_parameters
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total):
        gradients = [None if gradient is None else gradient.mul_(grad_total) for gradient in ctx.of_parameters]
        return ctx.of_states * grad_total, None, None, None, *gradients


class HiddenStateCache:
    """
    Keeps the hidden states of a time-agnostic model's rows, so that a row that has not changed runs only the head
    again.
    """

    def __init__(self):
        self.input_ids = None  # [batch, seq], as last encoded; -1 in a row that never was
        self.hidden_states = None  # [batch, seq, hidden]
        self.encoder_output = None  # the encoder's last, for what heads want beside the hidden states

    def logits_at(self, model, positions, input_ids, device=None, **inputs) -> torch.Tensor:
        """
        Logits `[n, vocab]` at flat `positions` [n] of `input_ids` [batch, seq]; encodes the rows among them whose ids
        differ from the last call's. Other `inputs` [batch, seq] (`attention_mask`, `token_type_ids`) are the same in
        each call. All may lie on the CPU, where nothing has to be waited for, and the model on `device`.
        """
        device = input_ids.device if device is None else device
        if self.input_ids is None:
            self.input_ids = torch.full_like(input_ids, -1)
        rows = torch.unique(positions // input_ids.shape[1])
        rows = rows[(input_ids[rows] != self.input_ids[rows]).any(dim=1)]
        self.input_ids[rows] = input_ids[rows]

        def update_and_gather(states):
            if self.hidden_states is None:
                self.hidden_states = states.new_zeros(len(input_ids), *states.shape[1:])
            if len(rows):
                self.hidden_states[rows.to(device, non_blocking=True)] = states
            return self.hidden_states.flatten(0, 1)[positions.to(device, non_blocking=True)][None]  # [1, n, hidden]

        def call(rows):
            of_rows = {name: value[rows] for name, value in {"input_ids": input_ids, **inputs}.items()}
            of_rows = {name: value.to(device, non_blocking=True) for name, value in of_rows.items()}
            return model(**of_rows, return_dict=True).logits[0]

        with _hidden_states_replaced(model, update_and_gather) as outputs:
            if len(rows):
                logits = call(rows)
                self.encoder_output = outputs[0]
                return logits
            with _encoder_skipped(model, self.encoder_output):
                return call(slice(1))


@contextmanager
def _hidden_states_replaced(model, replace):
    """
    While open, the head of `model` gets `replace(last_hidden_state)` from the encoder, whose outputs are collected in
    the list that is given.
    """
    outputs = []

    def hook(module, args, output):
        output.last_hidden_state = replace(output.last_hidden_state)
        outputs.append(output)
        return output

    handle = unwrap_model(model).base_model.register_forward_hook(hook)
    try:
        with _head_for_few_rows(model):
            yield outputs
    finally:
        handle.remove()


@contextmanager
def _encoder_skipped(model, output):
    """While open, the encoder of `model` returns `output` without running. Hooks on the model itself still do."""
    encoder = unwrap_model(model).base_model
    own_forward = vars(encoder).get("forward")  # accelerate puts one there when it offloads
    encoder.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del encoder.forward
        if own_forward is not None:
            encoder.forward = own_forward


@contextmanager
def _head_for_few_rows(model):
    """
    While open, a plain linear vocabulary head on the CPU multiplies up to 16 rows as `W h^T`, several times faster
    than `F.linear`, whose kernels are made for many.
    """
    head = unwrap_model(model).get_output_embeddings()
    is_plain = type(head) is nn.Linear and "forward" not in vars(head) and head.weight.device.type == "cpu"
    if not is_plain or head.weight.dtype != torch.float32 or torch.is_grad_enabled() or is_compiled(model):
        yield
        return

    def forward(states):  # [..., hidden]
        rows = states.reshape(-1, states.shape[-1])
        if not 0 < len(rows) <= 16:
            return nn.functional.linear(states, head.weight, head.bias)
        columns = (rows if len(rows) > 1 else rows.repeat(2, 1)).T  # a single column would take a slower kernel
        logits = head.weight @ columns  # [vocab, n]
        if head.bias is not None:
            logits += head.bias[:, None]
        return logits[:, : len(rows)].T.reshape(*states.shape[:-1], -1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


__all__ = [
    "HiddenStateCache",
    "computes_all_logits",
    "conditions_on_time",
    "has_adapter",
    "is_compiled",
    "logits_at",
    "max_sequence_length",
    "sum_over_logits",
    "unwrap_model",
]
