"""The formulas of utils/estimate_cost.py against what small models take."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ModernBertConfig, ModernBertForMaskedLM

from diffusers_text import DiffusionBertConfig, DiffusionBertForMaskedDiffusion, logits_at

sys.path.insert(0, str(Path(__file__).parents[1] / "utils"))

import estimate_cost as cost
from estimate_cost import Size

SIZES = [
    Size("bert", 2, 32, 96, 100, 2, 40),
    Size("bert", 5, 48, 64, 150, 4, 64),
    Size("modernbert", 2, 32, 96, 100, 2, 0, is_gated=True),
    Size("modernbert", 5, 64, 48, 150, 4, 0, is_gated=True),
]
BATCH, LENGTH = 3, 32


def build(size, attention):
    shared = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "pad_token_id": 0,
    }
    if size.is_gated:
        config = ModernBertConfig(**shared, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
        return ModernBertForMaskedLM._from_config(config, attn_implementation=attention)
    config = DiffusionBertConfig(
        **shared,
        max_position_embeddings=size.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return DiffusionBertForMaskedDiffusion._from_config(config, attn_implementation=attention)


def training_pass(model, masked):
    """A forward pass, ready for backward, at the first `masked` share of positions."""
    positions = torch.arange(int(BATCH * LENGTH * masked))
    return logits_at(model.train(), positions, input_ids=torch.full((BATCH, LENGTH), 7)).sum()


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_the_model(size):
    assert cost.parameters(size) == build(size, "sdpa").num_parameters()


@pytest.mark.parametrize("masked", [0.25, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_operations_are_those_that_torch_counts(size, masked):
    counter = FlopCounterMode(display=False)
    with counter:
        training_pass(build(size, "eager"), masked).backward()
    counted = counter.get_total_flops() / (BATCH * LENGTH)
    assert cost.operations_per_token(size, LENGTH, masked) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("size", SIZES)
def test_activations_are_what_the_backward_pass_keeps(size):
    """Of two depths, so that what lies before and after the layers cancels."""

    def kept_bytes(layers):
        model = build(size._replace(layers=layers), "sdpa")
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = training_pass(model, 1.0)
        del loss
        return sum(size for size, _ in kept.values())

    per_token = (kept_bytes(size.layers + 2) - kept_bytes(size.layers)) / 2 / (BATCH * LENGTH)
    assert cost.activation_bytes_per_token(size) / size.layers == pytest.approx(per_token, rel=0.01)


def test_known_sizes_have_their_known_parameters():
    by_name = {size.name: cost.parameters(size) for size in cost.SIZES}
    assert by_name["BERT-base"] == 109_514_298
    assert by_name["ModernBERT-large"] == pytest.approx(395.8e6, rel=0.001)
