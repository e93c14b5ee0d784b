"""Rows for training out of texts, pairs and completions: nothing is lost, and what is left out is said."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import RobertaProcessing
from toys import CLS, SEP, toy_model, toy_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diffusers_text import (
    AbsorbingStateScheduler,
    TextDiffusionPipeline,
    load_splits,
    prepare_completions,
    prepare_pairs,
    prepare_texts,
    token_settings,
)

WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)
TEXTS = st.lists(st.one_of(WORDS.map(" ".join), st.sampled_from(["", "  ", None])), min_size=1, max_size=30)
LOGGER = "diffusers_text.data.preparation"


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def tokenizer():
    return toy_tokenizer()


def roberta_tokenizer():
    """`<s> source </s></s> target </s>`, and no token types."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "c"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    names = ("bos", "pad", "eos", "unk", "mask")
    specials = {f"{name}_token": word for name, word in zip(names, vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **specials,
        cls_token="<s>",
        sep_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
    )


def bare_tokenizer():
    """A tokenizer without start and terminator."""
    backend = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, "a": 3, "b": 4, "c": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokens = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def bert_tokenizer():
    tokenizer = toy_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def rows_of(dataset):
    """Rows as plain numbers and lists: those of a stream are arrays."""
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in dataset]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


# --- Packing ---


def joined(rows, start):
    """The rows' tokens without the start of each."""
    assert all(start is None or row["input_ids"][0] == start for row in rows)
    return [token for row in rows for token in row["input_ids"][start is not None :]]


def assert_nothing_is_lost(rows, texts, tokenizer, max_length):
    start, terminator = tokenizer.cls_token_id, tokenizer.sep_token_id
    end = [] if terminator is None else [terminator]
    texts = [text for text in texts if text is not None and text.strip()]
    expected = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"] + end]
    assert joined(rows, start) == expected
    assert all(row["length"] == len(row["input_ids"]) <= max_length for row in rows)


@pytest.mark.parametrize("make", [toy_tokenizer, roberta_tokenizer, bare_tokenizer])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=TEXTS, max_length=st.integers(3, 12))
def test_packing_loses_no_token_and_ends_every_text(make, texts, max_length):
    tokenizer = make()
    texts = [*texts, " ".join("a" * max_length)]  # enough for one row
    for dataset in (Dataset.from_dict({"text": texts}), Dataset.from_dict({"text": texts}).to_iterable_dataset()):
        rows = rows_of(prepare_texts(dataset, tokenizer, max_length))
        assert_nothing_is_lost(rows, texts, tokenizer, max_length)
        assert all(row["length"] == max_length for row in rows[:-1])  # only the last may be shorter


@pytest.mark.parametrize("num_proc", [None, 2])
def test_packing_many_texts_in_several_processes_loses_no_token(tokenizer, num_proc):
    texts = [" ".join("abc"[i % 3] * (1 + i % 5)) for i in range(2503)]
    rows = rows_of(prepare_texts(Dataset.from_dict({"text": texts}), tokenizer, 16, num_proc=num_proc))
    assert_nothing_is_lost(rows, texts, tokenizer, 16)
    short = sum(row["length"] < 16 for row in rows)
    assert short <= (3 if num_proc is None else 4)  # one for each 1,000 texts of a process


def test_a_corpus_shorter_than_a_row_is_an_error_and_not_no_rows(tokenizer):
    for texts in (["a b"], ["a", "b"], ["a", ""]):
        for dataset in (Dataset.from_dict({"text": texts}), Dataset.from_dict({"text": texts}).to_iterable_dataset()):
            with pytest.raises(ValueError, match=r"too few for one row of `max_length` 6"):
                prepare_texts(dataset, tokenizer, 6)
    assert len(prepare_texts(Dataset.from_dict({"text": ["a b", "a"]}), tokenizer, 6)) == 1


def test_short_rows_of_several_processes_are_not_too_few(tokenizer):
    dataset = Dataset.from_dict({"text": ["a b", "a b"]})
    for num_proc in (None, 2):
        rows = rows_of(prepare_texts(dataset, tokenizer, 7, num_proc=num_proc))
        assert_nothing_is_lost(rows, dataset["text"], tokenizer, 7)


