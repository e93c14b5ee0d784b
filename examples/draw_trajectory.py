"""
How a text was written, step by step: the trajectory of a generated text as a web page or an animation.

    python examples/draw_trajectory.py --scheduler remdm --num_inference_steps 64 --output trajectory.html

The ending of --output decides: .html is one file with a player, .gif an animation. Tokens have the colour of the step
that wrote them, from blue to red, given ones are grey, and tokens that were taken back are struck through until
another is written. `python examples/draw_trajectory.py --help` lists the options.
"""

import colorsys
import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

import torch
from transformers import HfArgumentParser
from transformers.utils import logging

from diffusers_text import AbsorbingStateScheduler, ConfidenceUnmaskingScheduler, ReMDMScheduler, TextDiffusionPipeline

PAGE = Template(r"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Trajectory</title>
<style>
body { font: 16px/2.1 monospace; max-width: 60em; margin: 2em auto; padding: 0 1em; background: #fff; color: #111 }
span { display: inline-block; line-height: 1.6; padding: 0 3px; border: 1px solid #bbb; border-radius: 3px;
  text-align: center; white-space: pre; background: #e4e4e4 }
.masked { background: #fff }
.taken { background: #fff; color: #b00020; border: 1px dashed #b00020; text-decoration: line-through }
input { width: 50%; vertical-align: middle }
button { font: inherit; width: 5em }
</style>
<p><button id="play">play</button>
<input id="at" type="range" min="0" max="$last" value="$last" aria-label="step"> <output id="label"></output></p>
<p>
$spans
</p>
<script type="application/json" id="frames">$frames</script>
<script>
const frames = JSON.parse(document.getElementById("frames").textContent);
const spans = document.querySelectorAll("span"), at = document.getElementById("at");
const play = document.getElementById("play");
let timer = null;
function show() {
  for (const [label, changes] of frames.slice(0, +at.value + 1)) {
    document.getElementById("label").textContent = label;
    for (const [i, text, look, color] of changes) {
      spans[i].textContent = text || "\u00a0";  // an empty box would have no height
      spans[i].className = look;
      spans[i].style.background = color;
    }
  }
}
function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
function next() { if (+at.value < +at.max) { at.value = +at.value + 1; show(); } else stop(); }
play.onclick = () => {
  if (timer) return stop();
  if (at.value === at.max) at.value = 0;
  show();
  play.textContent = "pause";
  timer = setInterval(next, Math.max(60, Math.min(400, 12000 / frames.length)));
};
at.oninput = () => { stop(); show(); };
show();
</script>
</html>
""")


@dataclass
class DrawTrajectoryArguments:
    model: str = field(default="outputs/quickstart", metadata={"help": "Saved pipeline, folder or Hub id."})
    prompt: str | None = field(default=None, metadata={"help": "Text to continue or fill; by default none."})
    gen_length: int | None = field(default=None, metadata={"help": "Tokens to generate, as in a pipeline's call."})
    num_inference_steps: int | None = field(
        default=None, metadata={"help": "Steps; by default as many as it takes. remdm needs a number."}
    )
    scheduler: Literal["absorbing", "confidence", "remdm"] = field(
        default="absorbing", metadata={"help": "Strategy, with its default settings and the model's noise."}
    )
    seed: int = field(default=0, metadata={"help": "Same seed, same text."})
    output: str = field(default="trajectory.html", metadata={"help": "File to write, .html or .gif."})


class Cell(NamedTuple):
    """What a frame shows at a position; `look` is "given", "masked", "written" or "taken"."""

    text: str
    look: str
    color: str = ""


def step_color(fraction: float) -> str:
    """A light colour from blue, the first step, over green to red, the last."""
    rgb = colorsys.hls_to_rgb(0.62 * (1 - fraction), 0.82, 0.75)
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


def trajectory_frames(tokenizer, sequence, trajectory, prompt_ids=None) -> list[tuple[str, list[Cell]]]:
    """
    A label and a cell for each position, before the first step and after each that changed something. The canvas
    before is `prompt_ids` [seq], by default `sequence` [seq] with masks where the trajectory writes.
    """

    def text_of(token):
        return "" if token == tokenizer.mask_token_id else tokenizer.decode([token]).strip()

    start = prompt_ids
    if start is None:
        start = sequence.cpu().index_fill(0, trajectory.positions, tokenizer.mask_token_id)
    is_open = (start == tokenizer.mask_token_id).index_fill(0, trajectory.positions, True)
    looks = ["masked" if masked else "given" for masked in is_open.tolist()]
    cells = [Cell(text_of(token), look) for token, look in zip(start.tolist(), looks)]
    frames, steps = [("start", list(cells))], trajectory.steps.unique().tolist()
    for i, step in enumerate(steps):
        now = trajectory.steps == step
        for position, token in zip(trajectory.positions[now].tolist(), trajectory.token_ids[now].tolist()):
            if token == tokenizer.mask_token_id:  # the text stays, to be struck through
                cells[position] = Cell(cells[position].text, "taken")
            else:
                cells[position] = Cell(text_of(token), "written", step_color(i / max(1, len(steps) - 1)))
        label = f"forward pass {step + 1} of {steps[-1] + 1}, t = {trajectory.times[now][0]:.3f}"
        frames.append((label, list(cells)))
    return frames


def trajectory_to_html(tokenizer, sequence, trajectory, prompt_ids=None) -> str:
    """A web page that plays `trajectory`, of a text with the ids `sequence` [seq], and needs no other file."""
    frames = trajectory_frames(tokenizer, sequence, trajectory, prompt_ids)
    spans, data, before = [], [], [None] * len(sequence)
    for i, cell in enumerate(frames[-1][1]):
        width = max(1, *(len(cells[i].text) for _, cells in frames))  # of its longest text, so that nothing moves
        style = f"min-width: {width}ch; background: {cell.color}"
        spans.append(f'<span class="{cell.look}" style="{style}">{html.escape(cell.text) or "&nbsp;"}</span>')
    for label, cells in frames:
        data.append((label, [(i, *cell) for i, cell in enumerate(cells) if cell != before[i]]))
        before = cells
    data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no token ends the script
    return PAGE.substitute(last=len(frames) - 1, spans="\n".join(spans), frames=data)


def trajectory_to_gif(path, tokenizer, sequence, trajectory, prompt_ids=None, width: int = 800):
    """Writes a GIF of `width` pixels that plays `trajectory`, of a text with the ids `sequence` [seq]."""
    from matplotlib.font_manager import findfont  # its font has more than ASCII
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(findfont("DejaVu Sans"), 16)
    frames = trajectory_frames(tokenizer, sequence, trajectory, prompt_ids)
    boxes, x, y, images = [], 10, 44, []
    for texts in zip(*([cell.text for cell in cells] for _, cells in frames)):
        size = max(14, *(font.getlength(text) for text in texts)) + 8
        x, y = (10, y + 30) if x + size > width - 10 else (x, y)
        boxes.append((x, y, x + size, y + 25))
        x += size + 4
    for label, cells in frames:
        image = Image.new("RGB", (width, y + 38), "white")
        draw = ImageDraw.Draw(image)
        draw.text((10, 10), label, "#555555", font)
        for cell, box in zip(cells, boxes):
            ink, edge = ("#b00020", "#b00020") if cell.look == "taken" else ("#111111", "#bbbbbb")
            draw.rounded_rectangle(box, 4, cell.color or ("#e4e4e4" if cell.look == "given" else "white"), edge)
            middle = (box[1] + box[3]) / 2
            draw.text(((box[0] + box[2]) / 2, middle), cell.text, ink, font, anchor="mm")
            if cell.look == "taken":
                draw.line((box[0] + 4, middle, box[2] - 4, middle), ink)
        images.append(image)
    durations = [max(60, min(400, 12000 // len(frames)))] * (len(frames) - 1) + [3000]  # milliseconds
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0)


def main():
    (args,) = HfArgumentParser(DrawTrajectoryArguments).parse_args_into_dataclasses()
    if Path(args.output).suffix not in (".html", ".gif"):
        raise ValueError(f"`output` must end with .html or .gif, got {args.output!r}.")
    logging.disable_progress_bar()
    pipe = TextDiffusionPipeline.from_pretrained(args.model)
    schedulers = {"confidence": ConfidenceUnmaskingScheduler, "remdm": ReMDMScheduler}
    pipe.scheduler = schedulers.get(args.scheduler, AbsorbingStateScheduler).from_config(pipe.scheduler.config)
    output = pipe(
        args.prompt,
        gen_length=args.gen_length,
        num_inference_steps=args.num_inference_steps,
        generator=torch.Generator().manual_seed(args.seed),
        return_trajectory=True,
    )
    text, trajectory = output.sequences[0], output.trajectory[0]
    if args.output.endswith(".html"):
        Path(args.output).write_text(trajectory_to_html(pipe.tokenizer, text, trajectory), encoding="utf-8")
    else:
        trajectory_to_gif(args.output, pipe.tokenizer, text, trajectory)
    print(f"{output.texts[0]}\n\n{len(trajectory.steps.unique())} steps are drawn in {args.output}")


if __name__ == "__main__":
    main()
