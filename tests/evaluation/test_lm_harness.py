"""The model of lm-evaluation-harness: tasks from end to end without a network, and the laws of each request."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from toys import CLS, MASK, SEP, seeded, toy_model, toy_tokenizer
from writing import WORDS, passes_of, prediction

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline, score
from diffusers_text.evaluation.lm_harness import TextDiffusionLM

LIMIT = 32  # tokens that the model takes
IDS = {"a": 5, "b": 6, "c": 7}
NAMES = {token: word for word, token in IDS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved pipeline that never writes a terminator, so that what it writes has the length that was asked for."""
    folder = tmp_path_factory.mktemp("pipeline")
    model = toy_model(seed=5)
    model.get_output_embeddings().bias.data[SEP] -= 50
    TextDiffusionPipeline(model, toy_tokenizer(), AbsorbingStateScheduler()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def lm(folder):
    return TextDiffusionLM(folder)


def requests_of(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def log_likelihoods(lm, *pairs):
    return lm.loglikelihood(requests_of("loglikelihood", *pairs))


def written(lm, context, **settings):
    (text,) = lm.generate_until(requests_of("generate_until", (context, settings)))
    return text


def ids_of(text):
    return [IDS[word] for word in text.split()]


def most_certain_first(model, given, length):
    """`length` words behind the ids `given`: the most probable of all that are missing, one after another."""
    canvas = [*given, *[MASK] * length]
    while MASK in canvas:
        columns = [i for i, token in enumerate(canvas) if token == MASK]
        p = np.array([prediction(model, canvas, column, WORDS) for column in columns])
        i, token = np.unravel_index(p.argmax(), p.shape)
        canvas[columns[i]] = int(token)
    return " ".join(NAMES[token] for token in canvas[len(given) :])


# --- From end to end ---

CHOICES = [
    {"context": "a b", "choices": ["c", "a c", "b"], "answer": 0},
    {"context": "c", "choices": ["b b", "a"], "answer": 1},
    {"context": "b c a", "choices": ["a a", "b a", "c c"], "answer": 2},
    {"context": "b", "choices": ["c a", "c b", "b b"], "answer": 1},  # not what this model says
]
TEXTS = [{"text": "a b c"}, {"text": "c"}, {"text": "b a " * 20 + "c"}]
CONTEXTS = ["a", "c b", "b b b"]
STOP = {"until": [" b", "zebra"], "max_gen_toks": 6}


def cut_at(text, stop):
    place = text.find(stop)
    return text if place < 0 else text[:place]


@pytest.fixture(scope="module")
def evaluated(folder, tmp_path_factory):
    """What the harness says of three tasks of its own kinds, and the model that it was asked about."""
    where = tmp_path_factory.mktemp("tasks")
    model = TextDiffusionLM(folder).pipe.model
    answers = [cut_at(most_certain_first(model, [CLS, *ids_of(context)], 6), " b") for context in CONTEXTS]
    answers[1] += " wrong"
    tasks = {
        "toy_choice": (
            CHOICES,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{context}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "metric_list": [{"metric": "acc"}],
            },
        ),
        "toy_perplexity": (
            TEXTS,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
            },
        ),
        "toy_writing": (
            [{"context": context, "answer": answer} for context, answer in zip(CONTEXTS, answers)],
            {
                "output_type": "generate_until",
                "doc_to_text": "{{context}}",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": STOP,
                "metric_list": [{"metric": "exact_match"}],
            },
        ),
    }
    for name, (rows, settings) in tasks.items():
        lines = where / f"{name}.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"data_files": {"test": str(lines)}, "cache_dir": str(where / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **settings}
        (where / f"{name}.yaml").write_text(yaml.safe_dump(task))
    results = simple_evaluate(
        model="diffusers_text",
        model_args=f"pretrained={folder},num_draws=6,max_gen_toks=3",
        tasks=[*tasks],
        batch_size=4,
        device="cpu",
        task_manager=TaskManager(include_path=str(where), include_defaults=False),
        bootstrap_iters=0,
    )
    return results, TextDiffusionLM(folder).pipe


def test_the_harness_knows_the_model_by_its_name():
    assert get_model("diffusers_text") is TextDiffusionLM


