import pytest
import torch

from bench.weights.changes import ChangesJob, measure_changes, qwen_508m
from bench.weights.holding import Held
from bench.weights.pauses import Paused, longest_gap, step_time
from bench.weights.publishing import Masters, Published
from bench.weights.section import blocked_figures, changed_figure, late_figure, pause_figure, way_figures


def held(*held_s: float, own_bytes: tuple[tuple[float, int], ...] = ((0.0, 0),)) -> Held:
    return Held(
        held_s=dict(enumerate(held_s)),
        first_s=held_s[0],
        own_bytes=list(own_bytes),
        copy_bytes=1_010_000,
        num_bytes=7,
    )


PUBLISHED = Published(
    blocked_s=[0.1, 0.02, 0.03], began_s=[10.0, 20.0, 30.0], copy_s=0.05, today_publish_s=0.6, today_verify_s=0.4
)


def test_the_trainer_is_blocked_against_a_copy_and_against_a_whole_file():
    copied, today = blocked_figures("1 MB", PUBLISHED)
    assert copied.ratio == pytest.approx(0.6) and copied.reached
    assert today.ratio == pytest.approx(0.05) and today.reached


def test_the_way_ends_with_the_last_producer_that_holds_the_policy():
    several = [
        held(5, 10.4, 20.5, 30.5, own_bytes=((1.0, 30_000), (2.0, 5_000), (4.0, 20_000))),
        held(6, 10.5, 20.4, 30.6, own_bytes=((0.5, 1_000), (3.0, 25_000))),
    ]
    one, four, memory = way_figures(1, PUBLISHED, held(5, 10.5, 20.4, 30.6), PUBLISHED, several)
    assert one.measured == pytest.approx(0.5) and one.ratio == pytest.approx(0.5) and one.reached
    assert four.ratio == pytest.approx(1.0)
    assert memory.ratio == pytest.approx(1.055)  # the most at once: 20,000 and 25,000 beside the copy
    assert memory.details["most_of_each_bytes"] == [30_000, 25_000]


def test_joining_late_is_compared_with_reading_the_anchor():
    assert late_figure(200, 100, held(1.5), held(1.0)).ratio == 1.5


def test_a_pause_is_compared_with_the_bare_load():
    paused = Paused(
        weight_bytes=10,
        pause_s=0.012,
        pause_s_max=0.04,
        bare_load_s=0.01,
        token_gap_s=0.018,
        step_s=0.003,
        num_updates=3,
    )
    found = pause_figure("1 MB", paused)
    assert found.ratio == pytest.approx(1.2) and not found.reached
    assert found.details["ratio_of_token_gap"] == pytest.approx(1.5)


def test_the_longest_gap_between_tokens_is_found_around_an_update():
    arrivals = [0.0, 0.1, 0.2, 1.0, 1.1, 5.0]
    assert longest_gap(arrivals, 0.25, 0.9) == pytest.approx(0.8)
    assert longest_gap(arrivals, 0.05, 0.15) == pytest.approx(0.1)
    assert longest_gap([0.5], 0.1, 0.2) is None


def test_tokens_of_one_step_are_no_steps_of_their_own():
    assert step_time([0.0, 0.0001, 0.01, 0.0101, 0.02]) == pytest.approx(0.0099)
    assert step_time([]) == 0.0


def test_larger_steps_change_more_elements_and_bytes():
    def measured(learning_rate: float):
        job = ChangesJob(shapes=((512, 64), (256, 128)), thinned=2, learning_rate=learning_rate, warm_steps=20, steps=2)
        return measure_changes(job)

    small, large = measured(1e-6), measured(1e-4)
    assert 0 < small.changed_frac[0] < 0.05 < 0.2 < large.changed_frac[0]
    assert small.num_bytes[0] < large.num_bytes[0] < large.dense_bytes == 2 * (512 * 64 + 256 * 128) / 2
    assert changed_figure("1e-6", small, 1.0).reached


def test_the_shapes_are_those_of_508_million_parameters():
    assert sum(rows * columns for rows, columns in qwen_508m()) == pytest.approx(508e6, rel=0.02)


def test_the_masters_change_by_the_share_asked_for():
    masters = Masters(200_000)
    before = [weight.bfloat16() for weight in masters.weights]
    masters.change(0.01)
    after = [weight.bfloat16() for weight in masters.weights]
    changed = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(after, before, strict=True))
    assert changed == pytest.approx(1000, rel=0.03)
