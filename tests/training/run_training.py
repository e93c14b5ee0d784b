"""A training run on a toy, in a process of its own that can be killed, signalled and starved."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where torchrun starts this file

import torch
from datasets import Dataset
from toys import SPECIALS, toy_model, toy_tokenizer
from transformers import TrainerCallback

from diffusers_text import TextDiffusionTrainer, TextDiffusionTrainingArguments

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_text_diffusion.py"
WORDS = list("abcdefghijkl")
# The child of a server that has imported everything starts in no time, and dies as any other process.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["diffusers_text.training.trainer", "scipy.stats"])


def texts(number, seed=0):
    """Texts of unequal length."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(number)]


def model(**kwargs):
    return toy_model(vocab_size=len(SPECIALS) + len(WORDS), **kwargs)


# --- In the process ---


class Recorder(TrainerCallback):
    """Writes down what was trained on and what came of it, at once, and makes things go wrong in time."""

    def __init__(self, folder, rank, trouble):
        self.folder, self.rank, self.trouble = folder, rank, trouble
        self.trainer = None

    def write(self, **entry):
        with open(self.folder / f"record-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.write(step=state.global_step, **{name: logs[name] for name in ("loss", "bound", "grad_norm")})

    def on_step_begin(self, args, state, control, **kwargs):
        if self.trouble.get("step") == state.global_step and self.rank in self.trouble.get("ranks", [self.rank]):
            globals()[self.trouble["kind"]](self)


def hold(recorder):
    """Waits to be killed, or to be told to go on, and says when SIGTERM has come."""
    handler = signal.getsignal(signal.SIGTERM)

    def noticed(*args):
        handler(*args)
        (recorder.folder / f"signalled-{recorder.rank}").touch()

    signal.signal(signal.SIGTERM, noticed)
    recorder.write(pid=os.getpid())
    (recorder.folder / f"held-{recorder.rank}").touch()
    while not (recorder.folder / "go").exists():
        time.sleep(0.02)


def die_in_save(recorder):
    """From here on, SIGKILL strikes in the middle of a file that torch saves."""
    save = torch.save

    def dying(value, path, *args, **kwargs):
        save(value, path, *args, **kwargs)
        if Path(path).name == recorder.trouble["file"]:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = dying


def die_in_removal(recorder):
    """From here on, SIGKILL strikes when the first file of a checkpoint has been removed."""
    remove = shutil.rmtree

    def dying(path, *args, **kwargs):
        for weights in Path(path).rglob("model.safetensors"):
            weights.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        remove(path, *args, **kwargs)

    shutil.rmtree = dying


def fill_disk(recorder):
    """From here on, no file can grow as large as one of the last checkpoint's."""
    path = max((recorder.folder / "run").glob(f"checkpoint-*/{recorder.trouble['file']}"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - 1, resource.RLIM_INFINITY))


def lose_numbers(recorder):
    """From here on, the model knows no number for the last of 12 tokens."""
    with torch.no_grad():
        recorder.trainer.pipeline.model.get_parameter("bert.embeddings.position_embeddings.weight")[11] = torch.nan


class RecordedTrainer(TextDiffusionTrainer):
    def __init__(self, *args, recorder, **kwargs):
        super().__init__(*args, callbacks=[recorder], **kwargs)
        self.recorder = recorder
        recorder.trainer = self

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = self.processing_class.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        self.recorder.write(step=self.state.global_step + 1, rows=rows)
        return super().compute_loss(model, inputs, *args, **kwargs)


def train(settings):
    torch.set_num_threads(1)
    os.environ.update(settings["environment"])
    folder, rank = Path(settings["folder"]), int(os.environ.get("RANK", "0"))
    screen = os.open(folder / f"screen-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)

    arguments = {
        "output_dir": str(folder / "run"), "num_train_epochs": 3, "per_device_train_batch_size": 4, "max_length": 12,
        "packing": False, "schedule": "spindle", "learning_rate": 1e-2, "ema_decay": 0.9, "logging_steps": 1,
        "save_strategy": "no", "eval_samples": 0, "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    dataset = Dataset.from_dict({"text": settings["texts"]})
    trainer = RecordedTrainer(
        model(**settings["model"]),
        TextDiffusionTrainingArguments(**{**arguments, **settings["arguments"]}),
        processing_class=toy_tokenizer(words=WORDS),
        train_dataset=dataset.to_iterable_dataset() if settings["streaming"] else dataset,
        eval_dataset=Dataset.from_dict({"text": settings["eval_texts"]}) if settings["eval_texts"] else None,
        recorder=Recorder(folder, rank, settings["trouble"]),
    )
    trainer.train()
    if trainer.was_stopped:
        return
    if settings["eval_texts"]:
        trainer.recorder.write(**trainer.evaluate())
    trainer.save_model()


# --- In the test ---


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def make_settings(folder, rows=22, eval_texts=(), streaming=False, model=None, trouble=None, **arguments):
    folder.mkdir(exist_ok=True)
    return {
        "folder": str(folder),
        "texts": texts(rows) if isinstance(rows, int) else rows,
        "eval_texts": [*eval_texts],
        "streaming": streaming,
        "model": model or {},
        "trouble": trouble or {},
        "arguments": arguments,
        "environment": {},
    }


def start(folder, processes=1, **kwargs):
    """Starts a run in `processes` processes, `kwargs` as in `make_settings`."""
    settings, port, started = make_settings(folder, **kwargs), str(free_port()), []
    for rank in range(processes):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        if processes > 1:
            settings["environment"] = {name: str(value) for name, value in places.items()}
            settings["environment"] |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(CONTEXT.Process(target=train, args=(settings,), daemon=True))
        started[-1].start()
    return started


def finish(started, timeout=600):
    """Waits for processes; returns their exit codes, None for one that hangs and is killed."""
    deadline = time.monotonic() + timeout
    for process in started:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
    return codes


def run(folder, processes=1, code=0, **kwargs):
    codes = finish(start(folder, processes, **kwargs))
    assert codes == [code] * processes, screen(folder)
    return folder


def wait_for(condition, started=(), timeout=600):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        assert all(process.exitcode is None for process in started), "a process has ended"
        time.sleep(0.02)


def screen(folder, rank=0):
    return (folder / f"screen-{rank}.txt").read_text()


def record(folder, rank=0):
    path = folder / f"record-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*"))


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