def test_a_multiple_choice_task_is_answered_by_the_scores(evaluated):
    """The choice with the highest bound, where the context is given and a choice may go on."""
    results, pipe = evaluated
    right = []
    samples = {sample["doc_id"]: sample for sample in results["samples"]["toy_choice"]}
    for i, doc in enumerate(CHOICES):
        contexts = [doc["context"]] * len(doc["choices"])
        values = score(pipe, doc["choices"], contexts, num_draws=6, with_terminator=False).log_likelihoods
        found = [float(response[0]) for response in samples[i]["filtered_resps"]]
        assert found == pytest.approx(values, rel=1e-4)
        right.append(int(np.argmax(values)) == doc["answer"])
    assert 0 < sum(right) < len(right)
    assert results["results"]["toy_choice"]["acc,none"] == np.mean(right)


def test_a_perplexity_task_is_over_all_words_of_all_texts(evaluated):
    results, pipe = evaluated
    texts = [doc["text"] for doc in TEXTS]
    pieces = [text.split()[i : i + LIMIT - 1] for text in texts for i in range(0, len(text.split()), LIMIT - 1)]
    assert len(pieces) == 4
    found = score(pipe, [" ".join(piece) for piece in pieces], num_draws=6, with_terminator=False)
    total, words = sum(found.log_likelihoods), sum(len(text.split()) for text in texts)
    metrics = results["results"]["toy_perplexity"]
    assert metrics["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    letters = sum(map(len, texts))
    assert metrics["bits_per_byte,none"] == pytest.approx(-total / letters / math.log(2), rel=1e-4)


def test_a_generation_task_gets_the_text_up_to_the_stop_string(evaluated):
    results, pipe = evaluated
    samples = {sample["doc_id"]: sample for sample in results["samples"]["toy_writing"]}
    for i, context in enumerate(CONTEXTS):
        expected = cut_at(most_certain_first(pipe.model, [CLS, *ids_of(context)], 6), " b")
        assert samples[i]["filtered_resps"] == [expected]
    assert results["results"]["toy_writing"]["exact_match,none"] == pytest.approx(2 / 3)  # one answer is wrong


# --- Log-likelihoods ---


@pytest.mark.parametrize("method", ["bound", "pseudo"])
def test_log_likelihoods_are_the_scores_of_texts_behind_their_contexts(folder, method):
    lm = TextDiffusionLM(folder, method=method, num_draws=4, batch_size="3")
    contexts, texts = ["a", "", "c b a", "b"], ["b c", "a", "c", "b a c a"]
    # Continuations come with the space before them.
    found = log_likelihoods(lm, *[(context, " " + text) for context, text in zip(contexts, texts)])
    expected = score(lm.pipe, texts, contexts, method=method, num_draws=4, with_terminator=False)
    assert [value for value, _ in found] == pytest.approx(expected.log_likelihoods, rel=1e-4)
    assert all(type(greedy) is bool for _, greedy in found)


@pytest.mark.parametrize("context", ["", "a", "c b", "b b a"])
def test_one_continuation_of_each_length_is_greedy(lm, context):
    """That which the pipeline writes in its place, by a loop that asks for the most certain word."""
    for length in (1, 3):
        texts = [" ".join(words) for words in itertools.product("abc", repeat=length)]
        found = log_likelihoods(lm, *[(context, " " + text) for text in texts])
        greedy = [text for text, (_, is_greedy) in zip(texts, found) if is_greedy]
        assert greedy == [most_certain_first(lm.pipe.model, [CLS, *ids_of(context)], length)]


def test_the_order_of_writing_decides_which_continuation_is_greedy(lm):
    """Where writing from left to right gives other words, these are not greedy."""
    contexts = [" ".join(words) for n in (1, 2, 3) for words in itertools.product("abc", repeat=n)]

    def from_the_left(given, length):
        canvas = [*given, *[MASK] * length]
        for column in range(len(given), len(canvas)):
            canvas[column] = int(prediction(lm.pipe.model, canvas, column, WORDS).argmax())
        return " ".join(NAMES[token] for token in canvas[len(given) :])

    differing = []
    for context in contexts:
        given = [CLS, *ids_of(context)]
        certain, left = most_certain_first(lm.pipe.model, given, 4), from_the_left(given, 4)
        if certain != left:
            differing += [(context, " " + certain), (context, " " + left)]
    assert len(differing) > 4
    assert [greedy for _, greedy in log_likelihoods(lm, *differing)] == [True, False] * (len(differing) // 2)


def test_a_continuation_with_a_token_that_is_never_written_is_not_greedy(lm):
    greedy = most_certain_first(lm.pipe.model, [CLS, IDS["a"]], 2)
    for text in ("zebra", f"{greedy} [SEP]"):
        ((value, is_greedy),) = log_likelihoods(lm, ("a", f" {text}"))
        assert not is_greedy
        assert math.isfinite(value)


def test_a_context_that_is_too_long_loses_its_beginning_and_no_more_than_it_must(lm):
    words = (["a", "b", "c", "c", "b"] * 20)[:60]
    context, text = " ".join(words), "c a b"
    kept = " ".join(words[-(LIMIT - 1 - 3) :])
    seen = passes_of(lm.pipe.model)
    long, short = log_likelihoods(lm, (context, " " + text), (kept, " " + text))
    assert long == pytest.approx(short)
    # All of the model is used, and the row begins as every text does.
    assert all(len(row) == LIMIT and row[0] == CLS for rows in seen for row in rows)
    expected = score(lm.pipe, [text], [kept], with_terminator=False).log_likelihoods[0]
    assert long[0] == pytest.approx(expected, rel=1e-5)
    greedy = most_certain_first(lm.pipe.model, [CLS, *ids_of(kept)], 3)
    ((_, is_greedy),) = log_likelihoods(lm, (context, " " + greedy))
    assert is_greedy


def test_a_continuation_is_never_cut(lm):
    whole = " a" * (LIMIT - 1)
    with_context, without = log_likelihoods(lm, ("b c", whole), ("", whole))
    assert with_context == pytest.approx(without)
    with pytest.raises(ValueError, match=f"Text 0 has {LIMIT + 1} tokens, the model takes at most {LIMIT}"):
        log_likelihoods(lm, ("b c", whole + " a"))


# --- Rolling ---


def test_texts_longer_than_the_model_takes_are_sums_over_rows(folder):
    lm = TextDiffusionLM(folder, num_draws=4, batch_size=2)
    words = np.random.default_rng(0).choice([*IDS], 80).tolist()
    lengths = [1, LIMIT - 2, LIMIT - 1, LIMIT, 2 * (LIMIT - 1), 70]
    texts = [" ".join(words[:length]) for length in lengths]
    found = lm.loglikelihood_rolling(requests_of("loglikelihood_rolling", *[(text,) for text in texts]))
    for length, value in zip(lengths, found):
        rows = [" ".join(words[i : min(i + LIMIT - 1, length)]) for i in range(0, length, LIMIT - 1)]
        scores = score(lm.pipe, rows, num_draws=4, with_terminator=False)
        assert sum(scores.tokens) == length
        assert value == pytest.approx(sum(scores.log_likelihoods), rel=1e-4)


def test_a_text_without_words_costs_nothing(lm):
    found = lm.loglikelihood_rolling(requests_of("loglikelihood_rolling", ("",), ("a b",), ("",)))
    assert found[0] == found[2] == 0
    assert found[1] < 0


# --- Generation ---


@pytest.mark.parametrize("context", ["", "a", "c b a"])
def test_texts_are_written_the_most_certain_token_first(lm, context):
    expected = most_certain_first(lm.pipe.model, [CLS, *ids_of(context)], 7)
    assert written(lm, context, max_gen_toks=7) == expected
    # Also where a temperature is given, unless sampling is asked for.
    for settings in ({"do_sample": False, "temperature": 2.0}, {"do_sample": True, "temperature": 0.0}):
        assert written(lm, context, max_gen_toks=7, **settings) == expected


def test_texts_end_before_the_first_of_the_stop_strings(lm):
    full = written(lm, "c b a", until=[], max_gen_toks=10)
    assert len(full.split()) == 10
    assert len(set(full.split())) > 1
    inner = [full[i : i + n] for n in (1, 4) for i in range(len(full) - n)]
    for stop in {*inner, "zebra", full, full + " "}:
        expected = cut_at(full, stop)
        assert written(lm, "c b a", until=[stop], max_gen_toks=10) == expected
        assert written(lm, "c b a", until=stop, max_gen_toks=10) == expected
    # Of several the one that comes first, in whatever order they are named.
    letters = sorted(set(full) - {" "}, key=full.find)
    for stops in itertools.permutations([*letters, "zebra", ""]):
        assert written(lm, "c b a", until=[*stops], max_gen_toks=10) == ""
    later = sorted({f" {word}" for word in letters}, key=full.find)
    for stops in itertools.permutations(later):
        assert written(lm, "c b a", until=[*stops], max_gen_toks=10) == full[: full.find(later[0])]
    for nothing in (["zebra", ""], "", None):
        assert written(lm, "c b a", until=nothing, max_gen_toks=10) == full


def test_the_length_of_texts_is_the_task_s_or_else_the_model_s(folder):
    lm = TextDiffusionLM(folder, max_gen_toks=5)
    assert len(written(lm, "a").split()) == 5
    assert len(written(lm, "a", max_gen_toks=9).split()) == 9
    assert len(written(TextDiffusionLM(folder, max_gen_toks=12), "a").split()) == 12


def test_sampled_texts_are_those_of_the_pipeline_with_the_model_s_seed(folder):
    """One generator for all: texts of the same context differ, and the seed says which they are."""
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 2, "max_gen_toks": 8}
    requests = requests_of("generate_until", *[("a b", settings)] * 4)
    found = TextDiffusionLM(folder, seed=3).generate_until(requests)
    pipe, generator = TextDiffusionLM(folder).pipe, seeded(3)
    ids = torch.tensor([[CLS, *ids_of("a b")]])
    kwargs = {"gen_length": 8, "temperature": 1.5, "top_k": 2, "generator": generator}
    expected = [pipe(input_ids=ids, **kwargs).texts[0].removeprefix("a b ") for _ in range(4)]
    assert found == expected
    assert len(set(found)) == 4
    assert TextDiffusionLM(folder, seed=4).generate_until(requests) != found
    assert TextDiffusionLM(folder, seed=3).generate_until(requests) == found


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.2), ("top_k", 1), ("top_p", 0.3)])
def test_each_setting_of_sampling_reaches_the_pipeline(folder, name, value):
    sampled = [
        TextDiffusionLM(folder).generate_until(requests_of("generate_until", *[("a b", settings)] * 4))
        for settings in ({"do_sample": True, "max_gen_toks": 8}, {"do_sample": True, "max_gen_toks": 8, name: value})
    ]
    pipe, generator = TextDiffusionLM(folder).pipe, seeded(0)
    kwargs = {"input_ids": torch.tensor([[CLS, *ids_of("a b")]]), "gen_length": 8, "generator": generator}
    assert sampled[1] == [pipe(**kwargs, **{name: value}).texts[0].removeprefix("a b ") for _ in range(4)]
    assert sampled[1] != sampled[0]


def test_a_context_that_is_too_long_to_go_on_loses_its_beginning(lm):
    words = (["a", "b", "c", "c", "b"] * 20)[:60]
    seen = passes_of(lm.pipe.model)
    text = written(lm, " ".join(words), max_gen_toks=10)
    rows = [row for rows in seen for row in rows]
    assert len(text.split()) == 10
    given = [CLS, *ids_of(" ".join(words[-(LIMIT - 1 - 10) :]))]
    assert all(row[: len(given)] == given for row in rows)
    assert text == most_certain_first(lm.pipe.model, given, 10)


def test_a_text_longer_than_the_model_takes_is_an_error(lm):
    with pytest.raises(ValueError, match=f"the model takes at most {LIMIT}"):
        written(lm, "a", max_gen_toks=LIMIT)


@pytest.mark.parametrize("batch_size", [1, "2", "auto"])
def test_any_batch_size_of_the_harness_gives_the_same(folder, batch_size):
    pairs = [("a", " b c"), ("", " a"), ("c b a", " c")]
    expected = log_likelihoods(TextDiffusionLM(folder, num_draws=4), *pairs)
    found = log_likelihoods(TextDiffusionLM(folder, num_draws=4, batch_size=batch_size), *pairs)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
