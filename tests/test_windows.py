"""The SDE window's place, against tables worked out by hand."""

import pytest
from ml_collections import ConfigDict

from flow_grpo.algorithms.windows import draw_window, window_at


def places(interval, updates, first_last=(0, 8), **how):
    sample = dict(num_steps=10, sde_window_size=4, sde_window_range=first_last, sde_window_interval=interval)
    sample = ConfigDict(sample | how)
    return [window_at(sample, 0, 0, 0, update) for update in updates]


@pytest.mark.parametrize(
    ("interval", "first_last", "table"),
    [
        (25, (0, 8), {0: range(4), 24: range(4), 25: range(1, 5), 49: range(1, 5), 50: range(2, 6), 100: range(4, 8)}),
        (25, (0, 8), {125: range(5, 8), 150: range(6, 8), 175: range(7, 8), 199: range(7, 8), 200: range(4)}),
        (3, (1, 7), {0: range(1, 5), 2: range(1, 5), 3: range(2, 6), 9: range(4, 7), 17: range(6, 7), 18: range(1, 5)}),
    ],
)
def test_a_progressive_window_moves_on_by_one_is_cut_off_at_the_end_and_starts_again(interval, first_last, table):
    assert dict(zip(table, places(interval, table, first_last))) == table


def test_random_is_uniform_over_the_places_that_fit_and_goes_by_epoch_and_block_not_by_updates():
    windows = [draw_window(0, epoch, block, 4, (0, 8)) for epoch in range(100) for block in range(10)]
    assert all(len(window) == 4 for window in windows)
    counts = [sum(window.start == start for window in windows) for start in range(5)]
    assert sum(counts) == 1000
    assert all(150 < count < 250 for count in counts)
    assert len(set(places(0, range(100)))) == 1


def test_size_0_is_all_steps_but_the_last():
    assert places(25, [0, 77], sde_window_size=0) == [range(9)] * 2
