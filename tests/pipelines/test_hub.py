"""Push and pull through the real huggingface_hub client, against a hub on this machine, in fresh processes."""

import pytest
from hub_server import run_with_hub, running_hub
from toys import COUNTS, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, TextDiffusionPipeline


@pytest.fixture
def hub():
    with running_hub() as server:
        yield server


@pytest.fixture
def python(hub, tmp_path):
    """Runs code in a fresh process that knows no other hub than this one."""

    return lambda code, home="home": run_with_hub(code, hub, tmp_path, home)


def build(**kwargs):
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS, corpus="toys", gen_length=6)
    return TextDiffusionPipeline(toy_model(**kwargs), toy_tokenizer(), scheduler)


SAMPLE = """
    import torch
    texts = pipe(num_texts_per_prompt=3, generator=torch.Generator().manual_seed(0)).texts
    print(texts)
"""


@pytest.mark.parametrize("conditioning", ["none", "layerwise"])
def test_push_then_pull_gives_the_same_pipeline(conditioning, hub, python, tmp_path):
    build(time_conditioning=conditioning).save_pretrained(tmp_path / "local")
    pushed = python(
        f"""
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained({str(tmp_path / "local")!r})
    pipe.push_to_hub("user/toy", license="apache-2.0", datasets=["user/prose"])
    """
        + SAMPLE
    )
    files = hub.files("user/toy")
    assert set(files) >= {
        "model_index.json",
        "README.md",
        "model/config.json",
        "model/model.safetensors",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
    }
    assert all(token == "Bearer hf_local" for method, _, token in hub.requests if method == "POST")
    card = files["README.md"].decode()
    for part in ("license: apache-2.0", "user/prose", "spindle", "counted on toys", 'from_pretrained("user/toy")'):
        assert part in card
    pulled = python(
        """
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained("user/toy")
    """
        + SAMPLE,
        home="elsewhere",
    )
    assert pulled == pushed


def test_the_flat_layout_of_a_trainer_loads_from_the_hub_with_everything_beside_it(hub, python, tmp_path):
    pipe = build()
    flat = tmp_path / "flat"
    pipe.model.save_pretrained(flat)
    pipe.tokenizer.save_pretrained(flat)
    pipe.scheduler.save_pretrained(flat)
    pipe.save_config(flat)
    for name in ("optimizer.pt", "ema.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (flat / name).write_bytes(b"{}")
    local = python(
        f"""
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained({str(flat)!r})
    """
        + SAMPLE
    )
    pulled = python(
        f"""
    from huggingface_hub import create_repo, upload_folder
    create_repo("user/flat")
    upload_folder(repo_id="user/flat", folder_path={str(flat)!r})
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained("user/flat")
    """
        + SAMPLE
    )
    assert pulled == local
    # What loads the model alone would find the old one beside a pipeline of another layout.
    before = hub.files("user/flat")
    refused = python(
        """
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained("user/flat")
    try:
        pipe.push_to_hub("user/flat")
    except ValueError as error:
        print(error)
    """
    )
    assert "`repo_id` 'user/flat' has a pipeline as the Trainer saves it" in refused
    assert hub.files("user/flat") == before


def test_components_push_and_pull_alone(hub, python, tmp_path):
    build().save_pretrained(tmp_path / "local")
    out = python(
        f"""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    from diffusers_text import AbsorbingStateScheduler, DiffusionBertForMaskedDiffusion, TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained({str(tmp_path / "local")!r})
    pipe.model.push_to_hub("user/model")
    pipe.scheduler.push_to_hub("user/scheduler")
    pipe.tokenizer.push_to_hub("user/model")
    model = AutoModelForMaskedLM.from_pretrained("user/model")
    pairs = zip(model.state_dict().values(), pipe.model.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    scheduler = AbsorbingStateScheduler.from_pretrained("user/scheduler")
    again = TextDiffusionPipeline(model, AutoTokenizer.from_pretrained("user/model"), scheduler)
    print(type(model).__name__, scheduler.config.token_counts == pipe.scheduler.config.token_counts)
    calls = [p(num_texts_per_prompt=2, generator=torch.Generator().manual_seed(1)).texts for p in (pipe, again)]
    print(calls[0] == calls[1])
    """
    )
    assert out.split() == ["DiffusionBertForMaskedDiffusion", "True", "True"]


def test_revision_and_token_reach_the_hub(hub, python, tmp_path):
    build().save_pretrained(tmp_path / "local")
    files = {
        str(path.relative_to(tmp_path / "local")): path.read_bytes()
        for path in (tmp_path / "local").rglob("*")
        if path.is_file()
    }
    hub.repos["user/toy"] = {"main": {"README.md": b"nothing here yet"}, "v2": files}
    out = python(
        """
    from diffusers_text import DiffusionBertForMaskedDiffusion, TextDiffusionPipeline
    arguments = {"revision": "v2", "token": "hf_other"}
    pipe = TextDiffusionPipeline.from_pretrained("user/toy", **arguments)
    model = DiffusionBertForMaskedDiffusion.from_pretrained("user/toy", subfolder="model", **arguments)
    print(type(pipe.model).__name__ == type(model).__name__)
    try:
        TextDiffusionPipeline.from_pretrained("user/toy", token="hf_other")
    except OSError as error:
        print("model_index.json" in str(error))
    """
    )
    assert out.split() == ["True", "True"]
    downloads = [(path, token) for method, path, token in hub.requests if method == "GET" and "/resolve/" in path]
    assert any(path.endswith("model.safetensors") for path, _ in downloads)
    assert {token for _, token in downloads} == {"Bearer hf_other"}


def test_a_card_that_is_there_is_kept(hub, python, tmp_path):
    build().save_pretrained(tmp_path / "local")
    hub.repos["user/toy"] = {"main": {"README.md": b"# written by hand"}}
    python(
        f"""
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained({str(tmp_path / "local")!r})
    pipe.save_pretrained("again", push_to_hub=True, repo_id="user/toy")
    """
    )
    assert hub.files("user/toy")["README.md"] == b"# written by hand"
    assert "model/model.safetensors" in hub.files("user/toy")


def test_weights_of_an_earlier_push_go_and_other_files_stay(hub, python, tmp_path):
    build().save_pretrained(tmp_path / "local")
    others = {"model/model.fp16.safetensors": b"another variant's", "model/notes.txt": b"mine"}
    hub.repos["user/toy"] = {"main": dict(others)}
    pushes = f"""
    from diffusers_text import TextDiffusionPipeline
    pipe = TextDiffusionPipeline.from_pretrained({str(tmp_path / "local")!r})
    pipe.push_to_hub("user/toy")
    pipe.push_to_hub("user/toy", max_shard_size="4KB")
    """
    python(pushes)
    files = hub.files("user/toy")
    assert {name: files[name] for name in others} == others
    assert "model/model.safetensors" not in files
    shards = [name for name in files if "-of-" in name]
    assert len(shards) > 1
    python(f"{pushes}pipe.push_to_hub('user/toy')")
    files = hub.files("user/toy")
    assert {name: files[name] for name in others} == others
    assert [name for name in files if name.startswith("model/model") and "fp16" not in name] == [
        "model/model.safetensors"
    ]
