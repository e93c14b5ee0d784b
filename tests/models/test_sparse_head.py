"""The head at chosen positions for stock models of transformers, and the encoder skipped where nothing changed."""

import pytest
import torch
from toys import toy_model
from transformers import (
    AlbertConfig,
    AutoModelForMaskedLM,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    IBertConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from diffusers_text import logits_at
from diffusers_text.models.sparse_head import HiddenStateCache, max_sequence_length

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES),
    "distilbert": DistilBertConfig(
        vocab_size=40, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=64
    ),
    "modernbert": ModernBertConfig(
        **SIZES, pad_token_id=1, cls_token_id=0, sep_token_id=2, bos_token_id=0, eos_token_id=2
    ),
    "electra": ElectraConfig(**SIZES, embedding_size=16),
    "albert": AlbertConfig(**SIZES, embedding_size=16),
    "deberta-v2": DebertaV2Config(**SIZES),
    "xlm-roberta": XLMRobertaConfig(**SIZES),
    "mpnet": MPNetConfig(**SIZES),
    "ibert": IBertConfig(**SIZES),
}


def stock_model(name):
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(CONFIGS[name]).eval()


@pytest.fixture(params=CONFIGS)
def model(request):
    return stock_model(request.param)


@pytest.fixture
def inputs():
    attention_mask = torch.ones(3, 9, dtype=torch.long)
    attention_mask[1, 6:] = 0
    return {"input_ids": torch.randint(5, 40, (3, 9)), "attention_mask": attention_mask}


def head_rows(model):
    """Counts the rows that the vocabulary head sees."""
    seen = []
    head = next(m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 40)
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    return seen


@torch.no_grad()
def test_sparse_logits_equal_full_ones_and_the_hook_is_gone(model, inputs):
    full = model(**inputs).logits
    positions = torch.tensor([20, 3, 11])
    torch.testing.assert_close(
        logits_at(model, positions, **inputs), full.flatten(0, 1)[positions], atol=1e-6, rtol=1e-5
    )
    assert torch.equal(model(**inputs).logits, full)


@torch.no_grad()
def test_the_hook_is_gone_after_an_error(inputs):
    model = stock_model("bert")
    with pytest.raises(IndexError):
        logits_at(model, torch.tensor([1000]), **inputs)
    assert model(**inputs).logits.shape == (3, 9, 40)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "electra"])
def test_the_head_sees_asked_positions_only(name, inputs):
    model = stock_model(name)
    seen = head_rows(model)
    logits_at(model, torch.tensor([20, 3]), **inputs)
    assert seen == [2]


def test_gradients_flow_through_the_sparse_head(inputs):
    model = stock_model("bert")
    logits_at(model, torch.tensor([4]), **inputs).sum().backward()
    assert model.bert.embeddings.word_embeddings.weight.grad is not None


def test_times_for_a_stock_model_are_an_error(inputs):
    with pytest.raises(ValueError, match="BertForMaskedLM does not condition on time"):
        logits_at(stock_model("bert"), torch.tensor([1]), **inputs, timesteps=torch.ones(3))


@torch.no_grad()
def test_cached_states_run_the_head_only_and_give_the_same_logits(model, inputs):
    runs = []
    words = model.get_input_embeddings()
    words.register_forward_hook(lambda module, args, output: runs.append(args[0].shape[0]))
    cache = HiddenStateCache()
    positions = torch.tensor([3, 12])

    def fresh(positions):
        return logits_at(model, positions, **inputs)

    def cached(positions):
        return cache.logits_at(model, positions, **inputs)

    torch.testing.assert_close(cached(positions), fresh(positions), atol=1e-5, rtol=1e-5)
    runs.clear()
    again = cached(torch.tensor([4, 13]))
    assert runs == []
    torch.testing.assert_close(again, fresh(torch.tensor([4, 13])), atol=1e-5, rtol=1e-5)
    inputs["input_ids"][1, 2] = (inputs["input_ids"][1, 2] + 1) % 40
    runs.clear()
    mixed = cached(torch.tensor([4, 13]))
    assert runs == [1]
    torch.testing.assert_close(mixed, fresh(torch.tensor([4, 13])), atol=1e-5, rtol=1e-5)
    assert model(**inputs).logits.shape == (3, 9, 40)


@torch.no_grad()
def test_own_model_caches_too():
    model = toy_model()
    inputs = {"input_ids": torch.randint(5, 8, (2, 6))}
    cache = HiddenStateCache()
    for position in (1, 2, 9):
        positions = torch.tensor([position])
        torch.testing.assert_close(cache.logits_at(model, positions, **inputs), logits_at(model, positions, **inputs))


@pytest.mark.parametrize(
    ("name", "length"), [("bert", 64), ("roberta", 62), ("ibert", 62), ("distilbert", 64), ("modernbert", 64)]
)
def test_longest_sequence_is_what_the_model_takes(name, length):
    model = stock_model(name)
    assert max_sequence_length(model) == length
    with torch.no_grad():
        assert model(torch.full((1, length), 5)).logits.shape[1] == length
