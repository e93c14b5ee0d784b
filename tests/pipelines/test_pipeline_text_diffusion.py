"""TextDiffusionPipeline as users of diffusers know pipelines: calls, batches, callbacks, saving, errors."""

import json
import logging

import numpy as np
import pytest
import torch
from diffusers import AmusedScheduler, DDPMScheduler
from toys import CLS, COUNTS, MASK, PAD, SEP, seeded, toy_model, toy_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    RobertaConfig,
)

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline
from diffusers_text.schedulers.sampling import draw_uniforms

SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}
SCHEDULES = {"linear": {}, "spindle": SPINDLE}


def build(model=None, tokenizer=None, **scheduler_kwargs):
    pipe = TextDiffusionPipeline(
        model or toy_model(), tokenizer or toy_tokenizer(), AbsorbingStateScheduler(**scheduler_kwargs)
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(params=SCHEDULES)
def pipe(request):
    return build(**SCHEDULES[request.param])


# --- What is generated ---


def test_unconditional_text(pipe):
    out = pipe(num_texts_per_prompt=3, gen_length=7, generator=seeded())
    assert len(out.texts) == len(out.sequences) == 3
    for sequence, text in zip(out.sequences, out.texts):
        assert sequence.shape == (9,)
        assert (sequence[0], sequence[-1]) == (CLS, SEP)
        body = sequence[1:-1].tolist()
        assert set(body) <= {SEP, 5, 6, 7}
        ended = body[: body.index(SEP)] if SEP in body else body
        assert text == " ".join("abc"[i - 5] for i in ended)


def test_default_length_is_the_scheduler_s():
    assert build(gen_length=5)().sequences[0].shape == (7,)


def test_infill_anywhere_keeps_given_ids_and_samples_no_terminator(pipe):
    out = pipe("[MASK] a [MASK] [MASK] b", num_texts_per_prompt=200, generator=seeded())
    found = torch.stack(out.sequences)
    assert (found[:, [0, 2, 5, 6]] == torch.tensor([CLS, 5, 6, SEP])).all()
    assert set(found[:, [1, 3, 4]].flatten().tolist()) == {5, 6, 7}
    assert all(len(text.split()) == 5 for text in out.texts)


def test_continuation_and_infill_at_once(pipe):
    out = pipe("a [MASK] b", gen_length=4, num_texts_per_prompt=200, generator=seeded())
    found = torch.stack(out.sequences)
    assert found.shape == (200, 9)
    assert (found[:, [0, 1, 3, 8]] == torch.tensor([CLS, 5, 6, SEP])).all()
    assert SEP not in found[:, 2]
    assert SEP in found[:, 4:8]
    assert all(text.startswith("a ") and text.split()[2] == "b" for text in out.texts)


def test_given_ids_come_back_exactly(pipe):
    given = torch.tensor([[CLS, 5, 1, MASK, SEP, 6, SEP, PAD], [CLS, MASK, 7, 0, 6, 3, 5, 5]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1] * 8])
    out = pipe(input_ids=given, attention_mask=keep, generator=seeded())
    assert [len(sequence) for sequence in out.sequences] == [7, 8]
    for sequence, row in zip(out.sequences, given):
        row = row[: len(sequence)]
        assert torch.equal(sequence[row != MASK], row[row != MASK])
        assert (sequence != MASK).all()
    unpadded = pipe(input_ids=given[0], generator=seeded())
    assert len(unpadded.sequences[0]) == 7


def test_a_given_unknown_word_stays_in_the_text(pipe):
    assert pipe("a zebra [MASK]", generator=seeded()).texts[0].startswith("a [UNK] ")


def test_padding_that_is_the_terminator_or_missing_reaches_no_row(pipe):
    for change in ({"pad_token": "[SEP]"}, {"pad_token": None}):
        tokenizer = toy_tokenizer()
        for name, value in change.items():
            setattr(tokenizer, name, value)
        other = build(pipe.model, tokenizer, **(SPINDLE if pipe.scheduler.noise.token_dependent else {}))
        prompts = ["[MASK]", "a b [MASK] c a"]
        together = other(prompts, generator=[seeded(0), seeded(1)]).sequences
        for i, prompt in enumerate(prompts):
            assert other(prompt, generator=[seeded(i)]).sequences[0].tolist() == together[i].tolist()
        ids = torch.tensor([[CLS, 5, MASK, SEP, SEP]])
        assert len(other(input_ids=ids).sequences[0]) == 5


