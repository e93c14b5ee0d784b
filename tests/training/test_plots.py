"""The picture of a training run shows all that was logged."""

from diffusers_text.training.plots import draw_training

TRAINING = [{"step": step, "bound": 6 - step / 10, "masked_cross_entropy": 6.2 - step / 10} for step in (10, 20)]


def test_every_evaluation_set_has_its_curve(tmp_path):
    pictures = []
    for names in ([], ["eval_bound"], ["eval_bound", "eval_prose_bound"], ["eval_bound_bits"]):
        log = [*TRAINING, *({"step": step, name: 5.0 + i} for i, name in enumerate(names) for step in (10, 20))]
        draw_training(log, tmp_path / "loss.png")
        pictures.append((tmp_path / "loss.png").read_bytes())
    nothing, one, two, bits = pictures
    assert len({nothing, one, two}) == 3
    assert bits == nothing  # is the bound in another unit
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_an_empty_log_is_a_picture_as_well(tmp_path):
    draw_training([], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
