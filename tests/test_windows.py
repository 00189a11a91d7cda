"""The SDE window's place, against tables worked out by hand."""

import pytest
from ml_collections import ConfigDict

from flow_grpo.windows import SCHEDULES, draw_window, dwells, window_at


def places(schedule, updates, first_last=(0, 8), **how):
    sample = dict(num_steps=10, sde_window_size=4, sde_window_range=first_last, sde_window_schedule=schedule)
    sample = ConfigDict(sample | dict(sde_window_interval=25, sde_window_stride=1) | how)
    return [tuple(window_at(sample, 0, 0, 0, update)) for update in updates]


def test_progressive_moves_on_by_one_is_cut_off_at_the_end_and_starts_again_before_it_is_empty():
    table = {0: (0, 1, 2, 3), 24: (0, 1, 2, 3), 25: (1, 2, 3, 4), 49: (1, 2, 3, 4), 50: (2, 3, 4, 5)}
    table |= {
        100: (4, 5, 6, 7),
        125: (5, 6, 7),
        150: (6, 7),
        175: (7,),
        199: (7,),
        200: (0, 1, 2, 3),
        225: (1, 2, 3, 4),
    }
    assert dict(zip(table, places("progressive", table))) == table


def test_a_stride_and_a_range_of_ones_own():
    table = {0: (1, 2, 3, 4), 2: (1, 2, 3, 4), 3: (4, 5, 6), 5: (4, 5, 6), 6: (1, 2, 3, 4)}
    how = dict(first_last=(1, 7), sde_window_stride=3, sde_window_interval=3)
    assert dict(zip(table, places("progressive", table, **how))) == table


def test_decay_dwells_from_its_interval_down_to_one():
    by_hand = {0: 10, 1: 8, 2: 7, 3: 6, 4: 4, 5: 3, 6: 2, 7: 1}  # int(10 (1 - c / 7) + c / 7), 41 in all
    assert dwells("decay", range(8), 10) == by_hand
    starts = {0: 0, 9: 0, 10: 1, 17: 1, 18: 2, 25: 3, 30: 3, 31: 4, 35: 5, 38: 6, 39: 6, 40: 7, 41: 0, 51: 1}
    found = places("decay", starts, sde_window_interval=10)
    assert {update: window[0] for update, window in zip(starts, found)} == starts


def test_exp_decay_dwells_alike_up_to_step_13_and_less_from_there():
    by_hand = dict.fromkeys(range(14), 25)  # 25 exp(-0.1 (c - 13)), rounded up
    by_hand |= {14: 23, 15: 21, 16: 19, 17: 17, 18: 16, 19: 14, 20: 13, 21: 12, 22: 11}
    assert dwells("exp_decay", range(23), 25) == by_hand
    starts = {349: 13, 350: 14, 372: 14, 373: 15, 393: 15, 394: 16, 485: 22, 495: 22, 496: 0}
    found = places("exp_decay", starts, first_last=(0, 23), num_steps=25)
    assert {update: window[0] for update, window in zip(starts, found)} == starts


def test_random_is_uniform_over_the_places_that_fit_and_goes_by_epoch_and_block_not_by_updates():
    windows = [draw_window(0, epoch, block, 4, (0, 8)) for epoch in range(100) for block in range(10)]
    assert all(len(window) == 4 for window in windows)
    counts = [sum(window.start == start for window in windows) for start in range(5)]
    assert sum(counts) == 1000
    assert all(150 < count < 250 for count in counts)
    assert len(set(places("random", range(100)))) == 1


def test_no_window_is_ever_empty_or_outside_its_range():
    for schedule in SCHEDULES:
        for window in places(schedule, range(500)):
            assert 1 <= len(window) <= 4
            assert set(window) <= set(range(8))


def test_size_0_is_all_steps_but_the_last():
    assert places("progressive", [0, 77], sde_window_size=0) == [tuple(range(9))] * 2


def test_a_window_that_does_not_fit_and_a_schedule_that_is_not_there():
    with pytest.raises(ValueError, match=r"5 steps does not fit into steps \[2, 6\)"):
        draw_window(0, 0, 0, 5, (2, 6))
    with pytest.raises(ValueError, match="'linear'; there are: random, progressive"):
        dwells("linear", range(3), 1)