def test_a_given_separator_does_not_end_the_text():
    ids = torch.tensor([[CLS, 5, SEP, 6, MASK, SEP]])
    text = build()(input_ids=ids, generator=seeded()).texts[0]
    assert text.split()[:2] == ["a", "b"]


@pytest.mark.parametrize("steps", [None, 1, 3, 8, 40, 1000])
def test_no_mask_is_left(pipe, steps):
    out = pipe("a [MASK]", gen_length=7, num_texts_per_prompt=4, num_inference_steps=steps)
    assert not (torch.stack(out.sequences) == MASK).any()


def test_prompt_without_gaps_costs_nothing_and_warns(pipe, caplog):
    calls = []
    pipe.model.register_forward_hook(lambda *args: calls.append(1))
    with caplog.at_level(logging.WARNING, logger="diffusers_text"):
        out = pipe(["a b", "c"])
    assert calls == []
    assert out.texts == ["a b", "c"]
    assert [sequence.tolist() for sequence in out.sequences] == [[CLS, 5, 6, SEP], [CLS, 7, SEP]]
    assert "2 of 2 texts have no [MASK] to fill" in caplog.text


def test_number_of_forward_passes(pipe):
    calls = []
    pipe.model.register_forward_hook(lambda *args: calls.append(1))
    for steps, length in ((None, 6), (3, 6), (1000, 6), (1, 6)):
        calls.clear()
        pipe(gen_length=length, num_inference_steps=steps, num_texts_per_prompt=2, generator=seeded())
        if pipe.scheduler.noise.token_dependent:
            assert len(calls) <= (steps or 1000)
        else:
            assert len(calls) <= min(steps or length, length)


def test_a_rejected_proposal_runs_the_head_only():
    pipe = build(**SPINDLE, spindle_lambda=1.0)
    passes, heads = [], []
    pipe.model.bert.encoder.register_forward_hook(lambda *args: passes.append(1))
    pipe.model.cls.register_forward_hook(lambda *args: heads.append(1))
    pipe(gen_length=20, generator=seeded())
    assert len(passes) <= 20 < len(heads)


