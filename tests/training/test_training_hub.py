"""What training pushes, through the real huggingface_hub client, to a hub on this machine, in fresh processes."""

import json
import re

import pytest
from hub_server import run_with_hub, running_hub
from run_training import EXAMPLE

pytestmark = pytest.mark.slow
STRATEGIES = ["end", "every_save", "checkpoint"]
PIPELINE = {"model_index.json", "config.json", "model.safetensors", "scheduler_config.json", "tokenizer.json"}


@pytest.fixture(scope="module")
def pushed(example_inputs):
    """A hub with what the example script pushes by each strategy, and the folder that it has trained in."""
    with running_hub() as hub:
        code = f"""
        from runpy import run_path
        main = run_path({str(EXAMPLE)!r})["main"]
        for strategy in {STRATEGIES}:
            main([
                "--model_name_or_path", "model", "--train_file", "train.txt", "--validation_file", "validation.txt",
                "--output_dir", strategy, "--schedule", "spindle", "--max_length", "12", "--max_steps", "6",
                "--save_steps", "2", "--logging_steps", "1", "--eval_samples", "2", "--learning_rate", "0.0123",
                "--report_to", "none", "--use_cpu", "--push_to_hub", "--hub_model_id", "user/" + strategy,
                "--hub_strategy", strategy, "--hub_always_push",
            ])
        """
        run_with_hub(code, hub, example_inputs, home="home")
        yield hub, example_inputs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_whole_pipeline_is_pushed_and_nothing_that_training_alone_needs(strategy, pushed):
    hub, folder = pushed
    files = hub.files(f"user/{strategy}")
    assert set(files) >= PIPELINE | {"README.md", "loss.png", "samples/step-6.txt"}
    for name in PIPELINE:
        assert files[name] == (folder / strategy / name).read_bytes()
    strays = [
        name for name in files if re.search(r"optimizer|rng_state|ema\.pt|trainer_state|checkpoint|/\.|^\.", name)
    ]
    if strategy == "checkpoint":
        strays = [name for name in strays if not name.startswith("last-checkpoint/")]
    assert set(strays) <= {".gitattributes"}


def test_every_save_is_pushed_where_the_strategy_says_so(pushed):
    hub, _ = pushed
    commits = [path.split("/")[4] for method, path, _ in hub.requests if method == "POST" and "/commit/" in path]
    counts = {strategy: commits.count(strategy) for strategy in STRATEGIES}
    assert counts["end"] < 3 <= counts["every_save"] < counts["checkpoint"]
    state = json.loads(hub.files("user/checkpoint")["last-checkpoint/trainer_state.json"])
    assert state["global_step"] == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_card_tells_noise_arguments_figures_and_texts(strategy, pushed):
    hub, folder = pushed
    files = hub.files(f"user/{strategy}")
    card = files["README.md"].decode()
    bound = json.loads((folder / strategy / "eval_results.json").read_text())["eval_bound"]
    for part in (
        f'from_pretrained("user/{strategy}")',
        "| noise schedule | spindle (lambda 0.3, surprisal, corpus mean) |",
        "counted on train.txt",
        "\n6 steps, ",
        "| learning_rate | 0.0123 |",
        "| objective | mlm |",
        "| per_device_train_batch_size | 8 |",
        f"Bound on the held-out data, in nats per token: {bound:.3f}",
        "![loss](loss.png)",
    ):
        assert part in card
    texts = files["samples/step-6.txt"].decode().splitlines()
    assert len(texts) == 2
    assert all(f"- {text}\n" in card for text in texts)


def test_what_was_pushed_loads_in_a_fresh_process(pushed):
    hub, folder = pushed
    said = run_with_hub(
        f"""
        import torch
        from huggingface_hub import snapshot_download
        from transformers import AutoModelForMaskedLM
        from diffusers_text import TextDiffusionPipeline
        from diffusers_text.training.checkpoints import find_checkpoint
        for strategy in {STRATEGIES}:
            model, problems = AutoModelForMaskedLM.from_pretrained("user/" + strategy, output_loading_info=True)
            assert not any(problems.values()), problems
            pipes = [TextDiffusionPipeline.from_pretrained(place) for place in ("user/" + strategy, strategy)]
            for name, value in pipes[1].model.state_dict().items():
                assert torch.equal(value, model.state_dict()[name]), name
            texts = [
                pipe(num_texts_per_prompt=3, generator=torch.Generator().manual_seed(0)).texts for pipe in pipes
            ]
            assert texts[0] == texts[1]
        print(find_checkpoint("", snapshot_download("user/checkpoint") + "/last-checkpoint"))
        """,
        hub,
        folder,
        home="elsewhere",
    )
    assert said.strip().endswith("last-checkpoint")