@pytest.mark.parametrize("texts", [[], [""], [None, "  "]])
@pytest.mark.parametrize("packing", [True, False])
def test_a_corpus_without_text_is_an_error(tokenizer, texts, packing):
    dataset = Dataset.from_dict({"text": texts}, features=datasets.Features({"text": datasets.Value("string")}))
    with pytest.raises(ValueError, match="No row of|has no rows|too few for one row"):
        prepare_texts(dataset, tokenizer, 6, packing=packing)
    if packing and texts:
        with pytest.raises(ValueError, match="too few for one row"):
            prepare_texts(dataset.to_iterable_dataset(), tokenizer, 6)


# --- A text a row ---


def test_without_packing_each_text_is_a_row_of_its_own(tokenizer):
    texts = ["a b c", "", "b", "a a a a a", "c c"]
    rows = rows_of(prepare_texts(Dataset.from_dict({"text": texts}), tokenizer, 5, packing=False))
    assert rows == [
        {"input_ids": [CLS, 5, 6, 7, SEP], "length": 5},
        {"input_ids": [CLS, 6, SEP], "length": 3},
        {"input_ids": [CLS, 7, 7, SEP], "length": 4},
    ]


PREPARED = [
    (prepare_texts, {"text": ["a b", "c", "b b b"]}, {}),
    (prepare_texts, {"text": ["a b", "c", "b b b"]}, {"packing": False}),
    (prepare_pairs, {"source": ["a b", "c"], "target": ["c", "c a"]}, {}),
    (prepare_completions, {"prompt": ["a b", "c"], "completion": ["c", "c a"]}, {}),
]


@pytest.mark.parametrize(("prepare", "columns", "kwargs"), PREPARED)
@pytest.mark.parametrize("make", [bert_tokenizer, roberta_tokenizer])
def test_a_stream_has_the_rows_of_a_dataset_in_memory(prepare, columns, kwargs, make):
    # More than one batch of 1,000, with something left out in each.
    columns = {name: (texts * 600)[:1100] for name, texts in columns.items()}
    for texts in columns.values():
        texts[7] = texts[1050] = None
    dataset = Dataset.from_dict({**columns, "other": [*range(len(texts))]})
    expected = rows_of(prepare(dataset, make(), 8, **kwargs))
    stream = prepare(dataset.to_iterable_dataset(), make(), 8, **kwargs)
    assert isinstance(stream, IterableDataset)
    assert rows_of(stream) == expected
    assert stream.column_names == [*expected[0]]

    def generate():
        yield from dataset

    unnamed = IterableDataset.from_generator(generate)  # does not know its columns
    assert unnamed.column_names is None
    assert rows_of(prepare(unnamed, make(), 8, **kwargs)) == expected


def test_columns_may_have_the_names_that_rows_have(tokenizer):
    for name in ("texts", "length", "input_ids"):
        dataset = Dataset.from_dict({name: ["a b", "c"], "label": [1, 0]})
        for rows in (dataset, dataset.to_iterable_dataset()):
            prepared = rows_of(prepare_texts(rows, tokenizer, 4, column=name, packing=False))
            assert prepared == [
                {"input_ids": [CLS, 5, 6, SEP], "length": 4},
                {"input_ids": [CLS, 7, SEP], "length": 3},
            ]


# --- Pairs and completions ---


def test_pairs_have_bert_s_token_types_and_the_length_of_what_is_given():
    dataset = Dataset.from_dict({"source": ["a b", "c", "a a a a"], "target": ["c", "a", "b b"]})
    assert rows_of(prepare_pairs(dataset, bert_tokenizer(), 6)) == [
        {
            "input_ids": [CLS, 5, 6, SEP, 7, SEP],
            "token_type_ids": [0, 0, 0, 0, 1, 1],
            "prompt_length": 4,
            "length": 6,
        },
        {"input_ids": [CLS, 7, SEP, 5, SEP], "token_type_ids": [0, 0, 0, 1, 1], "prompt_length": 3, "length": 5},
    ]