def test_the_head_sees_asked_positions_only(pipe):
    rows = []
    pipe.model.cls.register_forward_hook(lambda module, args, output: rows.append(output.numel() // 8))
    pipe(gen_length=20, num_texts_per_prompt=2, generator=seeded())
    assert max(rows) <= 2


# --- Batches and randomness ---


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("conditioning", ["none", "prefix"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_batch_equals_each_prompt_alone(schedule, conditioning, steps):
    pipe = build(toy_model(time_conditioning=conditioning), **SCHEDULES[schedule])
    prompts = ["a", "b [MASK] c a b", "c c", "a b c a b c [MASK]"]
    arguments = {"gen_length": 5, "temperature": 0.0, "num_inference_steps": steps}
    together = pipe(prompts, generator=[seeded(i) for i in range(4)], **arguments)
    for i, prompt in enumerate(prompts):
        alone = pipe(prompt, generator=[seeded(i)], **arguments)
        assert alone.sequences[0].tolist() == together.sequences[i].tolist()
        assert alone.texts[0] == together.texts[i]


@pytest.mark.parametrize("steps", [None, 3])
def test_one_generator_a_row_gives_the_same_text_in_any_batch_split(pipe, steps):
    def run(rows):
        return pipe(
            [["a", "b [MASK] c", "c c a"][i % 3] for i in rows],
            gen_length=6,
            generator=[seeded(i) for i in rows],
            num_inference_steps=steps,
        ).texts

    assert run(range(6)) == run([0]) + run([1, 2, 3]) + run([4, 5])


def test_same_seed_same_text(pipe):
    texts = [pipe(gen_length=12, num_texts_per_prompt=3, generator=seeded(s)).texts for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_fills_in_the_argmax():
    pipe = build()
    sequence = pipe("a [MASK] b", temperature=0.0).sequences[0]
    with torch.no_grad():
        logits = pipe.model(torch.tensor([[CLS, 5, MASK, 6, SEP]])).logits[0, 2]
    assert sequence[2] == 5 + logits[5:8].argmax()


def test_changes_to_padding_and_batch_reach_no_row(pipe):
    """The law of a row is that of the row alone: here, in the frequencies of a masked position beside a long row."""
    short = pipe(["[MASK] a"] * 2000, generator=seeded()).sequences
    mixed = pipe(["[MASK] a", "a b c a b c a [MASK]"] * 2000, generator=seeded(1)).sequences[::2]
    shares = [np.bincount([s[1] for s in rows], minlength=8) / 2000 for rows in (short, mixed)]
    assert np.abs(shares[0] - shares[1]).max() < 0.06


# --- Any masked language model ---


STOCK = {
    "bert": BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
    "roberta": RobertaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pad_token_id=0
    ),
    "distilbert": DistilBertConfig(vocab_size=8, dim=16, hidden_dim=32, n_layers=1, n_heads=2),
    "modernbert": ModernBertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=0,
        bos_token_id=2,
        cls_token_id=2,
        eos_token_id=3,
        sep_token_id=3,
    ),
    "electra": ElectraConfig(
        vocab_size=8,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", STOCK)
def test_stock_models_generate_and_round_trip(name, schedule, tmp_path):
    torch.manual_seed(0)
    pipe = build(AutoModelForMaskedLM.from_config(STOCK[name]), **SCHEDULES[schedule])
    arguments = {"prompt": ["a [MASK]", "b"], "gen_length": 4}
    before = pipe(**arguments, generator=seeded())
    assert not any((sequence == MASK).any() for sequence in before.sequences)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["model"] == ["transformers", type(pipe.model).__name__]
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded(**arguments, generator=seeded()).texts == before.texts


# --- Outputs, callbacks, progress ---


def test_output_types(pipe):
    out = pipe(gen_length=3, output_type="seq", generator=seeded())
    assert out.texts is None
    sequences, texts = pipe(gen_length=3, return_dict=False, generator=seeded())
    assert sequences[0].tolist() == out.sequences[0].tolist()
    assert isinstance(texts[0], str)


def test_every_advertised_tensor_reaches_the_callback(pipe):
    seen = []

    def callback(pipe, step, timestep, callback_kwargs):
        seen.append((step, timestep, callback_kwargs))
        return callback_kwargs

    names = list(pipe._callback_tensor_inputs)
    pipe(
        ["a", "b b [MASK]"],
        gen_length=3,
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=names,
        generator=seeded(),
    )
    assert [step for step, _, _ in seen] == list(range(len(seen)))
    for _, timestep, tensors in seen:
        assert timestep.shape == (2,)
        assert list(tensors) == names
        assert tensors["sample"].shape == tensors["attention_mask"].shape == (2, 8)
        assert tensors["logits"].shape == (len(tensors["positions"]), 8)


def test_the_attention_mask_reaches_the_callback_without_padding_too(pipe):
    masks = []
    pipe(
        ["a", "b"],
        gen_length=2,
        callback_on_step_end=lambda pipe, step, timestep, kwargs: masks.append(kwargs["attention_mask"]),
        callback_on_step_end_tensor_inputs=["attention_mask"],
    )
    assert all(mask.tolist() == [[1] * 5] * 2 for mask in masks)


def test_a_callback_can_write_on_the_canvas(pipe):
    def callback(pipe, step, timestep, callback_kwargs):
        sample = callback_kwargs["sample"].clone()
        sample[:, 2] = 7
        return {"sample": sample}

    out = pipe(gen_length=4, callback_on_step_end=callback, generator=seeded())
    assert out.sequences[0][2] == 7
    assert not (out.sequences[0] == MASK).any()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (5, "must return a dict or None, got int"),
        ({"sample": None}, "must return a `sample` as .*, got NoneType"),
        ({"sample": torch.zeros(1, 6)}, "must return a `sample` as .*int64.*, got .*float32"),
        ({"sample": torch.zeros(1, 5, dtype=torch.long)}, "must return a `sample` as .*, got "),
    ],
)
def test_what_a_callback_returns_is_checked(pipe, returned, message):
    with pytest.raises(ValueError, match=message):
        pipe(gen_length=4, callback_on_step_end=lambda *args: returned)


def test_top_k_0_and_top_p_1_take_back_the_config_s(pipe):
    free = build()(gen_length=6, num_texts_per_prompt=20, generator=seeded()).texts
    shaped = build(top_k=1, top_p=0.5)
    assert shaped(gen_length=6, num_texts_per_prompt=20, top_k=0, top_p=1.0, generator=seeded()).texts == free
    assert shaped(gen_length=6, num_texts_per_prompt=20, generator=seeded()).texts != free


def test_progress_counts_forward_passes_or_tokens(capsys):
    for kwargs, total in (({}, "6/6"), (SPINDLE, "6/6")):
        pipe = build(**kwargs)
        pipe.set_progress_bar_config(disable=False)
        pipe(gen_length=6, generator=seeded())
        assert total in capsys.readouterr().err


def test_a_call_leaves_components_as_they_were(pipe):
    pipe.model.train()
    pipe.model.bert.embeddings.eval()  # as of a frozen part
    modes = [module.training for module in pipe.model.modules()]
    before = (dict(pipe.scheduler.config), {k: v.clone() for k, v in pipe.model.state_dict().items()})
    pipe(gen_length=5, temperature=0.7, top_k=3, num_inference_steps=4)
    assert [module.training for module in pipe.model.modules()] == modes
    assert dict(pipe.scheduler.config) == before[0]
    assert all(torch.equal(v, before[1][k]) for k, v in pipe.model.state_dict().items())


def test_sampling_uses_no_dropout():
    model = toy_model()
    pipe = build(model)
    texts = []
    for training in (False, True):
        model.train(training)
        texts.append(pipe(gen_length=10, num_texts_per_prompt=4, generator=seeded()).texts)
    assert texts[0] == texts[1]


# --- Saving, loading, moving ---


@pytest.mark.parametrize("conditioning", ["none", "layerwise", "prefix"])
def test_save_and_load(conditioning, tmp_path):
    pipe = build(toy_model(time_conditioning=conditioning), **SPINDLE)
    before = pipe(gen_length=6, generator=seeded())
    for _ in range(2):  # the second time over the first
        pipe.save_pretrained(tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "model",
        "model_index.json",
        "scheduler",
        "tokenizer",
    ]
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["model"] == ["diffusers_text", "DiffusionBertForMaskedDiffusion"]
    assert index["scheduler"] == ["diffusers_text", "AbsorbingStateScheduler"]
    assert index["tokenizer"][0] == "transformers"
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert loaded(gen_length=6, generator=seeded()).texts == before.texts
    assert (
        TextDiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).model.dtype == torch.bfloat16
    )
    pipe.to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    half = TextDiffusionPipeline.from_pretrained(tmp_path / "half", variant="fp16", dtype=torch.float16)
    assert half.model.dtype == torch.float16


def test_flat_layout_loads(tmp_path):
    pipe = build(**SPINDLE)
    for part in (pipe.model, pipe.tokenizer, pipe.scheduler):
        part.save_pretrained(tmp_path)
    pipe.save_config(tmp_path)
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path)
    assert loaded(gen_length=6, generator=seeded()).texts == pipe(gen_length=6, generator=seeded()).texts
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is type(pipe.model)


def test_a_flat_folder_is_not_made_two_pipelines(tmp_path):
    """What loads the model alone would find the old one."""
    pipe = build()
    for part in (pipe.model, pipe.tokenizer, pipe.scheduler):
        part.save_pretrained(tmp_path)
    pipe.save_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="`save_directory` .* has a pipeline as the Trainer saves it"):
        pipe.save_pretrained(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_save_leaves_the_old_files(tmp_path, monkeypatch):
    pipe = build()
    pipe.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(pipe.scheduler), "save_pretrained", fail)
    with torch.no_grad():
        pipe.model.cls.predictions.bias.add_(1)
    with pytest.raises(OSError, match="No space left"):
        pipe.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_weights_of_an_earlier_save_are_not_loaded(tmp_path, variant):
    """Whether they were one file or several shards; those of another variant stay."""
    (tmp_path / "model").mkdir()
    others = ["model.bf16.safetensors", "model.safetensors.index.bf16.json", "model.notes.txt"]
    for name in others:
        (tmp_path / "model" / name).write_text("another variant's")
    for shard_size in ("100MB", "2KB", "4KB", "100MB"):
        pipe = build(toy_model(seed=len(shard_size) * 7))
        with torch.no_grad():
            pipe.model.bert.embeddings.word_embeddings.weight.add_(torch.rand(()))
        pipe.save_pretrained(tmp_path, max_shard_size=shard_size, variant=variant)
        loaded = TextDiffusionPipeline.from_pretrained(tmp_path, variant=variant)
        for name, parameter in pipe.model.named_parameters():
            assert torch.equal(parameter, loaded.model.get_parameter(name))
        shards = [path for path in (tmp_path / "model").glob("*-of-*")]
        assert len({path.name.split("-of-")[1] for path in shards}) == (shard_size != "100MB")
    assert all((tmp_path / "model" / name).read_text() == "another variant's" for name in others)


