"""The trainer's figures against independent computations, and what it promises about weights, data and files."""

import copy
import dataclasses
import gc
import importlib.util
import itertools
import math
import typing
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from exact_bounds import SHORT, SHORT_COUNTS, exact_bound
from peft import LoraConfig, PeftModel, get_peft_model
from toys import CLS, COUNTS, MASK, SEP, g_of, toy_model, toy_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    HfArgumentParser,
    ModernBertConfig,
    RobertaConfig,
    TrainerCallback,
)

from diffusers_text import (
    AbsorbingStateScheduler,
    DataCollatorForTextDiffusion,
    TextDiffusionPipeline,
    TextDiffusionTrainer,
    TextDiffusionTrainingArguments,
    likelihood_bound,
    token_settings,
)
from diffusers_text.noising import draw_noise, keyed_generator
from diffusers_text.training.callbacks import PlotLog

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_text_diffusion.py"
TEXTS = [" ".join("abc"[(i * j) % 3] for j in range(1 + i % 7)) for i in range(22)]  # of 1 to 7 words
PAIRS = {"source": ["a b", "c", "b b b"] * 4, "target": ["c", "a a", "b"] * 4}
FIGURES = {
    "bound",
    "bound_bits",
    "masked_cross_entropy",
    "masked_accuracy",
    "end_of_text_share",
    *(f"bound_time_{a}_to_{b}" for a, b in itertools.pairwise(["0", "0.2", "0.4", "0.6", "0.8", "1"])),
}

ERRORS = {"bound_standard_error", "loss"}  # of an evaluation alone


@pytest.fixture(scope="module", autouse=True)
def imported_objects_are_not_collected():
    """At the end of each training the Trainer collects garbage, which among all of torch takes half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def arguments(folder, **kwargs):
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "eval_samples": 0,
        "packing": False,
        "max_length": 16,
        "objective": "continuous",
        "learning_rate": 1e-2,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
    }
    return TextDiffusionTrainingArguments(str(folder), **{**defaults, **kwargs})


def trainer_of(folder, train=TEXTS, evaluation=None, model=None, tokenizer=None, scheduler=None, plot=False, **kwargs):
    def dataset(data):
        return Dataset.from_dict({"text": data}) if isinstance(data, list) else data

    trainer = TextDiffusionTrainer(
        toy_model() if model is None else model,
        arguments(folder, **kwargs),
        processing_class=toy_tokenizer() if tokenizer is None else tokenizer,
        train_dataset=dataset(train),
        eval_dataset=dataset(evaluation),
        scheduler=scheduler,
    )
    if not plot:  # takes longer than the rest
        trainer.remove_callback(PlotLog)
    return trainer


def figures_of(trainer, dataset=None):
    """The figures of an evaluation, without their prefix."""
    metrics = trainer.evaluate(dataset)
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}


def raw_bound(trainer):
    """The bound with the weights as they are."""
    average, trainer.ema = trainer.ema, None
    bound = trainer.evaluate()["eval_bound"]
    trainer.ema = average
    return bound


def ids_dataset(rows):
    return Dataset.from_dict({"input_ids": rows})


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **tolerance, msg=name)


class Watcher(TrainerCallback):
    """Keeps the trained weights after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})


# --- Loss ---


def watch_losses(trainer):
    """(step, nats, maskable tokens) of each batch, from what goes in and out of `compute_loss`."""
    seen, compute_loss = [], trainer.compute_loss

    def watched(model, inputs, num_items_in_batch=None, **kwargs):
        loss = compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)
        tokens = int((inputs["labels"] != -100).sum())
        seen.append((trainer.state.global_step, loss.item() * int(num_items_in_batch), tokens))
        return loss

    trainer.compute_loss = watched
    return seen