def test_pairs_of_a_tokenizer_without_token_types_have_none():
    dataset = Dataset.from_dict({"question": ["a b"], "answer": ["c"]})
    rows = prepare_pairs(dataset, roberta_tokenizer(), 8, source_column="question", target_column="answer")
    assert rows_of(rows) == [{"input_ids": [0, 5, 6, 2, 2, 7, 2], "prompt_length": 5, "length": 7}]


@pytest.mark.parametrize("make", [toy_tokenizer, roberta_tokenizer])
def test_a_completion_is_where_the_pipeline_writes_it(make):
    tokenizer = make()
    scheduler = AbsorbingStateScheduler(**token_settings(tokenizer))
    pipe = TextDiffusionPipeline(toy_model(), tokenizer, scheduler)
    prompt, completion = "a b", "c a c"
    row = prepare_completions(Dataset.from_dict({"prompt": [prompt], "completion": [completion]}), tokenizer, 16)[0]
    length = row["prompt_length"]
    pipe.set_progress_bar_config(disable=True)
    sequence = pipe(prompt, gen_length=row["length"] - length - 1, num_inference_steps=4).sequences[0].tolist()
    assert sequence[:length] == row["input_ids"][:length]
    assert len(sequence) == row["length"]
    assert sequence[-1] == row["input_ids"][-1] == tokenizer.sep_token_id
    words = tokenizer(completion, add_special_tokens=False)["input_ids"]
    assert row["input_ids"][length:-1] == words


# --- What is left out ---


@pytest.mark.parametrize("packing", [True, False])
def test_rows_left_out_are_counted_also_where_a_whole_batch_is_empty(tokenizer, caplog, packing):
    texts = [""] * 1000 + ["a b c"] * 1000 + [None, " "]
    rows = prepare_texts(Dataset.from_dict({"text": texts}), tokenizer, 8, packing=packing)
    assert len(rows) == (572 if packing else 1000)
    assert warnings_of(caplog) == [
        "Left out 1002 of 2002 rows: without text, or longer than the `max_length` of 8 tokens."
    ]


def test_rows_that_are_too_long_are_counted(tokenizer, caplog):
    dataset = Dataset.from_dict({"text": ["a b c"] * 3 + ["a"]})
    assert len(prepare_texts(dataset, tokenizer, 4, packing=False)) == 1
    pairs = Dataset.from_dict({"source": ["a a", "a", "", "b"], "target": ["b", "b", "c", None]})
    assert len(prepare_pairs(pairs, tokenizer, 5)) == 1
    completions = Dataset.from_dict({"prompt": ["a a", "a", "", "b"], "completion": ["b", "b", "c", None]})
    assert len(prepare_completions(completions, tokenizer, 4)) == 1
    assert [message.split(" rows")[0] for message in warnings_of(caplog)] == ["Left out 3 of 4"] * 3


def test_nothing_left_out_is_nothing_said(tokenizer, caplog):
    prepare_texts(Dataset.from_dict({"text": ["a b c"]}), tokenizer, 4)
    rows_of(prepare_texts(Dataset.from_dict({"text": ["a b c"]}).to_iterable_dataset(), tokenizer, 4))
    assert warnings_of(caplog) == []


def test_a_stream_says_what_it_leaves_out_at_1_10_and_100(tokenizer, caplog):
    texts = ["a", ""] * 1500
    stream = prepare_texts(Dataset.from_dict({"text": texts}).to_iterable_dataset(), tokenizer, 4, packing=False)
    assert len(rows_of(stream)) == 1500
    assert [message.split(":")[0] for message in warnings_of(caplog)] == [
        "Left out 500 of 1000 rows",
        "Left out 1000 of 2000 rows",
    ]


def test_a_stream_counts_no_row_twice_before_it_is_read(tokenizer, caplog):
    stream = prepare_texts(Dataset.from_dict({"text": ["a b", *[""] * 9]}).to_iterable_dataset(), tokenizer, 4)
    assert len(rows_of(stream)) == 1
    assert [message.split(":")[0] for message in warnings_of(caplog)] == ["Left out 9 of 10 rows"]


# --- Wrong input ---


