"""The SDE window's place, against tables worked out by hand."""

import pytest
from ml_collections import ConfigDict

from flow_grpo.algorithms.windows import draw_window, window_at


def places(interval, updates, first_last=(0, 8), **how):
    sample = dict(num_steps=10, sde_window_size=4, sde_window_range=first_last, sde_window_interval=interval)
    sample = ConfigDict(sample | how)
    return [tuple(window_at(sample, 0, 0, 0, update)) for update in updates]


def test_a_progressive_window_moves_on_by_one_is_cut_off_at_the_end_and_starts_again_before_it_is_empty():
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
    assert dict(zip(table, places(25, table))) == table


def test_an_interval_and_a_range_of_ones_own():
    table = {0: (1, 2, 3, 4), 2: (1, 2, 3, 4), 3: (2, 3, 4, 5), 9: (4, 5, 6), 15: (6,), 17: (6,), 18: (1, 2, 3, 4)}
    assert dict(zip(table, places(3, table, first_last=(1, 7)))) == table


def test_random_is_uniform_over_the_places_that_fit_and_goes_by_epoch_and_block_not_by_updates():
    windows = [draw_window(0, epoch, block, 4, (0, 8)) for epoch in range(100) for block in range(10)]
    assert all(len(window) == 4 for window in windows)
    counts = [sum(window.start == start for window in windows) for start in range(5)]
    assert sum(counts) == 1000
    assert all(150 < count < 250 for count in counts)
    assert len(set(places(0, range(100)))) == 1


def test_no_window_is_ever_empty_or_outside_its_range():
    for interval in (0, 25):
        for window in places(interval, range(500)):
            assert 1 <= len(window) <= 4
            assert set(window) <= set(range(8))


def test_size_0_is_all_steps_but_the_last():
    assert places(25, [0, 77], sde_window_size=0) == [tuple(range(9))] * 2


def test_a_window_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"5 steps does not fit into steps \[2, 6\)"):
        draw_window(0, 0, 0, 5, (2, 6))
