"""Training and validation data from files, folders and streams."""

import csv
import json
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from diffusers_text import load_splits

TEXTS = [f"text {i}, with a comma" for i in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    datasets.enable_progress_bars()


def write(path: Path, texts=TEXTS) -> str:
    """`texts` in a file of the kind that its ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts]
    if path.suffix == ".txt":
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            separator = "\t" if path.suffix == ".tsv" else ","
            csv.writer(file, delimiter=separator).writerows([["text"], *([text] for text in texts)])
    return str(path)


def texts_of(split):
    return [row["text"] for row in split]


@pytest.mark.parametrize("ending", ["txt", "json", "jsonl", "csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_texts(tmp_path, ending):
    files = {
        "train_file": write(tmp_path / f"a.{ending}"),
        "validation_file": write(tmp_path / f"b.{ending}", TEXTS[:3]),
    }
    train, validation = load_splits(**files)
    assert isinstance(train, Dataset)
    assert texts_of(train) == TEXTS
    assert texts_of(validation) == TEXTS[:3]
    train, validation = load_splits(**files, streaming=True)
    assert isinstance(train, IterableDataset)
    assert texts_of(train) == TEXTS
    assert texts_of(validation) == TEXTS[:3]


def test_several_columns_of_a_table_stay_apart(tmp_path):
    (tmp_path / "a.tsv").write_text("source\ttarget\n" + "one, two\tthree\n" * 20)
    train, _ = load_splits(train_file=str(tmp_path / "a.tsv"))
    assert train[0] == {"source": "one, two", "target": "three"}


def test_files_of_one_reader_but_different_separators_are_not_mixed_up(tmp_path):
    (tmp_path / "a.csv").write_text("source,target\n" + "one,two\n" * 20)
    (tmp_path / "b.tsv").write_text("source\ttarget\none\ttwo\n")
    try:
        train, validation = load_splits(train_file=str(tmp_path / "a.csv"), validation_file=str(tmp_path / "b.tsv"))
    except ValueError as error:
        assert "Files must be of one kind" in str(error)  # noqa: PT017
    else:
        assert train[0] == validation[0]


def test_several_files_and_patterns_are_joined_in_order(tmp_path):
    files = [write(tmp_path / f"{name}.txt", TEXTS[i : i + 10]) for i, name in ((0, "a"), (10, "b"), (20, "c"))]
    validation_file = write(tmp_path / "other" / "v.txt", ["held out"])
    for train_file in (files, str(tmp_path / "*.txt"), (files[0], str(tmp_path / "[bc].txt"))):
        train, validation = load_splits(train_file=train_file, validation_file=validation_file)
        assert texts_of(train) == TEXTS[:30]
        assert texts_of(validation) == ["held out"]


def test_a_path_is_as_good_as_its_name(tmp_path):
    write(tmp_path / "a.txt")
    assert len(load_splits(train_file=tmp_path / "a.txt")[0]) == 38


@pytest.mark.parametrize(("percentage", "held_out"), [(5, 2), (10, 4), (50, 20), (99, 39), (3, 1)])
def test_a_share_of_the_beginning_is_held_out(tmp_path, percentage, held_out):
    train, validation = load_splits(train_file=write(tmp_path / "a.txt"), validation_split_percentage=percentage)
    assert texts_of(validation) == TEXTS[:held_out]
    assert texts_of(train) == TEXTS[held_out:]


def test_a_line_is_a_text_whatever_else_breaks_lines(tmp_path):
    texts = ["page\x0cbreak", "next\u2028line", "", "last"] * 5
    train, validation = load_splits(train_file=write(tmp_path / "a.txt", texts))
    assert texts_of(validation) + texts_of(train) == texts


def test_the_first_thousand_rows_of_a_stream_are_held_out(tmp_path):
    texts = [f"text {i}" for i in range(1005)]
    train, validation = load_splits(train_file=write(tmp_path / "a.txt", texts), streaming=True)
    assert texts_of(validation) == texts[:1000]
    assert texts_of(train) == texts[1000:]


def test_no_worker_and_no_process_trains_on_what_a_stream_holds_out(tmp_path):
    """Each of them reads some of the files, and would skip as many rows of these if it skipped by number."""
    texts = [[f"text {i} of file {j}" for i in range(600)] for j in range(4)]
    files = [write(tmp_path / f"{j}.txt", part) for j, part in enumerate(texts)]
    train, validation = load_splits(train_file=files, streaming=True)
    expected = sorted(text for part in texts for text in part)
    assert texts_of(validation) == texts[0] + texts[1][:400]
    for parts in ([train], [train.shard(2, i) for i in range(2)], [DataLoader(train, None, num_workers=2)]):
        assert sorted(texts_of(validation) + [text for part in parts for text in texts_of(part)]) == expected


def test_a_stream_trains_on_no_copy_of_what_it_holds_out(tmp_path):
    texts = [f"text {i}" for i in range(1001)]
    train, _ = load_splits(train_file=write(tmp_path / "a.txt", texts * 2), streaming=True)
    assert texts_of(train) == [texts[1000]] * 2


def test_rows_of_a_stream_that_lack_a_column_are_held_out_as_well(tmp_path):
    rows = [{"text": f"text {i}"} | ({"note": "odd"} if i % 2 else {}) for i in range(1002)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, validation = load_splits(train_file=str(tmp_path / "a.jsonl"), streaming=True)
    assert texts_of(train) == ["text 1000", "text 1001"]
    assert texts_of(validation) == [f"text {i}" for i in range(1000)]


def test_a_stream_too_short_to_hold_anything_out_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="1000|1,000"):
        load_splits(train_file=write(tmp_path / "a.txt"), streaming=True)


def test_a_folder_is_read_as_a_dataset_of_the_hub(tmp_path):
    write(tmp_path / "data" / "train.jsonl")
    train, validation = load_splits(str(tmp_path / "data"))
    assert (len(train), len(validation)) == (38, 2)
    write(tmp_path / "data" / "validation.jsonl", TEXTS[:7])
    train, validation = load_splits(str(tmp_path / "data"))
    assert (len(train), len(validation)) == (40, 7)
    write(tmp_path / "other" / "test.jsonl")
    with pytest.raises(ValueError, match=r"has the splits \['test'\], and no 'train'"):
        load_splits(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "Pass one of `dataset_name` and `train_file`, got None and None"),
        ({"dataset_name": "x", "train_file": "a.txt"}, "Pass one of `dataset_name` and `train_file`"),
        ({"validation_file": "a.txt"}, "Pass one of"),
        ({"dataset_name": "x", "validation_file": "a.txt"}, "`validation_file`"),
        ({"train_file": []}, "`train_file`"),
        ({"train_file": "a.pdf"}, r"Files must be of one kind, of .*, got \['.pdf'\]"),
        ({"train_file": "folder"}, "Files must be of one kind"),
        ({"train_file": ["a.txt", "b.json"]}, "Files must be of one kind"),
        ({"train_file": "a.txt", "validation_file": "b.csv"}, "Files must be of one kind"),
        ({"train_file": "a.txt", "validation_split_percentage": 0}, "`validation_split_percentage` must lie between"),
        ({"train_file": "a.txt", "validation_split_percentage": 100}, "`validation_split_percentage` must lie"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        load_splits(**kwargs)


def test_a_share_of_no_row_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="`validation_split_percentage` 2 of 40 rows leaves none: raise it"):
        load_splits(train_file=write(tmp_path / "a.txt"), validation_split_percentage=2)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load_splits(train_file=str(tmp_path / "missing.txt"))