@pytest.mark.parametrize("objective", ["continuous", "discrete", "mlm"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_logged_loss_is_that_of_all_tokens_since_the_last_log(tmp_path, objective, accumulation):
    trainer = trainer_of(
        tmp_path,
        objective=objective,
        gradient_accumulation_steps=accumulation,
        max_steps=7,
        logging_strategy="steps",
        logging_steps=3,
        logging_first_step=True,
    )
    seen = watch_losses(trainer)
    output = trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert [*logged] == [1, 3, 6]
    for start, end in ((0, 1), (1, 3), (3, 6)):
        batches = [(nats, tokens) for step, nats, tokens in seen if start <= step < end]
        assert len(batches) > end - start or accumulation == 1
        nats, tokens = map(sum, zip(*batches))
        assert logged[end]["loss"] == pytest.approx(nats / tokens, rel=1e-5)
        assert logged[end].keys() >= FIGURES - {name for name in FIGURES if "time" in name} | {"tokens_per_second"}
    whole = sum(nats for _, nats, _ in seen) / sum(tokens for _, _, tokens in seen)
    assert output.training_loss == pytest.approx(whole, rel=1e-5)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(whole, rel=1e-5)
    assert len({tokens for _, _, tokens in seen}) > 2  # a mean of batches would be another number


def test_the_bound_is_the_loss_of_the_continuous_objective_and_not_that_of_the_others(tmp_path):
    for objective in ("continuous", "discrete", "mlm"):
        trainer = trainer_of(
            tmp_path, objective=objective, mask_sampling="independent", logging_strategy="steps", logging_steps=2
        )
        trainer.train()
        entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
        assert (entry["loss"] == pytest.approx(entry["bound"])) == (objective == "continuous")
        assert entry["bound_bits"] == pytest.approx(entry["bound"] / math.log(2))


@pytest.mark.parametrize("schedule", ["linear", "spindle"])
def test_the_objectives_differ_by_what_their_papers_say(tmp_path, schedule):
    """The hybrid adds 0.01 cross-entropies to one step's divergence, of which the bound has T; mlm has no weights."""
    tokenizer, losses = toy_tokenizer(), {}
    inputs = DataCollatorForTextDiffusion(tokenizer)([{"input_ids": ids} for ids in tokenizer(TEXTS)["input_ids"]])
    for objective, weight in (("discrete", 0.0), ("discrete", 0.01), ("mlm", 0.01)):
        trainer = trainer_of(
            tmp_path, objective=objective, schedule=schedule, cross_entropy_weight=weight, num_diffusion_steps=20
        )
        scheduler, maskable = trainer.pipeline.scheduler, inputs["labels"] != -100
        times, generators = torch.arange(1, 23).clamp(max=20) / 20, [keyed_generator(row) for row in range(22)]
        noise = draw_noise(scheduler, inputs["input_ids"], maskable, times, generators, by_count=False)
        _, terms = trainer.masked_loss(trainer.model.eval(), inputs, noise)
        losses[objective, weight] = trainer.objective(terms, noise)
    with torch.no_grad():
        model_inputs = {"input_ids": noise.noisy, "attention_mask": inputs["attention_mask"]}
        logits = trainer.model(**model_inputs).logits.double().flatten(0, 1)[noise.positions]
    logits[:, MASK] = -torch.inf
    targets = noise.sample.flatten()[noise.positions][:, None]
    log_pi = logits.log_softmax(-1).gather(1, targets)[:, 0]
    times = times[noise.positions // noise.sample.shape[1]].tolist()
    counts = {"counts": scheduler.config.token_counts} if schedule == "spindle" else {}
    tilts = torch.tensor(np.array([g_of(schedule, t, **counts) for t in times])).log()
    log_p = (logits + tilts).log_softmax(-1).gather(1, targets)[:, 0]
    torch.testing.assert_close(losses["mlm", 0.01].double(), -log_pi, rtol=1e-4, atol=1e-4)
    added = losses["discrete", 0.01] - losses["discrete", 0.0]
    torch.testing.assert_close(added.double(), -0.01 * 20 * log_p, rtol=1e-3, atol=1e-3)


def test_no_row_of_an_epoch_loses_its_labels(tmp_path):
    """Each row counts whole, also in a last batch that is short."""
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=1)
    batches, compute_loss = [], trainer.compute_loss

    def watched(model, inputs, **kwargs):
        batches.append(inputs)
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = watched
    trainer.train()
    assert sum(len(batch["labels"]) for batch in batches) == 22
    for batch in batches:
        words = batch["input_ids"] >= SEP  # [SEP], a, b and c
        assert torch.equal(batch["labels"] != -100, words)


def test_lengths_in_groups_keep_every_row_and_pad_less(tmp_path):
    padding = {}
    for strategy in ("random", "group_by_length"):
        trainer = trainer_of(tmp_path, TEXTS * 8, max_steps=-1, num_train_epochs=1, train_sampling_strategy=strategy)
        batches = [*trainer.get_train_dataloader()]
        ids = [tuple(i for i in row if i) for batch in batches for row in batch["input_ids"].tolist()]
        assert sorted(ids) == sorted(map(tuple, trainer.train_dataset["input_ids"][:]))
        padding[strategy] = sum(int((batch["input_ids"] == 0).sum()) for batch in batches)
    assert padding["group_by_length"] < padding["random"] / 2


def test_a_batch_with_nothing_to_generate_harms_nothing(tmp_path):
    rows = {"input_ids": [[CLS, 5, SEP], [CLS, 6, SEP]], "prompt_length": [3, 1]}
    trainer = trainer_of(tmp_path, Dataset.from_dict(rows), per_device_train_batch_size=1)
    trainer.train()
    assert all(weights.isfinite().all() for weights in weights_of(trainer.model).values())
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


# --- Evaluation ---


@pytest.mark.parametrize("conditioning", ["none", "layerwise", "prefix"])
@pytest.mark.parametrize("objective", ["continuous", "discrete"])
def test_figures_depend_on_neither_batches_nor_the_order_of_rows(tmp_path, conditioning, objective):
    model = toy_model(time_conditioning=conditioning).double()
    kwargs = {"model": model, "objective": objective, "num_diffusion_steps": 20}
    results = []
    for texts, size in ((TEXTS, 8), (TEXTS, 1), (TEXTS[::-1], 8), (TEXTS[1::2] + TEXTS[::2], 5)):
        trainer = trainer_of(tmp_path, evaluation=texts, per_device_eval_batch_size=size, **kwargs)
        dataloader = trainer.get_eval_dataloader()
        assert any("attention_mask" in batch for batch in dataloader) == (size > 1)
        results.append({name: value for name, value in figures_of(trainer).items() if name in FIGURES | ERRORS})
    assert results[0].keys() >= {"bound", "bound_standard_error", "masked_accuracy"}
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-9, abs=1e-12)


def test_an_evaluation_has_all_figures_and_its_loss_is_the_bound(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=TEXTS, objective="mlm", eval_draws=8)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics.keys() >= {f"eval_{name}" for name in FIGURES | ERRORS}
    assert metrics["eval_loss"] == metrics["eval_bound"]
    assert metrics["eval_bound_bits"] == pytest.approx(metrics["eval_bound"] / math.log(2))
    assert 0 <= metrics["eval_masked_accuracy"] <= 1
    assert trainer.evaluate()["eval_bound"] == metrics["eval_bound"]
    with_prefix = trainer.evaluate(metric_key_prefix="held_out")
    assert with_prefix["held_out_bound"] == metrics["eval_bound"]


def test_a_model_can_be_evaluated_before_it_is_trained(tmp_path):
    metrics = trainer_of(tmp_path, evaluation=TEXTS, eval_samples=1).evaluate()
    assert metrics["eval_bound"] > 0


def assert_evaluates_to_the_exact_bound(folder, conditioning, schedule, objective, draws):
    model = toy_model(time_conditioning=conditioning).double()
    steps = 7 if objective == "discrete" else None
    trainer = trainer_of(
        folder,
        ids_dataset(SHORT),
        model=model,
        schedule=schedule,
        objective=objective,
        num_diffusion_steps=7,
        eval_draws=draws,
    )
    found = figures_of(trainer, trainer.train_dataset)
    exact = exact_bound(model, trainer.pipeline.scheduler, steps)
    error = found["bound_standard_error"]
    assert abs(found["bound"] - exact) < 4 * error
    assert error < exact / math.sqrt(draws)
    if schedule == "spindle":
        assert trainer.pipeline.scheduler.config.token_counts == SHORT_COUNTS


@pytest.mark.parametrize("objective", ["continuous", "discrete", "mlm"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
@pytest.mark.parametrize("conditioning", ["none", "layerwise", "prefix"])
def test_an_evaluation_s_bound_is_the_exact_one(tmp_path, conditioning, schedule, objective):
    assert_evaluates_to_the_exact_bound(tmp_path, conditioning, schedule, objective, draws=150)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["continuous", "discrete", "mlm"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "spindle"])
@pytest.mark.parametrize("conditioning", ["none", "layerwise", "prefix"])
def test_an_evaluation_s_bound_is_the_exact_one_to_a_percent(tmp_path, conditioning, schedule, objective):
    assert_evaluates_to_the_exact_bound(tmp_path, conditioning, schedule, objective, draws=1500)


@pytest.mark.parametrize(
    ("schedule", "objective"), [("linear", "continuous"), ("cosine", "continuous"), ("cosine", "discrete")]
)
def test_the_bound_by_time_has_the_bound_as_its_mean(tmp_path, schedule, objective):
    trainer = trainer_of(
        tmp_path, ids_dataset(SHORT), schedule=schedule, objective=objective, num_diffusion_steps=20, eval_draws=600
    )
    found = figures_of(trainer, trainer.train_dataset)
    by_time = [value for name, value in found.items() if "bound_time" in name]
    assert len(by_time) == 5
    assert np.mean(by_time) == pytest.approx(found["bound"], rel=0.05)


# --- Logits in chunks ---

SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MODELS = {
    **{f"own-{kind}": lambda kind=kind: toy_model(time_conditioning=kind) for kind in ("none", "layerwise", "prefix")},
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES, type_vocab_size=2),
    "distilbert": DistilBertConfig(
        vocab_size=8, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=32
    ),
    "electra": ElectraConfig(**SIZES, embedding_size=8),
    "modernbert": ModernBertConfig(
        **SIZES, cls_token_id=CLS, sep_token_id=SEP, bos_token_id=CLS, eos_token_id=SEP, attention_dropout=0.0
    ),
}


def model_named(name):
    torch.manual_seed(0)
    made = MODELS[name]
    model = made() if callable(made) else AutoModelForMaskedLM.from_config(made)
    return model.double().eval()


@pytest.mark.parametrize("schedule", ["linear", "spindle"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_chunks_change_neither_loss_nor_gradients(tmp_path, name, schedule):
    tokenizer, model = toy_tokenizer(), model_named(name)
    inputs = DataCollatorForTextDiffusion(tokenizer)([{"input_ids": ids} for ids in tokenizer(TEXTS[:6])["input_ids"]])
    if name in ("own-none", "bert"):
        inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    results = []
    for chunk_size in (None, 1, 5, 1000):
        trainer = trainer_of(tmp_path, model=model, tokenizer=tokenizer, schedule=schedule, head_chunk_size=chunk_size)
        generators = [keyed_generator(row) for row in range(6)]
        noise = draw_noise(
            trainer.pipeline.scheduler,
            inputs["input_ids"],
            inputs["labels"] != -100,
            torch.linspace(0.1, 1, 6),
            generators,
            by_count=schedule == "linear",
        )
        assert 10 < len(noise.positions) < 30
        loss, terms = trainer.masked_loss(model, inputs, noise)
        assert loss.item() == pytest.approx(trainer.objective(terms, noise).sum().item())
        model.zero_grad()
        loss.backward()
        gradients = {n: torch.zeros(()) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        results.append((terms, gradients))
    (terms, gradients), *others = results
    assert sum(gradient.abs().sum() for gradient in gradients.values()) > 1
    for other_terms, other_gradients in others:
        for found, expected in zip(other_terms, terms):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert_same_weights(other_gradients, gradients, rtol=1e-6, atol=1e-9)


def test_evaluation_in_chunks_takes_no_gradients(tmp_path, monkeypatch):
    expected = trainer_of(tmp_path).evaluate(ids_dataset([[CLS, 5, 6, SEP]] * 4))["eval_bound"]
    trainer = trainer_of(tmp_path, head_chunk_size=3)
    monkeypatch.setattr(torch.autograd, "grad", None)
    assert trainer.evaluate(ids_dataset([[CLS, 5, 6, SEP]] * 4))["eval_bound"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_in_chunks_goes_the_same_way(tmp_path, chunk_size, checkpointing):
    def losses(**kwargs):
        trainer = trainer_of(tmp_path, model=toy_model(), **kwargs)
        seen = watch_losses(trainer)
        trainer.train()
        return [nats for _, nats, _ in seen]

    found = losses(head_chunk_size=chunk_size, gradient_checkpointing=checkpointing)
    assert found == pytest.approx(losses(), rel=1e-4)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["own-layerwise", "bert", "modernbert"])
def test_a_batch_in_which_nothing_is_masked_has_no_loss(tmp_path, name, chunk_size):
    model = model_named(name)
    trainer = trainer_of(
        tmp_path, ids_dataset([[CLS, 5, SEP]] * 8), model=model, head_chunk_size=chunk_size, objective="mlm"
    )
    before = weights_of(model)
    nothing = torch.zeros(1, dtype=torch.long)
    inputs = {"input_ids": torch.tensor([[CLS, 5, SEP]]), "labels": torch.full((1, 3), -100), "rows_of_step": nothing}
    noise = draw_noise(
        trainer.pipeline.scheduler, inputs["input_ids"], inputs["labels"] != -100, torch.ones(1), None, False
    )
    loss, _ = trainer.masked_loss(model, inputs, noise)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert_same_weights(weights_of(model), before)


# --- Moving average ---


@pytest.mark.parametrize("decay", [0.25, 0.9999])
def test_the_moving_average_follows_its_rule_and_is_what_counts(tmp_path, decay):
    trainer = trainer_of(tmp_path, evaluation=TEXTS, ema_decay=decay, max_steps=6)
    watcher = Watcher()
    trainer.add_callback(watcher)
    trainer.train()
    average = watcher.weights[0]  # the first step has no past
    for step, weights in enumerate(watcher.weights[1:], start=1):
        rate = min(decay, (1 + step) / (10 + step))
        average = {name: rate * average[name] + (1 - rate) * weights[name] for name in weights}
    shadow = dict(zip(average, trainer.ema.shadow_params, strict=True))
    assert_same_weights(shadow, average, rtol=1e-5, atol=1e-7)
    last = watcher.weights[-1]
    assert any(not torch.allclose(average[name], last[name]) for name in last)

    bound = trainer.evaluate()["eval_bound"]
    assert_same_weights(weights_of(trainer.model), last, rtol=0, atol=0)  # training could go on
    trainer.save_model()
    assert_same_weights(weights_of(trainer.model), last, rtol=0, atol=0)
    saved = TextDiffusionPipeline.from_pretrained(tmp_path).model
    assert_same_weights(weights_of(saved), average, rtol=1e-5, atol=1e-7)
    again = trainer_of(tmp_path / "again", model=saved, evaluation=TEXTS)
    assert raw_bound(again) == pytest.approx(bound, rel=1e-5)
    assert raw_bound(trainer) != pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_the_figure_is_that_of_likelihood_bound_also_where_rows_repeat(packing, tmp_path):
    texts = ["a b c", "a", "c c b", "a b c", "a", "a"] * 3
    trainer = trainer_of(tmp_path, evaluation=texts, packing=packing, max_length=8, per_device_eval_batch_size=4)
    found = figures_of(trainer)
    bound = likelihood_bound(trainer.pipeline, texts, packing=packing, max_length=8, num_draws=4)
    assert found["bound"] == pytest.approx(bound.nats_per_token, rel=1e-5)
    assert found["bound_standard_error"] == pytest.approx(bound.standard_error, rel=1e-4)
    again = figures_of(trainer, Dataset.from_dict({"text": texts if packing else texts[::-1]}))
    assert again["bound"] == pytest.approx(found["bound"], rel=1e-5)


def test_texts_can_be_predicted_as_they_can_be_evaluated(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=TEXTS)
    metrics = trainer.predict(Dataset.from_dict({"text": TEXTS})).metrics
    assert metrics["test_bound"] == trainer.evaluate()["eval_bound"]


def test_a_prediction_is_by_the_average_as_an_evaluation_is(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=TEXTS)
    trainer.train()
    assert trainer.predict(trainer.eval_dataset).metrics["test_bound"] == trainer.evaluate()["eval_bound"]


def test_without_an_average_the_last_weights_count(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=TEXTS, ema_decay=0)
    trainer.train()
    assert trainer.ema is None
    assert trainer.evaluate()["eval_bound"] == raw_bound(trainer)
    trainer.save_model()
    saved = TextDiffusionPipeline.from_pretrained(tmp_path).model
    assert_same_weights(weights_of(saved), weights_of(trainer.model), rtol=0, atol=0)


# --- Adapters ---


def with_adapter(model):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"]))


def having_mask():
    return toy_tokenizer(), toy_model()


def lacking_mask():
    """A tokenizer that has to be given a mask token, and a model to fit."""
    tokenizer, model = toy_tokenizer(mask_token=None), toy_model()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    return tokenizer, model


@pytest.mark.parametrize("make", [having_mask, lacking_mask])
def test_an_adapter_resumes_loads_alone_and_is_merged_into_the_pipeline(tmp_path, make):
    kwargs = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.1}
    tokenizer, base = make()
    whole = trainer_of(tmp_path, model=with_adapter(copy.deepcopy(base)), tokenizer=tokenizer, **kwargs)
    whole.train()
    assert not list(Path(tmp_path, "checkpoint-2").glob("model*"))  # the adapter alone
    whole.save_model()
    resumed = trainer_of(tmp_path, model=with_adapter(copy.deepcopy(base)), tokenizer=tokenizer, **kwargs)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model), rtol=1e-5, atol=1e-7)
    for found, expected in zip(resumed.ema.shadow_params, whole.ema.shadow_params, strict=True):
        torch.testing.assert_close(found, expected)

    pipe = TextDiffusionPipeline.from_pretrained(tmp_path)
    alone = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    ids = torch.tensor([[CLS, 5, pipe.tokenizer.mask_token_id, 7, SEP]])
    with torch.no_grad(), whole.ema_weights():
        expected = whole.model.eval()(ids).logits
        torch.testing.assert_close(pipe.model.eval()(ids).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base.eval()(ids).logits, expected, atol=1e-2)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe("a b", gen_length=3).texts[0], str)


