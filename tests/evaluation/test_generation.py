"""Texts for an evaluation: the same in any batches, for sources and from nothing, and kept as they come."""

import pytest
from toys import COUNTS, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline
from diffusers_text.evaluation.generation import generate_texts, text_generator

SOURCES = ["a b", "c c a b a", "b", "a b"]


@pytest.fixture(scope="module")
def pipe():
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS, gen_length=5)
    pipe = TextDiffusionPipeline(toy_model(type_vocab_size=2), toy_tokenizer(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_texts_of_a_source_stand_side_by_side_and_have_a_generator_each(pipe):
    expected = [
        pipe(source=source, generator=text_generator(3, 2 * number + text)).texts[0]
        for number, source in enumerate(SOURCES)
        for text in range(2)
    ]
    assert len(set(expected)) > 4
    for batch_size in (1, 3, 16):
        assert generate_texts(pipe, 2, sources=SOURCES, seed=3, batch_size=batch_size) == expected


def test_a_source_conditions(pipe):
    assert generate_texts(pipe, 8, sources=["a b"]) != generate_texts(pipe, 8, sources=["c c a b a"])


def test_texts_from_nothing_have_a_generator_each(pipe):
    expected = [pipe(generator=text_generator(0, number)).texts[0] for number in range(5)]
    for batch_size in (1, 2, 5):
        assert generate_texts(pipe, 5, batch_size=batch_size) == expected


def test_finished_texts_of_other_sources_are_an_error(pipe, tmp_path):
    resume = str(tmp_path / "texts")
    first = generate_texts(pipe, 1, sources=SOURCES, resume_file=resume)
    assert generate_texts(pipe, 1, sources=SOURCES, resume_file=resume) == first
    with pytest.raises(ValueError, match="other `sources`"):
        generate_texts(pipe, 1, sources=SOURCES[1:], resume_file=resume)
    with pytest.raises(ValueError, match="other `sources`"):
        generate_texts(pipe, 2, sources=SOURCES, resume_file=resume)


def test_what_is_finished_is_not_written_again(pipe, tmp_path, monkeypatch):
    resume = str(tmp_path / "texts")
    texts = generate_texts(pipe, 3, sources=SOURCES[:2], resume_file=resume, batch_size=2)
    (part,) = tmp_path.glob("texts.part-*")
    lines = part.read_bytes().split(b"\n")
    part.write_bytes(b"\n".join(lines[:4]) + b'\n{"number": 5, "te')  # the header, three texts and a torn one
    written = []
    call = TextDiffusionPipeline.__call__
    monkeypatch.setattr(
        TextDiffusionPipeline, "__call__", lambda *args, **kwargs: written.append(kwargs) or call(*args, **kwargs)
    )
    assert generate_texts(pipe, 3, sources=SOURCES[:2], resume_file=resume, batch_size=2) == texts
    assert sum(len(kwargs["source"]) for kwargs in written) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_texts": 0}, "`num_texts` must be an integer >= 1, got 0"),
        ({"num_texts": 1, "batch_size": 0}, "`batch_size` must be an integer >= 1, got 0"),
        ({"num_texts": 1, "sources": []}, "`sources` is empty"),
        ({"num_texts": 1, "sources": ["a", None]}, "`source` must be a string or a list of strings"),
        ({"num_texts": 1, "sources": ["a " * 40]}, "40|tokens"),
    ],
)
def test_wrong_input_is_named(pipe, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_texts(pipe, **arguments)
