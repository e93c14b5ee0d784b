"""
DiffusionBertForMaskedDiffusion as a transformers model: loading, time, sparse head, and what the ecosystem does to
models.
"""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from toys import MASK, toy_config, toy_model, toy_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    BertTokenizer,
    pipeline,
)
from transformers.utils import is_flash_attn_2_available

from diffusers_text import DiffusionBertConfig, DiffusionBertForMaskedDiffusion, logits_at

CONDITIONINGS = ["none", "layerwise", "prefix"]
SMALL = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def package_folder(package, *parts):
    return Path(find_spec(package).submodule_search_locations[0], *parts)


def inputs_of(model, batch_size=3, seq_len=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.randint(5, 8, (batch_size, seq_len), generator=generator)}
    if model.config.time_conditioning != "none":
        inputs["timesteps"] = torch.rand(batch_size, generator=generator) * 0.9 + 0.05
    return inputs


@pytest.fixture(params=CONDITIONINGS)
def model(request):
    return toy_model(time_conditioning=request.param)


def test_a_bert_config_keeps_its_attention():
    config = BertConfig(**SMALL, attn_implementation="eager")
    assert DiffusionBertForMaskedDiffusion(config).config._attn_implementation == "eager"


# --- Loading and saving ---


def test_a_masked_lm_checkpoint_loads_whole_and_predicts_the_same(caplog):
    folder = package_folder("cognition", "model")
    with caplog.at_level(logging.WARNING):
        model, info = DiffusionBertForMaskedDiffusion.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert "model of type" not in caplog.text
    input_ids = torch.randint(1000, 30000, (2, 12))
    with torch.no_grad():
        expected = BertForMaskedLM.from_pretrained(folder)(input_ids).logits
        assert torch.equal(model(input_ids).logits, expected)


def test_an_intact_protein_checkpoint_still_knows_proteins():
    """A real BERT with its own head fills in a masked antibody chain as well through this class."""
    folder = package_folder("antiberty", "trained_models", "AntiBERTy_md_smooth")
    tokenizer = BertTokenizer(str(package_folder("antiberty", "trained_models", "vocab.txt")), do_lower_case=False)
    model = DiffusionBertForMaskedDiffusion.from_pretrained(folder)
    chain = (
        "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYY"
        "ADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAKDRGYYFDYWGQGTLVTVSS"
    )
    ids = tokenizer(" ".join(chain), return_tensors="pt").input_ids
    masked = ids.repeat(len(chain), 1)
    positions = torch.arange(len(chain))
    masked[positions, positions + 1] = tokenizer.mask_token_id
    with torch.no_grad():
        flat = positions * ids.shape[1] + positions + 1
        logits = model(masked, positions_to_predict=flat).logits
    assert (logits.argmax(-1) == ids[0, 1:-1]).float().mean() > 0.85


def test_a_body_only_checkpoint_misses_its_head_only_and_says_what_to_do(tmp_path, caplog):
    BertModel(toy_config()).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace("diffusion_bert", "bert")
    (tmp_path / "config.json").write_text(config)
    with caplog.at_level(logging.WARNING):
        _, info = DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"]
    assert all(key.startswith("cls.") for key in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert caplog.text.count("Train the model before you sample from it.") == 1
    assert "corrupted" not in caplog.text


def test_a_pretraining_checkpoint_leaves_nothing_unexpected(tmp_path):
    """bert-base-uncased on the Hub has a pooler and a next-sentence head."""
    BertForPreTraining(toy_config()).save_pretrained(tmp_path)
    _, info = DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_plain_bert_config_is_taken(tmp_path):
    BertForMaskedLM(BertConfig(**SMALL)).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is BertConfig
    model = DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, config=config)
    assert type(model.config) is DiffusionBertConfig
    assert model(torch.full((1, 4), 5), return_dict=False)[0].shape == (1, 4, 8)
    model.config.return_dict = False
    assert model(torch.full((1, 4), 5))[0].shape == (1, 4, 8)
    assert logits_at(model, torch.tensor([1]), input_ids=torch.full((1, 4), 5)).shape == (1, 8)


