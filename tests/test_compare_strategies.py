"""The metrics of the comparison on texts made by hand, and the whole comparison on a toy."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from toys import COUNTS, SEP, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "utils"))
from compare_strategies import (
    CompareArguments,
    bound_of_texts,
    compare,
    draw_plot,
    generate,
    make_strategies,
    markdown_table,
    repetition,
    spread,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Toys are too small for two, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pipe(tmp_path):
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS)
    TextDiffusionPipeline(toy_model(), toy_tokenizer(), scheduler).save_pretrained(tmp_path / "saved")
    pipe = TextDiffusionPipeline.from_pretrained(tmp_path / "saved")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_repetition():
    assert repetition([list(range(10))]) == 0
    assert repetition([[7] * 10]) == pytest.approx(9 / 10)
    assert repetition([[1, 2, 3, 4] * 3]) == pytest.approx(8 / 12)
    assert repetition([[1, 2, 3, 4, 5] * 3]) == 0  # five back is too far
    assert repetition([[1], [1]]) == 0


def test_the_bound_of_a_denoiser_that_knows_nothing_is_the_logarithm_of_its_vocabulary(pipe):
    with torch.no_grad():
        for parameter in pipe.model.parameters():
            parameter.zero_()
    linear = AbsorbingStateScheduler.from_config(pipe.scheduler.config, schedule="linear")
    draw = random.Random(0)
    texts = [[draw.choice([SEP, 5, 6, 7]) for _ in range(12)] for _ in range(32)]
    value, error = bound_of_texts(pipe, linear, texts, 12, 64, seed=0)
    expected = math.log(pipe.model.config.vocab_size - 1)  # all but the mask token
    assert abs(value - expected) < 4 * error < 0.2 * expected


def test_the_bound_takes_padding_for_no_text(pipe):
    texts = [[5, 6, 7, 6, SEP]] * 32
    value, error = bound_of_texts(pipe, pipe.scheduler, texts, 5, 32, seed=0)
    padded, padded_error = bound_of_texts(pipe, pipe.scheduler, texts, 9, 32, seed=1)
    assert abs(value - padded) < 4 * math.hypot(error, padded_error) < 0.2 * value
    with torch.no_grad():  # [CLS] and five tokens are seen, padding is not
        pipe.model.bert.embeddings.position_embeddings.weight[6:] += 5 * torch.randn(16)
    assert bound_of_texts(pipe, pipe.scheduler, texts, 9, 32, seed=1)[0] == pytest.approx(padded)


def test_strategies_have_different_names(pipe):
    strategies = make_strategies(pipe.scheduler.config)
    assert len({(s.family, s.name, s.setting) for s in strategies}) == len(strategies) == 15


def test_generated_texts_have_full_length_but_in_blocks_and_passes_are_counted(pipe):
    args = CompareArguments(num_texts=3, gen_length=12)
    by_name = {(s.family, s.name): s for s in make_strategies(pipe.scheduler.config)}
    for key, strategy in by_name.items():
        texts, cost = generate(pipe, strategy, 4 if len(strategy.steps) > 1 else None, args)
        assert 1 <= cost["forward_passes"] <= 12
        if strategy.block_length is None:
            assert [len(text) for text in texts] == [12] * 3, key
    for key in (("confidence", "probability"), ("ancestral", "linear")):
        assert generate(pipe, by_name[key], None, args)[1]["forward_passes"] == 12
    texts, cost = generate(pipe, by_name["confidence", "blocks of 16"]._replace(block_length=4), 6, args)
    blocks = [math.ceil(len(text) / 4) for text in texts]
    assert cost["forward_passes"] == pytest.approx(2 * sum(blocks) / 3)  # two steps for each of three blocks
    for text in texts:
        assert len(text) == 12 or text[-1] == SEP
        assert SEP not in text[:-1]


def test_labels_keep_their_order_and_distance():
    placed = spread([0.5, 0.1, 0.5, 0.95], 0.2, 1.0)
    assert max(placed) <= 1.0
    in_order = sorted(placed)
    assert all(b - a >= 0.2 - 1e-9 for a, b in zip(in_order, in_order[1:]))
    assert in_order.index(placed[1]) == 0
    assert in_order.index(placed[3]) == 3


def test_the_comparison_is_complete(pipe, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i:02}.txt").write_text("a b c a b.\n" + "c b a a. " * 20)
    json_file, plot_file = tmp_path / "results.json", tmp_path / "plot.png"
    args = CompareArguments(
        dataset_name=str(tmp_path / "texts"), num_texts=2, gen_length=8, bound_draws=2, json=str(json_file)
    )
    own = pipe.scheduler
    results = compare(pipe, args)
    assert pipe.scheduler is own
    assert json.loads(json_file.read_text()) == results
    assert not Path(f"{json_file}.tmp").exists()
    rows = results["rows"]
    assert len(rows) == 7 * 6 + 4 + 4 * 6
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert {row["steps"] for row in rows if row["family"] == "ReMDM"} == {4, 8, 16, 32, 64, 128}
    assert results["real_text"]["tokens"] == 8
    again = compare(pipe, args)
    for row, other in zip(rows, again["rows"], strict=True):  # same seed, same texts
        assert {**row, "seconds": 0} == {**other, "seconds": 0}
    assert len(markdown_table(results).splitlines()) == 3 + len(rows)
    assert len({line.count("|") for line in markdown_table(results).splitlines()}) == 1
    draw_plot(str(plot_file), results)
    assert plot_file.stat().st_size > 10_000
