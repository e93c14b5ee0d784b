"""The scheduler as a component: times, noise, plans, configs, errors."""

import itertools
import json

import pytest
import torch
from scipy.stats import beta, kstest
from toys import COUNTS, MASK, assert_follows, seeded

from diffusers_text import AbsorbingStateScheduler

SPINDLE = {"schedule": "spindle", "token_counts": COUNTS}


def scheduler_of(**kwargs):
    return AbsorbingStateScheduler(
        **{"mask_token_id": MASK, "vocab_size": 8, "suppressed_token_ids": [0, 1, 2], **kwargs}
    )


def logits_of(sample):
    """Some logits that depend on the position only."""
    return torch.sin(torch.arange(sample.numel() * 8)).view(-1, 8) * 3


def run(scheduler, sample, steps, generator=None, **kwargs):
    """The event-driven loop on fixed logits; returns the canvas and the number of forward passes."""
    scheduler.set_timesteps(steps)
    logits, passes = logits_of(sample), 0
    while True:
        positions, timestep = scheduler.next_positions(sample, generator)
        if not len(positions):
            return sample, passes
        sample = scheduler.step(
            logits[positions], timestep, sample, positions=positions, generator=generator, **kwargs
        ).prev_sample
        passes += 1


# --- Times and noise ---


def test_times_are_stratified_and_each_is_uniform():
    scheduler = scheduler_of()
    generator = torch.Generator().manual_seed(0)
    times = torch.stack([scheduler.sample_timesteps(8, generator=generator) for _ in range(4000)])
    assert ((times > 0) & (times <= 1)).all()
    assert ((times * 8).ceil().sort(dim=1).values == torch.arange(1, 9)).all()  # one in each stratum
    for row in times.T:  # uniform whatever the row's place: moments of U(0, 1)
        assert abs(row.mean() - 0.5) < 0.02
        assert abs(row.var() - 1 / 12) < 0.01


def test_times_on_the_grid_and_cut():
    generator = torch.Generator().manual_seed(0)
    times = scheduler_of().sample_timesteps(1000, generator=generator, num_steps=4)
    assert set(times.tolist()) == {0.25, 0.5, 0.75, 1.0}
    assert [(times == t).sum().item() for t in (0.25, 0.5, 0.75, 1.0)] == [250] * 4
    assert scheduler_of().sample_timesteps(1000, time_epsilon=0.1).min() >= 0.1


def test_noise_leaves_fixed_positions_alone():
    sample = torch.tensor([[2, 5, 6, 3, 0]])
    maskable = torch.tensor([[False, True, True, True, False]])
    noisy = scheduler_of().add_noise(sample, torch.ones(1), maskable=maskable)
    assert noisy.tolist() == [[2, MASK, MASK, MASK, 0]]


@pytest.mark.parametrize("kwargs", [{}, SPINDLE])
def test_noise_of_a_row_depends_on_neither_batch_nor_padding(kwargs):
    scheduler = scheduler_of(**kwargs)
    sample, times = torch.randint(5, 8, (3, 20)), torch.tensor([0.3, 0.5, 0.7])
    generators = lambda: [torch.Generator().manual_seed(i) for i in range(3)]  # noqa: E731
    together = scheduler.add_noise(sample, times, generator=generators())
    for i, generator in enumerate(generators()):
        alone = scheduler.add_noise(sample[i : i + 1, :7], times[i : i + 1], generator=[generator])
        assert alone.tolist() == together[i : i + 1, :7].tolist()


# --- The reverse process ---


@pytest.mark.parametrize("kwargs", [{}, {"schedule": "cosine"}, SPINDLE, {**SPINDLE, "spindle_mean": "sentence"}])
@pytest.mark.parametrize("steps", [None, 1, 3, 12, 60, 1000])
def test_no_mask_is_left_and_revealed_positions_stay(kwargs, steps):
    scheduler = scheduler_of(**kwargs)
    sample = torch.full((4, 12), MASK)
    sample[1, 4:7] = 6
    sample[2, :] = 5
    generator = torch.Generator().manual_seed(0)
    scheduler.set_timesteps(steps)
    logits, passes = logits_of(sample), 0
    while True:
        positions, timestep = scheduler.next_positions(sample, generator)
        if not len(positions):
            break
        previous = sample
        sample = scheduler.step(
            logits[positions], timestep, sample, positions=positions, generator=generator
        ).prev_sample
        assert ((sample == previous) | (previous == MASK)).all()
        passes += 1
    assert not torch.isin(sample, torch.tensor([0, 1, 2, MASK])).any()
    assert sample[2].tolist() == [5] * 12
    assert passes <= (steps or 10_000)
    if not scheduler.noise.token_dependent:
        assert passes <= min(steps or 12, 12)


