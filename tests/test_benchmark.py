"""The benchmark's samplers do what their names say, and its files hold what they should. Nothing here is timed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2_contingency
from toys import MASK, toy_model, toy_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "utils"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark_sampling as benchmark
from benchmark_sampling import Setting, make_run, measure_setting

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only wait for more, long where other processes keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy():
    tokenizer = toy_tokenizer()
    return benchmark.forbid_specials(toy_model(), tokenizer), tokenizer


@pytest.fixture
def tiny_settings(monkeypatch):
    """The smallest models, canvases and vocabulary under the names of the real ones."""
    settings = [Setting("minilm", 2, 6, 4), Setting("minilm", 2, 6, 12), Setting("base", 1, 6, 12)]
    monkeypatch.setattr(benchmark, "VOCAB_SIZE", 50)
    monkeypatch.setattr(benchmark, "SIZES", {"minilm": TINY, "base": TINY})
    monkeypatch.setattr(benchmark, "TARGETS", {settings[0]: {"textbook": 0, "llada2": 1e9, "floor": 1e9}})
    monkeypatch.setitem(benchmark.PRESETS, "quick", settings)
    return settings


@pytest.mark.parametrize("plot", ["plot.png", "plot.svg"])
def test_files_and_table(tiny_settings, tmp_path, capsys, plot):
    arguments = ["--json", f"{tmp_path}/rows.json", "--plot", f"{tmp_path}/{plot}"]
    benchmark.main([*arguments, "--repeats", "2", "--threads", "1"])

    results = json.loads((tmp_path / "rows.json").read_text())
    assert {name: type(value) for name, value in results.items()} == {"device": str, "threads": int, "rows": list}
    assert results["threads"] == 1
    samplers = ["ours", "textbook", "llada2", "floor"]
    keys = [(row["sampler"], row["size"], row["batch"], row["length"], row["steps"]) for row in results["rows"]]
    assert keys == [(name, *setting) for setting in tiny_settings for name in samplers]
    for row in results["rows"]:
        assert [*row] == ["sampler", "size", "batch", "length", "steps", "seconds", "forwards", "peak_mb"]
        assert isinstance(row["seconds"], float)
        assert isinstance(row["peak_mb"], float)
        assert row["seconds"] > 0 <= row["peak_mb"]
        assert 1 <= row["forwards"] <= row["steps"]
        assert row["sampler"] == "textbook" or row["forwards"] <= row["length"]
    assert (tmp_path / plot).stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["rows.json", plot])

    out = capsys.readouterr().out
    assert out.count(" 2/2: ") == len(results["rows"])
    assert (out.count(": met"), out.count(": missed")) == (2, 1)


@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("name", ["ours", "textbook", "llada2", "spindle"])
def test_samplers_leave_no_mask_and_repeat_themselves(toy, name, steps):
    model, tokenizer = toy
    run = make_run(name, model, tokenizer, Setting("toy", 5, 9, steps))
    sequences = run()
    assert len(sequences) == 5
    assert sequences.shape[1] == (9 if name == "llada2" else 11)
    assert not (sequences == MASK).any()
    assert torch.equal(sequences, run())


def test_masks_left_are_an_error(toy, monkeypatch):
    model, tokenizer = toy
    monkeypatch.setattr(benchmark, "sample_textbook", lambda model, canvas, *_: canvas)
    with pytest.raises(RuntimeError, match="textbook gave"):
        measure_setting(model, tokenizer, Setting("toy", 2, 4, 4), ["textbook"], repeats=1)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_textbook_follows_the_law_of_ours(toy, steps):
    """Both draw texts of two tokens from one distribution: a chi-square test of homogeneity over all texts."""
    setting, texts = Setting("toy", 6000, 2, steps), []
    for seed, name in enumerate(["ours", "textbook"]):
        words = make_run(name, *toy, setting, seed=seed)()[:, 1:-1]
        texts.append(torch.bincount(words[:, 0] * 8 + words[:, 1], minlength=64))
    table = torch.stack(texts)
    table = table[:, table.sum(dim=0) >= 10].numpy()
    assert table.shape[1] >= 8
    assert chi2_contingency(table).pvalue > 1e-4


def test_rivals_run_the_model_as_seldom_as_they_can(toy):
    """The textbook once for each state that it visits, LLaDA2Pipeline once for each of its steps."""
    for setting in (Setting("toy", 1, 8, 1000), Setting("toy", 2, 8, 1000), Setting("toy", 1, 8, 3)):
        textbook, llada2 = measure_setting(*toy, setting, ["textbook", "llada2"], repeats=1)
        states = setting.batch * setting.length + 1  # the finished one too, as MDLM's cache has it
        assert 1 < textbook["forwards"] <= min(setting.steps, states)
        assert llada2["forwards"] == min(setting.steps, setting.length)


def test_samplers_take_turns_and_the_median_counts(monkeypatch):
    turns, seconds = [], iter([5.0, 1.0, 2.0, 3.0, 9.0, 4.0])

    def timed(run, device, release=False):
        turns.append(run())
        return next(seconds), 0.0, None

    monkeypatch.setattr(benchmark, "timed", timed)
    measured = benchmark.measure({"a": lambda: "a", "b": lambda: "b"}, 3, "cpu", "label")
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert measured == {"a": (5.0, 0.0), "b": (2.0, 0.0)}


def test_presets_are_what_the_guide_says():
    quick, targets = benchmark.PRESETS["quick"], benchmark.PRESETS["targets"]
    assert targets[0] == Setting("minilm", 1, 64, 1000)
    assert quick == [targets[0], targets[2]]
    assert len(set(benchmark.PRESETS["full"])) == 2 * 2 * 2 * 3
    assert {(setting.length, setting.steps) for setting in benchmark.PRESETS["steps"]} == {
        (length, steps) for length in (64, 128) for steps in (64, 256, 1000)
    }
    growth = benchmark.PRESETS["growth"]
    assert {32, 512} <= {setting.length for setting in growth}
    assert {1, 64} <= {setting.batch for setting in growth}
    assert {8, 10_000} <= {setting.steps for setting in growth}


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
def test_precision_compares_formats_and_passes_over_what_does_not_work(tiny_settings, tmp_path, monkeypatch, capsys):
    import quickstart

    toy_pipeline = TextDiffusionPipeline(
        toy_model(max_position_embeddings=64), toy_tokenizer(), AbsorbingStateScheduler()
    )
    toy_pipeline.save_pretrained(tmp_path / "pipeline")
    monkeypatch.setattr(quickstart, "load_texts", lambda args: ([], ["a b c a"] * 400))
    original = benchmark.precision_variant

    def variant(model, name):
        if name == "compile":
            raise_error = {"forward": lambda *args, **kwargs: 1 / 0}
            model = original(model, "fp32")
            vars(model.bert).update(raise_error)
            return model
        return original(model, name)

    monkeypatch.setattr(benchmark, "precision_variant", variant)
    monkeypatch.setitem(benchmark.PRESETS, "precision", tiny_settings[:1])
    arguments = ["--preset", "precision", "--bound_model", f"{tmp_path}/pipeline", "--json", f"{tmp_path}/rows.json"]
    benchmark.main([*arguments, "--repeats", "1", "--threads", "1"])
    rows = {row["variant"]: row for row in json.loads((tmp_path / "rows.json").read_text())["precision"]}
    assert [*rows] == ["fp32", "bf16", "int8"]
    assert "compile" in capsys.readouterr().out
    assert rows["fp32"]["bound_change"] == 0
    assert 0 < abs(rows["bf16"]["bound_change"]) < 0.2


@pytest.mark.parametrize("steps", [3, 8, 1000])
def test_floor_replays_the_plan_of_ours(toy, steps):
    """Each position is revealed once, and for the same seed the encoder runs as often as it does for the pipeline."""
    setting = Setting("toy", 4, 8, steps)
    plan = benchmark.plan_events(setting, seed=0)
    rows = [rows for rows, _ in plan]
    assert rows[0] == 4
    assert rows == sorted(rows, reverse=True)
    assert len(plan) <= min(steps, 8)
    assert sum(len(positions) for _, positions in plan) == 4 * 8
    for rows, positions in plan:
        assert positions.unique().numel() == len(positions)
        assert (positions // 10).unique().tolist() == list(range(rows))
        assert set((positions % 10).tolist()) <= set(range(1, 9))  # neither [CLS] nor [SEP]
    measured = measure_setting(*toy, setting, ["ours", "floor"], repeats=1)
    assert measured[0]["forwards"] == measured[1]["forwards"] == len(plan)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_both_head_products_are_the_head(toy, n, monkeypatch):
    head = toy[0].get_output_embeddings()
    states = torch.randn(n, head.in_features, generator=torch.Generator().manual_seed(0))
    for faster in (1, -1):  # the first of the products, the second
        seconds = iter(range(0, faster * 100, faster))
        monkeypatch.setattr(benchmark, "timed", lambda *_, seconds=seconds: (next(seconds), 0.0, None))
        chosen = benchmark.fastest_head(toy[0], n)
        assert (chosen is head) == (faster == 1)
        torch.testing.assert_close(chosen(states), head(states))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's peak of memory is Linux's")
def test_peak_memory_is_that_of_the_run():
    def run():
        torch.ones(2**24)  # 64 MB, gone when it returns

    for _ in range(2):
        peak = benchmark.timed(run, "cpu", release=True)[1]
        assert 60 < peak < 80
    assert benchmark.timed(lambda: None, "cpu")[1] < 10


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_number_formats_change_predictions_a_little(toy, name):
    model, tokenizer = toy
    variant = benchmark.precision_variant(model, name)
    assert not (make_run("ours", variant, tokenizer, Setting("toy", 2, 4, 4))() == MASK).any()
    input_ids = torch.tensor([[2, 5, MASK, 6, 3]])
    with torch.no_grad():
        change = (variant(input_ids).logits.float().softmax(-1) - model(input_ids).logits.softmax(-1)).abs().max()
    assert change < 0.1
    assert (change > 0) == (name != "fp32")


def test_wrong_arguments_are_refused(capsys):
    for arguments in (["--preset", "nonsense"], ["--samplers", "fastest"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            benchmark.parse_args(arguments)
        assert arguments[0] in capsys.readouterr().err