# --- Checkpoints ---


@pytest.mark.parametrize("adapter", [False, True])
def test_the_best_model_is_taken_up_at_the_end(tmp_path, adapter):
    model = with_adapter(toy_model()) if adapter else toy_model()
    trainer = trainer_of(
        tmp_path,
        ["a a a a"] * 8,  # nothing of use for what is evaluated
        ["c b c", "b b"],
        model=model,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=8,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    bounds = {entry["step"]: entry["eval_bound"] for entry in trainer.state.log_history if "eval_bound" in entry}
    best = min(bounds, key=bounds.get)
    assert best < 8
    checkpoint = tmp_path / f"checkpoint-{best}"
    assert Path(trainer.state.best_model_checkpoint) == checkpoint
    assert checkpoint.is_dir()
    assert trainer.evaluate()["eval_bound"] == pytest.approx(bounds[best])
    trainer.save_model()
    saved = TextDiffusionPipeline.from_pretrained(tmp_path).model
    again = trainer_of(tmp_path / "again", model=saved, evaluation=["c b c", "b b"])
    assert raw_bound(again) == pytest.approx(bounds[best], rel=1e-5)


# --- Data ---


def test_several_evaluation_datasets_are_told_apart(tmp_path):
    evaluation = {"short": Dataset.from_dict({"text": TEXTS[:3]}), "pairs": Dataset.from_dict(PAIRS)}
    trainer = trainer_of(tmp_path, evaluation=evaluation, eval_samples=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    metrics = trainer.evaluate()
    short = trainer_of(tmp_path / "short", model=trainer.model, evaluation=TEXTS[:3])
    with trainer.ema_weights():
        assert metrics["eval_short_bound"] == pytest.approx(raw_bound(short))
    assert metrics["eval_pairs_bound"] != metrics["eval_short_bound"]
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_short_bound" in entry]
    assert steps == [2, 4, 4]
    assert sorted(path.name for path in Path(tmp_path, "samples").iterdir()) == ["step-2.txt", "step-4.txt"]


def stream_of(texts):
    return Dataset.from_dict({"text": texts}).to_iterable_dataset()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("schedule", ["linear", "spindle"])
def test_a_stream_trains_as_a_dataset_in_memory_does(tmp_path, packing, schedule):
    """A stream begins anew within a batch: its passes are those of a dataset of whole batches."""
    texts, results = TEXTS[:20], []
    for make in (stream_of, lambda texts: Dataset.from_dict({"text": texts})):
        trainer = trainer_of(
            tmp_path,
            make(texts),
            make(TEXTS[:5]),
            toy_model(
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            ),  # each pass draws from its randomness
            per_device_train_batch_size=1 if packing else 4,
            packing=packing,
            schedule=schedule,
            max_steps=14,  # more than an epoch
            train_sampling_strategy="sequential",
            ema_decay=0,
        )
        seen = watch_losses(trainer)
        trainer.train()
        assert trainer.state.global_step == 14
        results.append(([nats for _, nats, _ in seen], trainer.evaluate()["eval_bound"]))
        if schedule == "spindle":
            tokens = sum(text.split().count("a") for text in texts)
            assert trainer.pipeline.scheduler.config.token_counts[5] == tokens
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


def test_a_stream_needs_a_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        trainer_of(tmp_path, stream_of(TEXTS), max_steps=-1)


def watch_inputs(trainer):
    """Clean and noisy ids, and where a prompt ends, of every call of the model."""
    seen, masked_loss = [], trainer.masked_loss

    def watched(model, inputs, noise):
        seen.append((noise.sample.clone(), noise.noisy.clone(), inputs))
        return masked_loss(model, inputs, noise)

    trainer.masked_loss = watched
    return seen


@pytest.mark.parametrize("columns", [("source", "target"), ("prompt", "completion"), ("question", "answer")])
@pytest.mark.parametrize("sampling", ["count", "independent"])
def test_what_is_given_is_never_noised(tmp_path, columns, sampling):
    dataset = Dataset.from_dict(dict(zip(columns, PAIRS.values())))
    names = {"source_column": "question", "target_column": "answer"} if columns[0] == "question" else {}
    trainer = trainer_of(tmp_path, dataset, dataset, mask_sampling=sampling, **names)
    seen = watch_inputs(trainer)
    trainer.train()
    trainer.evaluate()
    given = {tuple(row["input_ids"]): row["prompt_length"] for row in trainer.train_dataset}
    masked = 0
    for sample, noisy, _ in seen:
        for row, noisy_row in zip(sample.tolist(), noisy.tolist()):
            start = given[tuple(i for i in row if i)]
            assert start > 1
            assert noisy_row[:start] == row[:start]
            masked += noisy_row.count(MASK)
    assert masked > 50


def test_the_spindle_counts_what_is_generated(tmp_path):
    trainer = trainer_of(tmp_path, Dataset.from_dict(PAIRS), schedule="spindle")
    assert trainer.pipeline.scheduler.config.token_counts == [0, 0, 0, 12, 0, 8, 4, 4]


def test_pairs_stay_pairs_where_unused_columns_are_removed(tmp_path):
    try:
        trainer = trainer_of(tmp_path, Dataset.from_dict(PAIRS), remove_unused_columns=True)
    except ValueError as error:
        assert "remove_unused_columns" in str(error)  # noqa: PT017
        return
    seen = watch_inputs(trainer)
    trainer.train()
    assert all((noisy[:, 1] != MASK).all() for _, noisy, _ in seen)


def test_token_types_reach_the_model(tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    trainer = trainer_of(tmp_path, Dataset.from_dict(PAIRS), tokenizer=tokenizer)
    types = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: types.append(kwargs["token_type_ids"]), with_kwargs=True
    )
    trainer.train()
    assert any(batch.any() for batch in types)


def test_columns_that_no_argument_names_are_listed(tmp_path):
    for dataset in (Dataset.from_dict({"prose": ["a"], "label": [1]}), stream_of(TEXTS).rename_column("text", "x")):
        with pytest.raises(ValueError, match=r"has the columns \[.*name its texts with `text_column` \(now 'text'\)"):
            trainer_of(tmp_path, dataset)
    assert len(trainer_of(tmp_path, Dataset.from_dict({"prose": TEXTS}), text_column="prose").train_dataset) == 22


def test_rows_that_the_user_tokenized_stay_as_they_are(tmp_path):
    rows = ids_dataset([[CLS, 5, SEP], [CLS, 6, 7, SEP]])
    assert trainer_of(tmp_path, rows).train_dataset is rows


# --- Files ---


def test_texts_and_a_picture_of_the_loss_are_written(tmp_path):
    trainer = trainer_of(
        tmp_path,
        evaluation=TEXTS,
        eval_samples=3,
        eval_strategy="steps",
        eval_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        plot=True,
    )
    trainer.train()
    assert sorted(path.name for path in Path(tmp_path, "samples").iterdir()) == ["step-2.txt", "step-4.txt"]
    texts = Path(tmp_path, "samples", "step-4.txt").read_text().splitlines()
    assert texts == trainer.samples
    assert len(texts) == 3
    assert Path(tmp_path, "loss.png").read_bytes().startswith(b"\x89PNG")
    trainer.save_model()
    pipe = TextDiffusionPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    assert pipe(num_texts_per_prompt=3, generator=generators).texts == texts  # by the averaged weights, as saved


def test_the_model_card_tells_data_schedule_arguments_figures_and_texts(tmp_path):
    trainer = trainer_of(
        tmp_path,
        evaluation=TEXTS,
        eval_samples=2,
        schedule="spindle",
        spindle_lambda=0.5,
        corpus_name="my corpus",
        plot=True,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.create_model_card(dataset="someone/texts", license="mit")
    card = Path(tmp_path, "README.md").read_text()
    for part in (
        "someone/texts",
        "license: mit",
        "my corpus",
        "spindle (lambda 0.5, surprisal, corpus mean)",
        "| learning_rate | 0.01 |",
        "| objective | continuous |",
        "| mask_sampling | independent |",
        "4 steps",
        "moving average, decay 0.9999",
        f"{metrics['eval_bound']:.3f}",
        f"{metrics['eval_bound_standard_error']:.3f}",
        f"{metrics['eval_masked_accuracy']:.1%}",
        "![loss](loss.png)",
        *(f"- {text}" for text in trainer.samples),
    ):
        assert part in card


def test_the_model_card_has_the_figures_of_each_of_several_datasets(tmp_path):
    evaluation = {name: Dataset.from_dict({"text": texts}) for name, texts in (("short", TEXTS[:3]), ("all", TEXTS))}
    trainer = trainer_of(tmp_path, evaluation=evaluation)
    metrics = trainer.evaluate()
    trainer.create_model_card()
    card = Path(tmp_path, "README.md").read_text()
    for name in evaluation:
        assert f"{metrics[f'eval_{name}_bound']:.3f}" in card


def test_the_model_card_names_the_data_also_where_no_frequencies_were_counted(tmp_path):
    trainer = trainer_of(tmp_path, corpus_name="my corpus")
    trainer.create_model_card()
    card = Path(tmp_path, "README.md").read_text()
    data = card.split("## Training data")[1].split("## Training")[0]
    assert "my corpus" in data
    assert "Not stated" not in data
    assert "frequencies" not in data


def test_the_model_card_of_an_adapter_names_the_model_inside(tmp_path):
    trainer = trainer_of(tmp_path, model=with_adapter(toy_model()))
    trainer.create_model_card()
    assert "| denoiser | `DiffusionBertForMaskedDiffusion` |" in Path(tmp_path, "README.md").read_text()


# --- Arguments ---


def example_module():
    spec = importlib.util.spec_from_file_location("train_text_diffusion", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flags_of(kind):
    """The names of the boolean options of a dataclass."""
    hints = typing.get_type_hints(kind)
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and bool in (hints[field.name], *typing.get_args(hints[field.name]))
    ]


def own_flags():
    """Those of the example's dataclasses, and what the library adds to TrainingArguments or sets otherwise."""
    module = example_module()
    own = [name for name in flags_of(TextDiffusionTrainingArguments) if name in vars(TextDiffusionTrainingArguments)]
    own = [n for n in own if n in TextDiffusionTrainingArguments.__annotations__]
    return [*own, *flags_of(module.ModelArguments), *flags_of(module.DataArguments)]


def parse(*options):
    module = example_module()
    parser = HfArgumentParser((module.ModelArguments, module.DataArguments, TextDiffusionTrainingArguments))
    needed = ["--model_name_or_path", "x", "--output_dir", "y", "--use_cpu", "True"]
    parts = parser.parse_args_into_dataclasses([*needed, *options])
    return {name: value for part in parts for name, value in vars(part).items()}


def test_false_on_the_command_line_is_false():
    flags = own_flags()
    assert {"packing", "from_scratch", "use_peft", "streaming"} <= set(flags)
    parsed = parse(*(word for name in flags for word in (f"--{name}", "False")))
    assert {name: parsed[name] for name in flags} == dict.fromkeys(flags, False)
    changeable = [name for name in flags if name != "remove_unused_columns"]  # which may be refused
    parsed = parse(*(word for name in changeable for word in (f"--{name}", "True")))
    assert {name: parsed[name] for name in changeable} == dict.fromkeys(changeable, True)


def test_false_is_false_for_every_flag_of_transformers_as_well():
    unswitchable = {"average_tokens_across_devices", "eval_do_concat_batches", "use_cpu"}
    for name in flags_of(TextDiffusionTrainingArguments):
        if name not in unswitchable and not name.startswith(("fsdp", "deepspeed")):
            value = parse(f"--{name}", "False")[name]
            assert value in (False, "False", "no", []), name


def test_the_example_takes_as_many_rows_as_there_are():
    take = example_module().take
    for dataset in (Dataset.from_dict({"text": TEXTS}), stream_of(TEXTS)):
        for number, expected in ((None, 22), (5, 5), (22, 22), (1000, 22)):
            assert len([*take(dataset, number)]) == expected


def test_every_option_has_help_and_its_choices_are_checked(capsys):
    for field in dataclasses.fields(TextDiffusionTrainingArguments):
        assert field.metadata.get("help") or field.name not in TextDiffusionTrainingArguments.__annotations__
    for option in ("--schedule", "--objective", "--mask_sampling", "--time_conditioning", "--spindle_mean"):
        with pytest.raises(SystemExit):
            parse(option, "other")
    assert "invalid choice: 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"schedule": "quadratic"}, "`schedule` must be one of .* got 'quadratic'"),
        ({"objective": "elbo"}, "`objective` must be one of"),
        ({"time_power": 0.5}, r"`time_power` must lie in \[1, 4\]"),
        ({"time_conditioning": "adaln"}, "`time_conditioning`"),
        ({"mask_sampling": "all"}, "`mask_sampling` must be one of"),
        ({"mask_sampling": "count", "objective": "discrete"}, "`mask_sampling='count'` needs continuous time"),
        ({"mask_sampling": "count", "schedule": "spindle"}, "`mask_sampling='count'` needs continuous time"),
        ({"time_epsilon": 0.1}, "`time_epsilon` goes with `mask_sampling='independent'`"),
        ({"time_epsilon": 0.1, "objective": "discrete"}, "`time_epsilon` goes with `mask_sampling='independent'`"),
        ({"time_conditioning": "no"}, "`time_conditioning` must be one of"),
        ({"spindle_mean": "no"}, "`spindle_mean` must be one of"),
        ({"num_diffusion_steps": 0}, "`num_diffusion_steps` must be"),
        ({"max_length": 0}, "`max_length` must be"),
        ({"max_length": 2}, "`max_length` must be"),
        ({"head_chunk_size": 0}, "`head_chunk_size` must be"),
        ({"dataset_num_proc": 0}, "`dataset_num_proc` must be"),
        ({"ema_decay": 1.0}, r"`ema_decay` must lie in \[0, 1\)"),
        ({"ema_decay": -0.1}, r"`ema_decay` must lie in"),
        ({"ema_decay": float("nan")}, r"`ema_decay` must lie in"),
        ({"time_epsilon": 1.0}, r"`time_epsilon` must lie in"),
        ({"cross_entropy_weight": -1.0}, "`cross_entropy_weight` must be a number >= 0"),
        ({"eval_draws": 3}, "`eval_draws` must be an even number of at least 4"),
        ({"eval_samples": -1}, "`eval_samples` must be an integer >= 0"),
        ({"spindle_lambda": 1.5, "schedule": "spindle"}, "`spindle_lambda`"),
        ({"average_tokens_across_devices": False}, "`average_tokens_across_devices` must be True"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **kwargs)


def test_the_best_bound_is_the_smallest(tmp_path):
    for name in ("loss", "eval_loss", "bound", "eval_bound", "eval_bound_bits", "eval_masked_cross_entropy"):
        assert not arguments(tmp_path, metric_for_best_model=name).greater_is_better
    assert arguments(tmp_path, metric_for_best_model="eval_masked_accuracy").greater_is_better
    assert arguments(tmp_path, metric_for_best_model="bound", greater_is_better=True).greater_is_better


def test_small_times_are_drawn_more_often_where_they_weigh_much(tmp_path):
    """Weights grow towards small times in the bound, and hardly do with D3PM's cross-entropy or without weights."""
    powers = [
        ({"objective": "continuous"}, 2),
        ({"objective": "discrete", "cross_entropy_weight": 0.0}, 2),
        ({"objective": "discrete"}, 1),
        ({"objective": "mlm"}, 1),
        ({"objective": "mlm", "time_power": 1.5}, 1.5),
    ]
    for kwargs, power in powers:
        assert trainer_of(tmp_path, **kwargs).args.time_power == power
    assert TextDiffusionTrainingArguments(str(tmp_path), use_cpu=True).objective == "mlm"


def test_arguments_serve_several_trainers(tmp_path):
    args, parts = arguments(tmp_path, objective="mlm"), {"processing_class": toy_tokenizer()}
    parts["train_dataset"] = Dataset.from_dict({"text": TEXTS})
    first = TextDiffusionTrainer(toy_model(), args, **parts)
    args.schedule = "spindle"
    second = TextDiffusionTrainer(toy_model(), args, **parts)
    assert (first.args.mask_sampling, second.args.mask_sampling) == ("count", "independent")
    bound = TextDiffusionTrainer(toy_model(), dataclasses.replace(args, objective="continuous"), **parts)
    assert (second.args.time_power, bound.args.time_power) == (1.0, 2.0)


def test_a_conditioned_model_goes_on_as_it_is(tmp_path):
    toy_model(time_conditioning="prefix").save_pretrained(tmp_path / "model")
    parts = {"processing_class": toy_tokenizer(), "train_dataset": Dataset.from_dict({"text": TEXTS})}
    trainer = TextDiffusionTrainer(str(tmp_path / "model"), arguments(tmp_path / "run"), **parts)
    assert trainer.model.config.time_conditioning == "prefix"


def test_a_folder_of_other_things_is_not_taken(tmp_path):
    """Where a pipeline's parts would be looked for, nothing is lost and nothing hidden."""
    trainer = trainer_of(tmp_path / "before")
    source = tmp_path / "project" / "model" / "net.py"
    source.parent.mkdir(parents=True)
    source.write_text("import torch")
    for attempt in (lambda: trainer_of(tmp_path / "project"), lambda: trainer.save_model(str(tmp_path / "project"))):
        with pytest.raises(ValueError, match="`output_dir` .* has 'model', which is not a pipeline's"):
            attempt()
    assert source.read_text() == "import torch"


def test_a_pipeline_s_folder_can_be_trained_into(tmp_path):
    TextDiffusionPipeline(toy_model(), toy_tokenizer(), AbsorbingStateScheduler()).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path)
    trainer.save_model()
    assert not [name for name in ("model", "scheduler", "tokenizer") if (tmp_path / name).exists()]
    assert_same_weights(
        weights_of(TextDiffusionPipeline.from_pretrained(tmp_path).model), weights_of(trainer.model), rtol=0, atol=0
    )


def test_counting_is_the_default_where_it_is_possible(tmp_path):
    assert trainer_of(tmp_path).args.mask_sampling == "count"
    assert trainer_of(tmp_path, schedule="cosine").args.mask_sampling == "count"
    assert trainer_of(tmp_path, objective="mlm").args.mask_sampling == "count"
    for kwargs in ({"objective": "discrete"}, {"schedule": "spindle"}):
        assert trainer_of(tmp_path, **kwargs).args.mask_sampling == "independent"
    spindle = AbsorbingStateScheduler(**token_settings(toy_tokenizer()), schedule="spindle", token_counts=COUNTS)
    assert trainer_of(tmp_path, scheduler=spindle).args.mask_sampling == "independent"


def test_the_spindle_counts_what_is_noised(tmp_path):
    """What rows are filled with is, what is given and what a row's own mask leaves out is not."""
    rows = [
        {"input_ids": [CLS, 5, SEP, 6, 7, SEP], "attention_mask": [1] * 6, "prompt_length": 3},
        {"input_ids": [CLS, 6, 6, SEP, SEP, SEP], "attention_mask": [1] * 4 + [0] * 2, "prompt_length": 0},
    ]
    for fill_rows, terminators in ((False, 2), (True, 8)):
        trainer = trainer_of(tmp_path, Dataset.from_list(rows), schedule="spindle", fill_rows=fill_rows, max_length=8)
        assert trainer.pipeline.scheduler.config.token_counts == [0, 0, 0, terminators, 0, 0, 3, 1]
        batch = trainer.data_collator(rows)
        noised = batch["labels"][batch["labels"] != -100]
        assert torch.bincount(noised, minlength=8).tolist() == trainer.pipeline.scheduler.config.token_counts


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token"):
        trainer_of(tmp_path, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="`max_length` is 33, but the model takes at most 32"):
        trainer_of(tmp_path, max_length=33)
    with pytest.raises(ValueError, match="needs a `train_dataset` to count tokens on"):
        trainer_of(tmp_path, None, schedule="spindle")
    trainer = trainer_of(tmp_path, ids_dataset([[CLS, *[5] * 40]] * 4))
    with pytest.raises(ValueError, match="A row has 41 tokens; the model takes at most 32"):
        trainer.train()


def test_time_conditioning_that_a_model_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="time_conditioning"):
        trainer_of(tmp_path, time_conditioning="layerwise")


def test_a_model_may_be_named_by_its_folder(tmp_path):
    toy_model().save_pretrained(tmp_path / "model")
    trainer = trainer_of(tmp_path, model=str(tmp_path / "model"), time_conditioning="layerwise")
    assert trainer.model.config.time_conditioning == "layerwise"
    trainer.train()


def test_a_scheduler_of_one_s_own_is_used(tmp_path):
    scheduler = AbsorbingStateScheduler(
        **token_settings(toy_tokenizer()), schedule="spindle", token_counts=COUNTS, spindle_lambda=0.1
    )
    trainer = trainer_of(tmp_path, scheduler=scheduler, schedule="spindle")
    assert trainer.pipeline.scheduler.config.token_counts == COUNTS
    trainer.train()