@pytest.mark.parametrize("kwargs", [{}, SPINDLE])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_own_loop_leaves_no_mask(kwargs, steps):
    scheduler = scheduler_of(**kwargs)
    sample = torch.full((2, 5), MASK)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == sorted(scheduler.timesteps.tolist(), reverse=True)
    assert scheduler.timesteps[0] == 1
    for t in scheduler.timesteps:
        output = scheduler.step(logits_of(sample).view(2, 5, 8), t, sample)
        assert not (output.pred_original_sample == MASK).any()
        sample = output.prev_sample
    assert not (sample == MASK).any()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-300])
def test_temperature_zero_is_the_argmax_at_the_revealed_positions(temperature):
    scheduler = scheduler_of(temperature=temperature)
    sample = torch.full((2, 6), MASK)
    found, _ = run(scheduler, sample, 3)
    logits = logits_of(sample).clone()
    logits[:, [0, 1, 2, MASK]] = -torch.inf
    assert found.flatten().tolist() == logits.argmax(-1).tolist()


def test_ids_beyond_the_tokenizer_are_never_sampled():
    scheduler = scheduler_of(vocab_size=6)
    sample = torch.full((50, 20), MASK)
    found, _ = run(scheduler, sample, None)
    assert set(found.flatten().tolist()) <= {3, 5}


@pytest.mark.parametrize("kwargs", [{}, SPINDLE])
@pytest.mark.parametrize("steps", [None, 4])
def test_a_row_does_not_depend_on_the_others_with_its_own_generator(kwargs, steps):
    scheduler = scheduler_of(**kwargs)
    sample = torch.full((3, 6), MASK)
    sample[1, 2:] = 7
    generators = lambda: [torch.Generator().manual_seed(i) for i in range(3)]  # noqa: E731
    logits = torch.sin(torch.arange(6 * 8)).view(6, 8) * 3

    def finish(sample, generator):
        scheduler.set_timesteps(steps)
        while True:
            positions, timestep = scheduler.next_positions(sample, generator)
            if not len(positions):
                return sample
            sample = scheduler.step(
                logits[positions % 6], timestep, sample, positions=positions, generator=generator
            ).prev_sample

    together = finish(sample, generators())
    for i, generator in enumerate(generators()):
        assert finish(sample[i : i + 1], [generator]).tolist() == together[i : i + 1].tolist()


@pytest.mark.parametrize("steps", [None, 1000])
def test_rewritten_canvas_is_planned_anew(steps):
    """A caller may fill a position in or mask it again between two steps."""
    scheduler = scheduler_of()
    sample = torch.full((1, 4), MASK)
    scheduler.set_timesteps(steps)
    positions, _ = scheduler.next_positions(sample)
    sample[0, positions[0]] = 5
    again, times = scheduler.next_positions(sample)
    assert again.tolist() != positions.tolist()
    sample = scheduler.step(torch.zeros(1, 8), times, sample, positions=again).prev_sample
    sample[0, positions[0]] = MASK
    seen = []
    while True:
        positions, times = scheduler.next_positions(sample)
        if not len(positions):
            break
        seen += positions.tolist()
        sample = scheduler.step(torch.zeros(len(positions), 8), times, sample, positions=positions).prev_sample
    assert sorted(seen) == sorted(set(range(4)) - set(again.tolist()))


@pytest.mark.parametrize("temperature", [1e39, 1e300])
def test_a_huge_temperature_draws_uniformly_from_what_may_be_sampled(temperature):
    found, _ = run(scheduler_of(), torch.full((50, 40), MASK), None, temperature=temperature)
    shares = torch.bincount(found.flatten(), minlength=8) / found.numel()
    assert shares[[0, 1, 2, MASK]].sum() == 0
    assert (shares[[3, 5, 6, 7]] - 0.25).abs().max() < 0.05


def test_its_own_timesteps_are_on_its_grid_however_many():
    scheduler = scheduler_of()
    scheduler.set_timesteps(50_000)
    for t in scheduler.timesteps[::9_973]:
        sample = torch.full((1, 2), MASK)
        assert scheduler.step(torch.zeros(1, 2, 8), t, sample).prev_sample.shape == (1, 2)


def test_tuple_output_and_passed_logits():
    scheduler = scheduler_of()
    scheduler.set_timesteps(2)
    sample, logits = torch.full((1, 3), MASK), torch.randn(1, 3, 8)
    prev_sample, pred_original_sample, pred_logits = scheduler.step(logits, 1.0, sample, return_dict=False)
    assert prev_sample.shape == pred_original_sample.shape == (1, 3)
    assert pred_logits is logits


# --- Configs ---