def test_missing_weights_are_loud(tmp_path, caplog):
    toy_model().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        _, info = DiffusionBertForMaskedDiffusion.from_pretrained(
            tmp_path, time_conditioning="layerwise", output_loading_info=True
        )
    assert {key.split(".")[0] for key in info["missing_keys"]} == {"time_mlp"}
    assert "MISSING" in caplog.text


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_save_and_load_is_bit_equal(conditioning, tmp_path):
    model = toy_model(time_conditioning=conditioning)
    model.save_pretrained(tmp_path)
    for loaded in (
        DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path),
        AutoModelForMaskedLM.from_pretrained(tmp_path),
        DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, device_map="cpu"),
    ):
        assert type(loaded) is DiffusionBertForMaskedDiffusion
        assert loaded.config.time_conditioning == conditioning
        assert not loaded.training
        for tensors in ("named_parameters", "named_buffers"):
            ours, theirs = dict(getattr(model, tensors)()), dict(getattr(loaded, tensors)())
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight
        assert torch.equal(loaded(**inputs_of(model)).logits, model(**inputs_of(model)).logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DiffusionBertConfig


def test_subfolder_variant_and_dtype_pass_through(tmp_path):
    model = toy_model()
    model.save_pretrained(tmp_path / "inner", variant="v2")
    assert (tmp_path / "inner" / "model.v2.safetensors").exists()
    loaded = DiffusionBertForMaskedDiffusion.from_pretrained(
        tmp_path, subfolder="inner", variant="v2", dtype=torch.bfloat16
    )
    assert loaded.dtype == torch.bfloat16


def test_quantization_config_reaches_the_loader(tmp_path):
    """No quantizer is installed here: the loader's own complaint shows that the argument arrived."""
    from transformers import QuantoConfig

    toy_model().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=r"(?i)quanto"):
        DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, quantization_config=QuantoConfig(weights="int8"))


def test_fill_mask_pipeline_works_without_a_word_of_complaint(tmp_path, caplog):
    toy_model().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        answers = pipeline("fill-mask", model=str(tmp_path))("a [MASK] b")
    assert len(answers) == 5
    assert sum(answer["score"] for answer in answers) <= 1.0001
    assert "not supported" not in caplog.text


# --- Time ---


@pytest.mark.parametrize("conditioning", ["layerwise"])
def test_layerwise_time_leaves_a_pretrained_bert_as_it_was(conditioning):
    folder = package_folder("cognition", "model")
    model = DiffusionBertForMaskedDiffusion.from_pretrained(folder, time_conditioning=conditioning)
    input_ids = torch.randint(1000, 30000, (2, 12))
    with torch.no_grad():
        expected = BertForMaskedLM.from_pretrained(folder)(input_ids).logits
        assert torch.equal(model(input_ids, timesteps=torch.tensor([0.2, 1.0])).logits, expected)


@pytest.mark.parametrize("conditioning", ["layerwise", "prefix"])
def test_time_matters_and_each_row_has_its_own(conditioning):
    model = toy_model(time_conditioning=conditioning)
    input_ids = torch.randint(5, 8, (1, 6)).repeat(2, 1)
    logits = model(input_ids, timesteps=torch.tensor([0.1, 0.9])).logits
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    alone = model(input_ids[:1], timesteps=torch.tensor([0.1])).logits
    torch.testing.assert_close(alone[0], logits[0])


def test_wrong_timesteps_are_named():
    input_ids = torch.full((2, 4), 5)
    with pytest.raises(ValueError, match="time_conditioning='none'"):
        toy_model()(input_ids, timesteps=torch.ones(2))
    model = toy_model(time_conditioning="layerwise")
    with pytest.raises(ValueError, match="`timesteps` are required"):
        model(input_ids)
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.long), torch.ones(2, 1)):
        with pytest.raises(ValueError, match=r"`timesteps` must be floats of shape \[2\]"):
            model(input_ids, timesteps=wrong)
    for value in (0.0, 1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"`timesteps` must lie in \(0, 1\]"):
            model(input_ids, timesteps=torch.tensor([0.5, value]))