def test_two_variants_live_in_one_folder_and_other_files_stay(tmp_path):
    pipe = build()
    bias = pipe.model.cls.predictions.bias.data.normal_().clone()  # not exact in half precision
    pipe.save_pretrained(tmp_path)
    (tmp_path / "model" / "ema.pt").write_bytes(b"mine")
    pipe.to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    full = TextDiffusionPipeline.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(full.model.cls.predictions.bias, bias)
    half = TextDiffusionPipeline.from_pretrained(tmp_path, variant="fp16", dtype=torch.float16)
    assert half.model.dtype == torch.float16
    assert (tmp_path / "model" / "ema.pt").read_bytes() == b"mine"


@pytest.mark.parametrize("own_first", [True, False])
def test_loading_with_components_of_other_classes(own_first, tmp_path):
    models = [toy_model(), AutoModelForMaskedLM.from_config(STOCK["bert"])]
    saved, passed = models if own_first else models[::-1]
    build(saved).save_pretrained(tmp_path)
    scheduler = AbsorbingStateScheduler(schedule="cosine")
    loaded = TextDiffusionPipeline.from_pretrained(tmp_path, model=passed, scheduler=scheduler)
    assert loaded.model is passed
    assert loaded.scheduler.config.schedule == "cosine"


def test_a_scheduler_assigned_later_learns_the_tokenizer_s_ids():
    pipe = build()
    pipe.scheduler = AbsorbingStateScheduler(schedule="cosine")
    assert pipe.scheduler.config.mask_token_id == MASK
    assert pipe.scheduler.config.suppressed_token_ids == [0, 1, 2]
    pipe.scheduler = AbsorbingStateScheduler.from_config(pipe.scheduler.config, schedule="linear")
    assert pipe.scheduler.config.schedule == "linear"
    with pytest.raises(ValueError, match="`mask_token_id` 103"):
        pipe.scheduler = AbsorbingStateScheduler(mask_token_id=103)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("conditioning", ["none", "layerwise", None])