def test_round_trip_through_another_config_keeps_everything(tmp_path):
    first = scheduler_of(**SPINDLE, spindle_lambda=0.5, corpus="toy", top_k=5, gen_length=17, tilt=False)
    second = AbsorbingStateScheduler.from_config(first.config, schedule="cosine")
    assert second.config.schedule == "cosine"
    assert second.config.token_counts == COUNTS
    back = AbsorbingStateScheduler.from_config(second.config, schedule="spindle")
    first.save_pretrained(tmp_path)
    loaded = AbsorbingStateScheduler.from_pretrained(tmp_path)
    again = AbsorbingStateScheduler.from_config(
        AbsorbingStateScheduler.from_config(loaded.config, schedule="linear").config, schedule="spindle"
    )
    for other in (back, loaded, again):
        visible = lambda config: {k: v for k, v in config.items() if not k.startswith("_")}  # noqa: E731
        assert visible(other.config) == visible(first.config)
        ids = torch.arange(8)[None]
        assert torch.equal(other.noise.token_offsets(ids, ids), first.noise.token_offsets(ids, ids))
    assert json.loads((tmp_path / "scheduler_config.json").read_text())["token_counts"] == COUNTS


def test_repr_is_short_and_says_the_schedule():
    text = repr(AbsorbingStateScheduler(schedule="spindle", token_counts=[1] * 30_000))
    assert len(text) < 1000
    assert "'spindle'" in text


def test_the_paper_s_defaults():
    scheduler = AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS)
    assert scheduler.config.spindle_lambda == 0.3
    assert scheduler.config.spindle_information == "surprisal"


def test_a_call_changes_no_config():
    scheduler = scheduler_of()
    before = dict(scheduler.config)
    run(scheduler, torch.full((1, 4), MASK), 2, temperature=0.5, top_k=2, top_p=0.9)
    assert dict(scheduler.config) == before


# --- Errors ---


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"schedule": "sigmoid"}, "`schedule` must be one of .* got 'sigmoid'"),
        ({"schedule": "spindle"}, "count_tokens"),
        (
            {"schedule": "spindle", "token_counts": [1, 2], "vocab_size": 3},
            "`token_counts` has 2 entries for a vocabulary of 3: call `count_tokens",
        ),
        ({"token_counts": [0, 0]}, "`token_counts` must be"),
        ({"token_counts": [1.5]}, "`token_counts` must be"),
        ({"token_counts": [-1, 2]}, "`token_counts` must be"),
        ({"spindle_lambda": 1.5}, r"`spindle_lambda` must lie in \[0, 1\], got 1.5"),
        ({"spindle_information": "entropy"}, "`spindle_information` must be one of"),
        ({"spindle_mean": "batch"}, "`spindle_mean` must be one of"),
        ({"power": 0}, "`power` must be > 0"),
        ({"sigma_min": 30.0}, "sigma_min < sigma_max"),
        ({"mask_token_id": -1}, "`mask_token_id` must be an integer >= 0, got -1"),
        ({"gen_length": 0}, "`gen_length` must be an integer >= 1, got 0"),
        ({"vocab_size": 1.0}, "`vocab_size` must be an integer >= 1, got 1.0"),
        ({"temperature": -1.0}, "`temperature` must be a finite number >= 0, got -1.0"),
        ({"top_k": -1}, "`top_k` must be None or an integer >= 0, got -1"),
        ({"top_p": 1.5}, r"`top_p` must be None or a number in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_configs_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AbsorbingStateScheduler(**kwargs)


def test_wrong_calls_are_named():
    scheduler = scheduler_of()
    sample = torch.full((2, 3), MASK)
    for steps in (0, -1, 3.5, True, "5"):
        with pytest.raises(ValueError, match="`num_inference_steps` must be an integer >= 1"):
            scheduler.set_timesteps(steps)
    with pytest.raises(ValueError, match="needs `positions`"):
        scheduler.step(torch.zeros(2, 3, 8), 1.0, sample)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match="one of `scheduler.timesteps`"):
        scheduler.step(torch.zeros(2, 3, 8), 0.3, sample)
    with pytest.raises(ValueError, match="`logits` must have shape"):
        scheduler.step(torch.zeros(2, 4, 8), 1.0, sample)
    with pytest.raises(ValueError, match="`logits` hold NaN"):
        scheduler.step(torch.full((2, 3, 8), float("nan")), 1.0, sample)
    with pytest.raises(ValueError, match="infinity"):
        scheduler.step(torch.full((2, 3, 8), float("inf")), 1.0, sample)
    with pytest.raises(ValueError, match="`top_p`"):
        scheduler.step(torch.zeros(2, 3, 8), 1.0, sample, top_p=0.0)
    with pytest.raises(ValueError, match="LongTensor"):
        scheduler.next_positions(sample.float())
    scheduler.next_positions(sample)
    with pytest.raises(ValueError, match="set_timesteps"):
        scheduler.next_positions(sample[:1])
    with pytest.raises(ValueError, match="`positions` must be those of the last `next_positions`"):
        scheduler_of().step(torch.zeros(1, 8), 1.0, sample, positions=torch.tensor([0]))
    with pytest.raises(ValueError, match="`generator` has 1 generators for 2 rows"):
        scheduler.add_noise(sample, torch.ones(2), generator=[torch.Generator()])
    for wrong in (torch.ones(3), torch.tensor([500, 3]), 0.5):
        with pytest.raises(ValueError, match=r"`timesteps` must be a float tensor of shape \[2\]"):
            scheduler.add_noise(sample, wrong)
    for value in (-1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"`timesteps` must lie in \[0, 1\]"):
            scheduler.add_noise(sample, torch.tensor([0.5, value]))
    with pytest.raises(ValueError, match="`input_ids` are required"):
        scheduler_of(**SPINDLE).mask_probability(torch.ones(2))
    with pytest.raises(ValueError, match=r"token_settings\(tokenizer\)"):
        AbsorbingStateScheduler().add_noise(sample, torch.ones(2))
    with pytest.raises(ValueError, match=r"`time_epsilon` must lie in \[0, 1\)"):
        scheduler.sample_timesteps(2, time_epsilon=1.0)
    with pytest.raises(ValueError, match="off the grid"):
        scheduler.sample_timesteps(2, num_steps=4, time_epsilon=0.1)
    for batch_size in (0, 2.0):
        with pytest.raises(ValueError, match="`batch_size`"):
            scheduler.sample_timesteps(batch_size)