def test_prefix_shifts_text_by_one_position_and_forbids_position_ids():
    """
    The text of a prefix model sees what a plain model sees one position further on, with the time token in between.
    """
    model = toy_model(time_conditioning="prefix")
    input_ids, times = torch.tensor([[2, 5, 6, 3]]), torch.tensor([0.5])
    from diffusers.models.embeddings import get_timestep_embedding

    words = model.get_input_embeddings()(input_ids)
    token = model.time_mlp(get_timestep_embedding(times * 1000, model.config.hidden_size))
    embeds = torch.cat([words[:, :1], token[:, None], words[:, 1:]], dim=1)
    expected = model.cls(model.bert(inputs_embeds=embeds).last_hidden_state)[:, [0, 2, 3, 4]]
    torch.testing.assert_close(model(input_ids, timesteps=times).logits, expected)
    with pytest.raises(ValueError, match="`position_ids`"):
        model(input_ids, timesteps=times, position_ids=torch.arange(4)[None])


def test_longest_sequence_works_and_one_more_is_a_clear_error(model):
    longest = 32 - (model.config.time_conditioning == "prefix")
    assert model.max_sequence_length == longest
    assert model(**inputs_of(model, seq_len=longest)).logits.shape[1] == longest
    with pytest.raises(ValueError, match=f"has {longest + 1} tokens; this model takes at most {longest}"):
        model(**inputs_of(model, seq_len=longest + 1))


def test_config_refuses_nonsense():
    with pytest.raises(Exception, match="time_conditioning"):
        DiffusionBertConfig(time_conditioning="sometimes")
    with pytest.raises(Exception, match="is_decoder"):
        DiffusionBertConfig(is_decoder=True)


# --- Forward ---


def test_sparse_equals_full_logits(model):
    inputs = inputs_of(model)
    full = model(**inputs).logits
    positions = torch.tensor([29, 0, 7, 7, 12])
    sparse = model(**inputs, positions_to_predict=positions).logits
    torch.testing.assert_close(sparse, full.flatten(0, 1)[positions], atol=1e-5, rtol=1e-5)
    assert model(**inputs, positions_to_predict=positions[:0]).logits.shape == (0, 8)
    for wrong in (torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match="`positions_to_predict` must be a LongTensor"):
            model(**inputs, positions_to_predict=wrong)


def test_the_last_layer_works_where_it_is_asked(model):
    inputs, positions, rows = inputs_of(model), torch.tensor([29, 0, 7]), []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda module, args, output: rows.append(output[..., 0].numel()))
    sparse = model(**inputs, positions_to_predict=positions)
    everywhere = inputs["input_ids"].numel() + len(inputs["input_ids"]) * (model.config.time_conditioning == "prefix")
    assert rows == [everywhere, 3]
    shown = model(**inputs, positions_to_predict=positions, output_hidden_states=True)
    assert rows[2:] == [everywhere, everywhere]
    torch.testing.assert_close(shown.logits, sparse.logits, atol=1e-5, rtol=1e-5)
    assert {states.shape[:2] for states in shown.hidden_states} == {inputs["input_ids"].shape}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_gradients_are_those_of_full_logits(conditioning, checkpointing):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = toy_model(time_conditioning=conditioning, **no_dropout).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs, positions = inputs_of(model), torch.tensor([29, 0, 7])
    grads = []
    for sparse in (True, False):
        model.zero_grad()
        logits = model(**inputs, positions_to_predict=positions if sparse else None).logits
        (logits if sparse else logits.flatten(0, 1)[positions]).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-4, rtol=1e-4)


def test_labels_reach_the_head_where_they_count_only(model):
    inputs = inputs_of(model)
    labels = torch.full((3, 10), -100)
    labels[0, 2], labels[2, 5], labels[2, 9] = 5, 6, 7
    rows = []
    handle = model.cls.register_forward_hook(lambda module, args, output: rows.append(args[0].shape))
    output = model(**inputs, labels=labels)
    handle.remove()
    assert rows == [(3, model.config.hidden_size)]
    full = model(**inputs).logits
    expected = torch.nn.functional.cross_entropy(full.view(-1, 8), labels.view(-1))
    torch.testing.assert_close(output.loss, expected)
    assert output.logits.shape == (3, 8)
    torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=6).loss, expected * 3 / 6)


def test_no_labels_give_a_zero_loss_with_gradient(model):
    loss = model(**inputs_of(model), labels=torch.full((3, 10), -100)).loss
    loss.backward()
    assert loss == 0


