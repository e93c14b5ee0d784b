"""What the page and the animation of a trajectory hold, frame by frame."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageSequence
from toys import MASK, toy_model, toy_tokenizer

from diffusers_text import AbsorbingStateScheduler, ReMDMScheduler, TextDiffusionPipeline, TextDiffusionTrajectory

SCRIPT = Path(__file__).parents[2] / "examples" / "draw_trajectory.py"
sys.path.insert(0, str(SCRIPT.parent))
from draw_trajectory import trajectory_frames, trajectory_to_gif, trajectory_to_html  # noqa: E402

WORDS = ["a", "b", "</script><b>", "&amp;"]
VOCABULARY = {"vocab_size": 5 + len(WORDS)}


class Page(HTMLParser):
    """The texts of the spans, the frames, the slider's end and all that is loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.spans, self.open, self.data, self.last, self.assets, self.tags = [], None, "", None, [], []
        self.feed(text)
        self.close()
        self.frames = json.loads(self.data)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.open = "frames" if attrs.get("id") == "frames" else tag
        self.assets += [attrs[name] for name in ("src", "href") if name in attrs]
        if tag == "span":
            self.spans.append("")
        if tag == "input":
            self.last = int(attrs["max"])

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open == "span":
            self.spans[-1] += data
        if self.open == "frames":
            self.data += data


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer(words=WORDS)


@pytest.fixture
def by_hand():
    """[CLS] a </script><b> &amp; [SEP]: position 2 is written, taken back and written again, position 3 last."""
    entries = [(0, 2, 6, 1.0), (2, 2, MASK, 0.6), (2, 3, 8, 0.6), (5, 2, 7, 0.2)]
    steps, positions, tokens, times = zip(*entries)
    trajectory = TextDiffusionTrajectory(*map(torch.tensor, (steps, positions, tokens, times)))
    return torch.tensor([2, 5, 7, 8, 3]), trajectory


@pytest.fixture(scope="module")
def generated(tokenizer):
    """A text with remasking, the pipeline's own record of it, and the canvas that it began with."""
    pipe = TextDiffusionPipeline(toy_model(**VOCABULARY), tokenizer, ReMDMScheduler(strategy="cap", eta=0.5))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    output = pipe("a [MASK] b", gen_length=8, num_inference_steps=16, generator=generator, return_trajectory=True)
    start = torch.tensor([2, 5, MASK, 6, *[MASK] * 8, 3])
    assert (output.trajectory[0].token_ids == MASK).any()
    return output.sequences[0], output.trajectory[0], start


def test_frames_by_hand(tokenizer, by_hand):
    (label, start), first, second, last = trajectory_frames(tokenizer, *by_hand)
    assert label == "start"
    assert [cell.look for cell in start] == ["given", "given", "masked", "masked", "given"]
    assert [cell.text for cell in start] == ["[CLS]", "a", "", "", "[SEP]"]
    assert first[1][2][:2] == ("b", "written")
    assert second[1][2][:2] == ("b", "taken")
    assert second[1][3][:2] == ("&amp;", "written")
    assert last[1][2][:2] == ("</script><b>", "written")
    assert last[0] == "forward pass 6 of 6, t = 0.200"
    assert len({first[1][2].color, second[1][3].color, last[1][2].color}) == 3
    assert last[1][3].color == second[1][3].color  # the colour of the step that wrote it stays


def test_frames_end_with_the_text_and_begin_with_the_prompt(tokenizer, generated):
    sequence, trajectory, start = generated
    frames = trajectory_frames(tokenizer, sequence, trajectory)
    assert len(frames) == len(trajectory.steps.unique()) + 1
    assert frames == trajectory_frames(tokenizer, sequence, trajectory, prompt_ids=start)
    assert [cell.text for cell in frames[-1][1]] == tokenizer.convert_ids_to_tokens(sequence.tolist())
    assert [cell.look == "given" for cell in frames[0][1]] == (start != MASK).tolist()
    assert {cell.look for _, cells in frames for cell in cells} == {"given", "masked", "written", "taken"}


def test_a_page_shows_each_token_escaped_and_loads_nothing(tokenizer, by_hand):
    text = trajectory_to_html(tokenizer, *by_hand)
    page = Page(text)
    assert page.spans == ["[CLS]", "a", "</script><b>", "&amp;", "[SEP]"]
    assert "b" not in page.tags
    assert page.assets == []
    assert "http" not in text
    assert page.tags.count("script") == text.count("</script>") == 2


def test_the_changes_of_a_page_make_up_its_frames(tokenizer, generated):
    sequence, trajectory, _ = generated
    page = Page(trajectory_to_html(tokenizer, sequence, trajectory))
    frames = trajectory_frames(tokenizer, sequence, trajectory)
    assert len(page.frames) == page.last + 1 == len(trajectory.steps.unique()) + 1
    cells = [None] * len(sequence)
    for (label, changes), (expected_label, expected) in zip(page.frames, frames, strict=True):
        for i, *cell in changes:
            cells[i] = tuple(cell)
        assert label == expected_label
        assert cells == expected
    assert page.spans == [cell.text for cell in frames[-1][1]]


def test_an_animation_has_all_frames_and_rests_at_the_last(tokenizer, generated, tmp_path):
    sequence, trajectory, _ = generated
    trajectory_to_gif(tmp_path / "text.gif", tokenizer, sequence, trajectory, width=300)
    with Image.open(tmp_path / "text.gif") as image:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
        assert image.width == 300
    assert len(durations) == len(trajectory.steps.unique()) + 1
    assert durations[-1] == 3000 > max(durations[:-1])


def test_a_text_without_a_trajectory_is_one_frame(tokenizer, tmp_path):
    empty = TextDiffusionTrajectory(*torch.empty(3, 0, dtype=torch.long), torch.empty(0))
    sequence = torch.tensor([2, 5, 3])
    assert len(Page(trajectory_to_html(tokenizer, sequence, empty)).frames) == 1
    trajectory_to_gif(tmp_path / "text.gif", tokenizer, sequence, empty)
    with Image.open(tmp_path / "text.gif") as image:
        assert image.n_frames == 1


@pytest.mark.slow
def test_the_script_writes_a_page_and_says_which_endings_it_knows(tokenizer, tmp_path):
    TextDiffusionPipeline(toy_model(**VOCABULARY), tokenizer, AbsorbingStateScheduler()).save_pretrained(
        tmp_path / "saved"
    )
    command = [sys.executable, str(SCRIPT), "--model", "saved", "--prompt", "a", "--gen_length", "6"]

    def run(*arguments):
        return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)

    done = run("--scheduler", "confidence", "--output", "text.html")
    assert done.returncode == 0, done.stderr[-2000:]
    page = Page((tmp_path / "text.html").read_text())
    assert len(page.spans) == 9
    assert f"{page.last} steps are drawn in text.html" in done.stdout
    failed = run("--output", "text.png")
    assert failed.returncode != 0
    assert "`output` must end with .html or .gif, got 'text.png'" in failed.stderr