@pytest.mark.parametrize("stream", [False, True])
def test_missing_columns_are_named(tokenizer, stream):
    dataset = Dataset.from_dict({"prose": ["a b c"], "target": ["b"], "completion": ["c"]})
    dataset = dataset.to_iterable_dataset() if stream else dataset
    for prepare, column in ((prepare_texts, "text"), (prepare_pairs, "source"), (prepare_completions, "prompt")):
        with pytest.raises(ValueError, match=rf"no column '{column}', it has \['completion', 'prose', 'target'\]"):
            prepare(dataset, tokenizer, 8)


@pytest.mark.parametrize("max_length", [2, 0, 8.0, True])
def test_a_wrong_length_is_named(tokenizer, max_length):
    dataset = Dataset.from_dict({"text": ["a b c"]})
    with pytest.raises(ValueError, match="`max_length` must be an integer >= 3"):
        prepare_texts(dataset, tokenizer, max_length)


@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_row_that_is_no_text_is_named_by_its_number(tokenizer, num_proc):
    rows = [["a"]] * 3
    dataset = Dataset.from_dict({"source": ["a"] * 3, "target": [None, None, rows]})
    with pytest.raises(ValueError, match=r"Column 'target' holds no text in row 2, but \[\["):
        prepare_pairs(dataset, tokenizer, 8, num_proc=num_proc)
    dataset = Dataset.from_dict({"text": [1, 2]})
    with pytest.raises(ValueError, match=r"Column 'text' holds no text in row 0, but 1\."):
        prepare_texts(dataset, tokenizer, 8)
    stream = IterableDataset.from_generator(lambda: ({"text": "a b" if i < 1001 else 0.5} for i in range(1003)))
    with pytest.raises(ValueError, match=r"row 1001, but 0\.5"):
        rows_of(prepare_texts(stream, tokenizer, 8))


# --- Caching ---

PREPARE = """
def prepare(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
    train, validation = load_splits(train_file=folder + "/texts.txt", validation_split_percentage=20)
    prepared = prepare_texts(train, tokenizer, 8), prepare_texts(validation, tokenizer, 8, packing=False)
    return [entry["filename"] for rows in prepared for entry in rows.cache_files]
"""
FRESH = f"""
import sys
from transformers import AutoTokenizer
from diffusers_text import load_splits, prepare_texts
{PREPARE}
print(prepare(sys.argv[1]))
"""


def test_a_second_process_finds_the_rows_of_the_first(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path(tmp_path, "texts.txt").write_text("a b c\nb b\n" * 20)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    names = {"AutoTokenizer": AutoTokenizer, "load_splits": load_splits, "prepare_texts": prepare_texts}
    exec(PREPARE, names)
    made = [(path, Path(path).stat().st_mtime_ns) for path in names["prepare"](str(tmp_path))]
    # The order of sets is another one there.
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", FRESH, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = ast.literal_eval(result.stdout.splitlines()[-1])
    assert len(made) == 2
    assert [(path, Path(path).stat().st_mtime_ns) for path in found] == made


def test_a_second_call_does_not_tokenize_again_and_other_arguments_do(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path(tmp_path, "texts.txt").write_text("a b c\nb b\n" * 20)
    train, _ = load_splits(train_file=str(tmp_path / "texts.txt"))

    def made(*args, **kwargs):
        """How many files of rows a call adds to the cache."""
        before = set(tmp_path.rglob("cache-*.arrow"))
        prepare_texts(train, *args, **kwargs)
        return len(set(tmp_path.rglob("cache-*.arrow")) - before)

    assert made(tokenizer, 8) == 1
    assert made(tokenizer, 8) == 0
    assert made(toy_tokenizer(), 8) == 0
    assert made(tokenizer, 9) == 1
    assert made(tokenizer, 8, packing=False) == 1
    assert made(toy_tokenizer(words=["b", "a", "c"]), 8) == 1


def test_what_is_left_out_is_said_again_where_rows_come_from_the_cache(tokenizer, tmp_path, caplog):
    dataset = Dataset.from_dict({"text": ["a b c", ""]})
    dataset.save_to_disk(tmp_path / "data")
    for _ in range(2):
        prepare_texts(datasets.load_from_disk(tmp_path / "data"), tokenizer, 4)
    assert len(warnings_of(caplog)) == 2