def test_sampling_from_a_model_in_lora_training(conditioning, schedule):
    """None stands for a stock model."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForMaskedLM.from_config(STOCK["bert"]) if conditioning is None else None
    model = model or toy_model(time_conditioning=conditioning)
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"], r=2, init_lora_weights=False))
    pipe = build(adapted, **SCHEDULES[schedule])
    texts = pipe(gen_length=8, num_texts_per_prompt=3, generator=seeded()).texts
    pipe.model = adapted.merge_and_unload()
    assert pipe(gen_length=8, num_texts_per_prompt=3, generator=seeded()).texts == texts


def test_unknown_save_arguments_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"does not know \['max_shards'\]"):
        build().save_pretrained(tmp_path, max_shards=3)
    assert not list(tmp_path.iterdir())


def test_an_unmerged_adapter_cannot_be_saved(tmp_path):
    from peft import LoraConfig, get_peft_model

    pipe = build()
    pipe.model = adapted = get_peft_model(pipe.model, LoraConfig(target_modules=["query"], r=2))
    for model in (pipe.model, pipe.model.get_base_model()):
        pipe.model = model
        with pytest.raises(ValueError, match=r"merge_and_unload\(\)"):
            pipe.save_pretrained(tmp_path / "saved")
    pipe.model = adapted
    pipe.model = pipe.model.merge_and_unload()
    pipe.save_pretrained(tmp_path / "saved")
    assert TextDiffusionPipeline.from_pretrained(tmp_path / "saved").model.config.vocab_size == 8


def test_to_and_dtype(pipe):
    assert pipe.to(torch.bfloat16).model.dtype == torch.bfloat16
    assert pipe.to("cpu").device.type == "cpu"
    assert not (pipe(gen_length=5).sequences[0] == MASK).any()


def test_offload_hooks_are_respected(pipe):
    """What `enable_model_cpu_offload` does on an accelerator: a hook around the model's forward moves it there."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counter(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counter.calls += 1
            return args, kwargs

    expected = pipe(gen_length=8, generator=seeded()).texts
    add_hook_to_module(pipe.model, Counter())
    add_hook_to_module(pipe.model.bert, Counter())
    hooked_forward = pipe.model.bert.forward
    assert pipe(gen_length=8, generator=seeded()).texts == expected
    assert Counter.calls >= 8
    assert pipe.model.bert.forward is hooked_forward
    assert pipe(gen_length=8, generator=seeded()).texts == expected


