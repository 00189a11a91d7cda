"""Runs in this process leave wandb out, whose own process takes a quarter of a small run's time. What it records is
tested in test_dashboards.py, and by the runs that tests start as commands (`ENV` in small.py)."""

import gc
import os

import warm

os.environ["WANDB_MODE"] = "disabled"


def pytest_collection_finish():
    """What has been imported stays: to look through it again takes a tenth of a small run's time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    warm.PARENT.stop()
