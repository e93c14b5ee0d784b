"""Denoisers out of checkpoints."""

import pytest
import torch
from toys import toy_config
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from diffusers_text import DiffusionBertForMaskedDiffusion, load_denoiser


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    BertForMaskedLM(BertConfig(**{**toy_config().to_dict(), "model_type": "bert"})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("time_conditioning", ["none", "layerwise", "prefix"])
@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_bert_becomes_a_denoiser(bert, time_conditioning, from_scratch):
    model = load_denoiser(bert, time_conditioning, from_scratch)
    assert type(model) is DiffusionBertForMaskedDiffusion
    assert model.config.time_conditioning == time_conditioning
    found = model.get_input_embeddings().weight
    kept = torch.equal(found, BertForMaskedLM.from_pretrained(bert).get_input_embeddings().weight)
    assert kept != from_scratch


@pytest.mark.parametrize("from_scratch", [False, True])
def test_values_of_the_config_may_be_others(bert, from_scratch):
    model = load_denoiser(
        bert,
        "layerwise",
        from_scratch,
        max_position_embeddings=64,
        hidden_dropout_prob=0.25,
        ignore_mismatched_sizes=True,
    )
    assert model.max_sequence_length == 64
    assert model.config.hidden_dropout_prob == 0.25
    assert model.config.time_conditioning == "layerwise"
    model(input_ids=torch.full((1, 64), 5), timesteps=torch.tensor([0.5]))


def test_arguments_of_loading_go_through(bert):
    for from_scratch in (False, True):
        assert load_denoiser(bert, from_scratch=from_scratch, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_checkpoint_of_one_conditioning_takes_no_other(bert, tmp_path):
    load_denoiser(bert, "layerwise").save_pretrained(tmp_path)
    for same in ("layerwise", None):
        assert load_denoiser(tmp_path, same).config.time_conditioning == "layerwise"
        assert load_denoiser(tmp_path, same, from_scratch=True).config.time_conditioning == "layerwise"
    for other in ("none", "prefix"):
        with pytest.raises(ValueError, match="`time_conditioning` is '(none|prefix)', but the checkpoint"):
            load_denoiser(tmp_path, other)


def test_other_encoders_are_told_no_time(tmp_path):
    config = DistilBertConfig(vocab_size=8, dim=16, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=16)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path)
    assert type(load_denoiser(tmp_path)) is DistilBertForMaskedLM
    assert type(load_denoiser(tmp_path, from_scratch=True, n_heads=4)) is DistilBertForMaskedLM
    assert load_denoiser(tmp_path, from_scratch=True, n_heads=4).config.n_heads == 4
    with pytest.raises(ValueError, match="`time_conditioning='prefix'` is for BERT, not for a distilbert"):
        load_denoiser(tmp_path, "prefix")