@pytest.mark.parametrize(
    ("scheduler_class", "schedule", "in_place"),
    [
        (AbsorbingStateScheduler, "linear", False),
        (AbsorbingStateScheduler, "spindle", False),
        (AbsorbingStateScheduler, "spindle", True),
        (ConfidenceUnmaskingScheduler, "linear", False),
        (ReMDMScheduler, "linear", False),
    ],
)
@pytest.mark.parametrize("stock", [False, True])
def test_compiled_model(scheduler_class, schedule, in_place, stock):
    torch.compiler.reset()
    pipe = build(**SCHEDULES[schedule])
    pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
    if stock:
        pipe.model = BertForMaskedLM(BertConfig(**{**pipe.model.config.to_dict(), "model_type": "bert"})).eval()
    arguments = {"gen_length": 5, "num_inference_steps": 3, "num_texts_per_prompt": 2}
    expected = pipe(**arguments, generator=seeded()).texts
    if in_place:
        pipe.model.compile(backend="eager")
    else:
        pipe.model = torch.compile(pipe.model, backend="eager")
    with torch.no_grad():  # compiled before the pipeline's first call, for what that will ask
        for rows in (1, 2):
            pipe.model(input_ids=torch.full((rows, 7), 5), return_dict=True)
    assert pipe(**arguments, generator=seeded()).texts == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_with_a_cpu_generator_and_offload(pipe):
    expected = pipe(gen_length=8, generator=seeded()).texts
    assert pipe.to("cuda")(gen_length=8, generator=seeded()).texts == expected
    pipe.to("cpu").enable_model_cpu_offload()
    assert pipe(gen_length=8, generator=seeded()).texts == expected
    assert pipe.model.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("scheduler_class", "settings"),
    [
        (AbsorbingStateScheduler, {}),
        (AbsorbingStateScheduler, {"schedule": "linear"}),
        (ConfidenceUnmaskingScheduler, {}),
        (ConfidenceUnmaskingScheduler, {"rule": "entropy_bound"}),
        *((ReMDMScheduler, {"strategy": strategy}) for strategy in ("cap", "rescale", "confidence", "loop")),
    ],
    ids=str,
)
def test_an_event_waits_for_the_gpu_once(scheduler_class, settings, recwarn):
    pipe = build(**SPINDLE)
    pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config, **settings)
    pipe.to("cuda")
    steps = None if "rule" in settings else 20
    arguments = {"gen_length": 8, "num_inference_steps": steps, "output_type": "seq"}
    pipe(**arguments, generator=seeded())  # moves what stays there
    events = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        recwarn.clear()
        pipe(**arguments, generator=seeded(), callback_on_step_end=lambda *args: events.append(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in recwarn if "synchroniz" in str(warning.message)]
    assert len(waits) <= len(events) + 2  # and once or twice for the result


def test_draws_come_from_the_generator_s_device_and_go_to_the_model_s():
    draws = draw_uniforms([2, 3], seeded(), "meta")  # the one other device that every machine has
    assert (draws.device.type, draws.shape) == ("meta", (5,))


# --- Errors ---


WRONG_CALLS = [
    ({"prompt": []}, "`prompt` is an empty list"),
    ({"prompt": ["a", 3]}, "`prompt` must be a string or a list of strings"),
    ({"prompt": "a", "input_ids": torch.ones(1, 2, dtype=torch.long)}, "either `prompt` or `input_ids`"),
    ({"input_ids": torch.ones(1, 2)}, "`input_ids` must be a LongTensor .* got torch.float32"),
    ({"input_ids": [[1, 2]]}, "`input_ids` must be a LongTensor .* got list"),
    ({"input_ids": torch.ones(1, 2, 3, dtype=torch.long)}, "`input_ids` must be a LongTensor"),
    ({"input_ids": torch.ones(0, 2, dtype=torch.long)}, "`input_ids` is empty"),
    ({"input_ids": torch.tensor([[2, 5], [0, 0]])}, "`input_ids` has nothing but padding in row 1"),
    ({"input_ids": torch.tensor([[2, 8]])}, r"`input_ids` must lie in \[0, 8\), got 2 to 8"),
    ({"input_ids": torch.tensor([[-1, 5]])}, r"`input_ids` must lie in \[0, 8\), got -1 to 5"),
    (
        {"input_ids": torch.tensor([[2, 5]]), "attention_mask": torch.ones(1, 3)},
        "`attention_mask` goes with `input_ids`",
    ),
    ({"prompt": "a", "attention_mask": torch.ones(1, 3)}, "`attention_mask` goes with `input_ids`"),
    ({"gen_length": 0}, "`gen_length` must be an integer >= 1, got 0"),
    ({"gen_length": 2.0}, "`gen_length` must be an integer >= 1, got 2.0"),
    ({"gen_length": 31}, "canvas would have 33 tokens.*`gen_length` 31.*at most 32"),
    ({"prompt": "a b", "gen_length": 29}, "canvas would have 33 tokens"),
    ({"num_texts_per_prompt": 0}, "`num_texts_per_prompt` must be an integer >= 1, got 0"),
    ({"num_texts_per_prompt": None}, "`num_texts_per_prompt` must be an integer >= 1, got None"),
    ({"num_inference_steps": 0}, "`num_inference_steps` must be an integer >= 1, got 0"),
    ({"num_inference_steps": -1}, "`num_inference_steps` must be an integer >= 1, got -1"),
    ({"num_inference_steps": 3.5}, "`num_inference_steps` must be an integer >= 1, got 3.5"),
    ({"temperature": -0.1}, "`temperature` must be a finite number >= 0, got -0.1"),
    ({"temperature": float("nan")}, "`temperature` must be a finite number >= 0, got nan"),
    ({"temperature": float("inf")}, "`temperature` must be a finite number >= 0, got inf"),
    ({"top_k": -1}, "`top_k` must be None or an integer >= 0, got -1"),
    ({"top_k": 1.5}, "`top_k` must be None or an integer >= 0, got 1.5"),
    ({"top_p": 0}, r"`top_p` must be None or a number in \(0, 1\], got 0"),
    ({"top_p": 1.5}, r"`top_p` must be None or a number in \(0, 1\], got 1.5"),
    ({"generator": [torch.Generator()]}, "`generator` has 1 generators for 2 rows"),
    ({"generator": 42}, "`generator` must be a torch.Generator or a list of them, got int"),
    (
        {"generator": [torch.Generator(), None]},
        "`generator` must be a torch.Generator or a list of them, got NoneType",
    ),
    ({"output_type": "pt"}, "`output_type` must be 'text' or 'seq', got 'pt'"),
    (
        {"callback_on_step_end_tensor_inputs": "sample"},
        "`callback_on_step_end_tensor_inputs` must be a list .* 'sample'",
    ),
    ({"callback_on_step_end": 3}, "`callback_on_step_end` must be callable, got 3"),
    ({"input_ids": torch.tensor([[2, 5]]), "attention_mask": [[1, 1]]}, "`attention_mask` .* must be a tensor"),
    (
        {"callback_on_step_end_tensor_inputs": ["latents"]},
        r"`callback_on_step_end_tensor_inputs` .* got \['latents'\]",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_CALLS)
def test_wrong_arguments_are_named_before_any_work(arguments, message):
    pipe = build()
    calls = []
    pipe.model.register_forward_hook(lambda *args: calls.append(1))
    if "generator" in arguments:
        arguments = {"num_texts_per_prompt": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        pipe(**arguments)
    assert calls == []


def test_longest_canvas_works():
    assert len(build()(gen_length=30).sequences[0]) == 32
    roberta = AutoModelForMaskedLM.from_config(
        RobertaConfig(
            vocab_size=8,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
            pad_token_id=0,
        )
    )
    pipe = build(roberta)
    assert len(pipe(gen_length=17).sequences[0]) == 19
    with pytest.raises(ValueError, match="canvas would have 20 tokens.*at most 19"):
        pipe(gen_length=18)


def test_wrong_components_are_named():
    no_mask = toy_tokenizer()
    no_mask.mask_token = None
    with pytest.raises(ValueError, match="has no mask token.*add_special_tokens"):
        build(tokenizer=no_mask)
    with pytest.raises(ValueError, match="`mask_token_id` 103, the tokenizer's is 4"):
        build(mask_token_id=103)
    with pytest.raises(ValueError, match="`vocab_size` 7, the tokenizer's is 8"):
        build(vocab_size=7)
    with pytest.raises(ValueError, match="8 .*entries|`token_counts` has 3 entries"):
        build(schedule="spindle", token_counts=[1, 2, 3])
    with pytest.raises(ValueError, match=r"would sample special tokens, \[0, 1\]"):
        build(suppressed_token_ids=[2])
    with pytest.raises(ValueError, match=r"would sample special tokens, \[0, 1, 2\]"):
        build(suppressed_token_ids=[])
    with pytest.raises(ValueError, match="`scheduler` is a DDPMScheduler"):
        TextDiffusionPipeline(toy_model(), toy_tokenizer(), DDPMScheduler())
    with pytest.raises(ValueError, match="`scheduler` is a AmusedScheduler"):
        TextDiffusionPipeline(toy_model(), toy_tokenizer(), AmusedScheduler(mask_token_id=MASK))
    with pytest.raises(ValueError, match="`scheduler` is a NoneType"):
        TextDiffusionPipeline(toy_model(), toy_tokenizer(), None)
    with pytest.raises(ValueError, match="`model` is a GPT2LMHeadModel; a denoiser must be an encoder"):
        build(model=GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2)))
    with pytest.raises(ValueError, match="`mask_token_id` 7 is not in the vocabulary of 5"):
        AbsorbingStateScheduler(vocab_size=5, mask_token_id=7)
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        build(model=toy_model(vocab_size=7))


def test_padded_vocabulary_is_never_sampled():
    pipe = build(toy_model(vocab_size=64), **SPINDLE)
    out = pipe(gen_length=20, num_texts_per_prompt=20, generator=seeded())
    assert torch.stack(out.sequences).max() < 8


def test_pipeline_class_of_diffusers_finds_no_class_of_ours(tmp_path):
    """The base class looks for pipelines in diffusers alone: documented, and pinned here."""
    from diffusers import DiffusionPipeline

    build().save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="TextDiffusionPipeline"):
        DiffusionPipeline.from_pretrained(tmp_path)