def test_padding_changes_no_logit_of_the_text(model):
    inputs = inputs_of(model)
    attention_mask = torch.ones(3, 10, dtype=torch.long)
    attention_mask[1, 6:] = 0
    logits = model(**inputs, attention_mask=attention_mask).logits
    other = inputs["input_ids"].clone()
    other[1, 6:] = 0
    changed = model(**{**inputs, "input_ids": other}, attention_mask=attention_mask).logits
    torch.testing.assert_close(changed[1, :6], logits[1, :6])
    alone = {name: value[1:2, :6] if value.ndim == 2 else value[1:2] for name, value in inputs.items()}
    torch.testing.assert_close(model(**alone).logits[0], logits[1, :6], atol=1e-4, rtol=1e-4)


def test_hidden_states_and_token_types(model):
    inputs = inputs_of(model)
    segments = torch.zeros(3, 10, dtype=torch.long)
    segments[:, 5:] = 1
    output = model(**inputs, token_type_ids=segments, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert all(states.shape == (3, 10, 16) for states in output.hidden_states)
    assert (output.logits - model(**inputs).logits).abs().max() > 1e-4
    assert isinstance(model(**inputs, return_dict=False), tuple)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        toy_model()()


# --- What the ecosystem does to models ---


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_attention_implementations_agree(conditioning, tmp_path):
    toy_model(time_conditioning=conditioning).save_pretrained(tmp_path)
    sdpa, eager = (
        DiffusionBertForMaskedDiffusion.from_pretrained(tmp_path, attn_implementation=name)
        for name in ("sdpa", "eager")
    )
    inputs = {**inputs_of(sdpa), "attention_mask": torch.ones(3, 10, dtype=torch.long)}
    inputs["attention_mask"][0, 7:] = 0
    torch.testing.assert_close(sdpa(**inputs).logits[1:], eager(**inputs).logits[1:], atol=1e-5, rtol=1e-5)
    attentions = eager(**inputs, output_attentions=True).attentions
    assert len(attentions) == 2


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed (it needs a GPU)")
def test_flash_attention_agrees_with_sdpa(tmp_path):
    toy_model().save_pretrained(tmp_path)
    models = [
        DiffusionBertForMaskedDiffusion.from_pretrained(
            tmp_path, attn_implementation=name, dtype=torch.bfloat16
        ).cuda()
        for name in ("sdpa", "flash_attention_2")
    ]
    input_ids = torch.randint(5, 8, (2, 10)).cuda()
    torch.testing.assert_close(models[0](input_ids).logits, models[1](input_ids).logits, atol=5e-2, rtol=5e-2)


def test_gradient_checkpointing_changes_no_gradient(model):
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(**inputs_of(model), labels=torch.full((3, 10), 6)).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    assert not unused


def test_bfloat16_runs_and_stays_close(model):
    inputs = inputs_of(model)
    exact = model(**inputs).logits
    output = model.to(torch.bfloat16)(**inputs, labels=torch.full((3, 10), 6))
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.isfinite()
    assert (output.logits.view_as(exact).float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_compile_gives_the_same_logits(model):
    inputs = inputs_of(model)
    positions = torch.tensor([3, 17])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(**inputs, positions_to_predict=positions).logits
        torch.testing.assert_close(compiled(**inputs, positions_to_predict=positions).logits, expected)


def test_resize_keeps_the_head_tied_and_old_predictions(model):
    inputs = inputs_of(model)
    before = model(**inputs).logits
    model.resize_token_embeddings(11)
    assert model.config.vocab_size == 11
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    after = model(**inputs).logits
    assert after.shape[-1] == 11
    torch.testing.assert_close(after[..., :8], before)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_lora_trains_saves_and_merges(conditioning, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = toy_model(time_conditioning=conditioning)
    adapted = get_peft_model(model, LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False))
    inputs = inputs_of(model)
    adapted(**inputs, labels=torch.full((3, 10), 6)).loss.backward()
    assert all(("lora" in name) == (p.grad is not None) for name, p in adapted.named_parameters())
    adapted.eval()
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(toy_model(time_conditioning=conditioning), tmp_path).merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
    assert (toy_model(time_conditioning=conditioning)(**inputs).logits - expected).abs().max() > 1e-3


def test_fully_masked_canvas_has_finite_logits(model):
    inputs = inputs_of(model)
    assert model(**{**inputs, "input_ids": torch.full((3, 10), MASK)}).logits.isfinite().all()
