"""The training benchmark's steps do what their names say, and its file holds what it should. Nothing here is timed."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "utils"))

import benchmark_training as benchmark

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    import benchmark_sampling

    for module in (benchmark, benchmark_sampling):
        monkeypatch.setattr(module, "VOCAB_SIZE", 400)
        monkeypatch.setattr(module, "SIZES", {"minilm": TINY, "base": TINY})
    monkeypatch.setattr(benchmark, "CHUNK_SIZE", 7)


def gradients(step, model):
    loss = step()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_sparse_chunked_and_full_logits_have_the_same_loss_and_gradients():
    torch.manual_seed(0)
    steps, models = benchmark.make_steps("minilm", 4, 24, "cpu")
    loss, expected = gradients(steps["full_logits"], models["full_logits"])
    for name in ("ours", "ours_chunked"):
        own_loss, own = gradients(steps[name], models[name])
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(own[parameter], gradient, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}")


def test_every_step_leaves_gradients():
    steps, models = benchmark.make_steps("minilm", 3, 12, "cpu")
    assert [*steps] == benchmark.STEPS
    for name, step in steps.items():
        assert step().isfinite()
        assert models[name].bert.encoder.layer[0].output.dense.weight.grad.abs().sum() > 0


def test_file_and_table(tmp_path, capsys):
    arguments = ["--preset", "full", "--batch_size", "3", "--length", "12", "--repeats", "2", "--threads", "1"]
    benchmark.main([*arguments, "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["step"], row["size"]) for row in rows] == [
        (name, size) for size in ("minilm", "base") for name in benchmark.STEPS
    ]
    for row in rows:
        assert [*row] == ["step", "size", "batch", "length", "seconds", "peak_mb_above_rest", "tokens_per_second"]
        assert (row["batch"], row["length"]) == (3, 12)
        assert row["seconds"] > 0 <= row["peak_mb_above_rest"]
        assert row["tokens_per_second"] == pytest.approx(36 / row["seconds"])
    out = capsys.readouterr().out
    assert out.count(": met") + out.count(": missed") == 2 * len(benchmark.TARGETS)
    with pytest.raises(SystemExit):
        benchmark.main(["--repeats", "0"])