# --- Noise by count ---


@pytest.mark.parametrize("schedule", ["linear", "cosine", "geometric"])
def test_noise_by_count_is_noise_in_time_seen_from_its_counts(schedule):
    """Counts uniform: each set of its size alike, and g(t) uniform, with the law of times given the count."""
    scheduler = AbsorbingStateScheduler(mask_token_id=MASK, schedule=schedule)
    n, maskable = 60_000, torch.tensor([[False, True, True, True]])
    counts = torch.randint(1, 4, (n,), generator=seeded(1))
    noisy, times = scheduler.add_noise_by_count(
        torch.full((n, 4), 5), counts, maskable=maskable.expand(n, 4), generator=seeded(2)
    )
    masked = noisy == MASK
    assert not masked[:, 0].any()
    assert masked.sum(dim=1).tolist() == counts.tolist()
    for count in (1, 2):
        chosen = masked[counts == count][:, 1:].long()
        law = {pattern: 1 / 3 for pattern in itertools.product([0, 1], repeat=3) if sum(pattern) == count}
        assert_follows(chosen.tolist(), law)
    level = scheduler.mask_probability(times).squeeze(1)
    assert kstest(level.numpy(), "uniform").pvalue > 1e-4
    for count in (1, 2, 3):
        assert kstest(level[counts == count].numpy(), beta(count, 4 - count).cdf).pvalue > 1e-4


def test_noise_by_count_of_a_row_depends_on_its_generator_alone():
    scheduler = AbsorbingStateScheduler(mask_token_id=MASK)
    sample, counts = torch.full((2, 6), 5), torch.tensor([2, 3])
    noisy, times = scheduler.add_noise_by_count(sample, counts, generator=[seeded(1), seeded(2)])
    alone, time = scheduler.add_noise_by_count(sample[1:], counts[1:], generator=[seeded(2)])
    assert torch.equal(noisy[1:], alone)
    assert torch.equal(times[1:], time)
    assert (times > 0).all()


def test_noise_by_count_names_what_is_wrong():
    scheduler, sample = AbsorbingStateScheduler(mask_token_id=MASK), torch.full((2, 3), 5)
    for counts in ([0, 1], [1, 4]):
        with pytest.raises(ValueError, match=r"`counts` must lie between 1 and \[3, 3\]"):
            scheduler.add_noise_by_count(sample, torch.tensor(counts))
    with pytest.raises(ValueError, match=r"`counts` must be a LongTensor of shape \[2\]"):
        scheduler.add_noise_by_count(sample, torch.tensor([1.0, 2.0]))
    nothing, times = scheduler.add_noise_by_count(
        sample, torch.tensor([0, 3]), maskable=torch.tensor([[False] * 3, [True] * 3])
    )
    assert (nothing == MASK).sum(dim=1).tolist() == [0, 3]
    assert times.isfinite().all()
    spindle = AbsorbingStateScheduler(mask_token_id=MASK, schedule="spindle", token_counts=COUNTS)
    with pytest.raises(ValueError, match="'spindle' depends on the token"):
        spindle.add_noise_by_count(sample, torch.tensor([1, 1]))
