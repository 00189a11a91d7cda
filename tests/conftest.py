"""Tests see no GPU unless they are told to: golden numbers and two ranks that equal one are a CPU's. Runs in this
process leave wandb out, which takes a quarter of a small run's time; see test_dashboards.py and `ENV` in small.py."""

import functools
import gc
import os
import sys

import pytest

os.environ["WANDB_MODE"] = "disabled"
# Where MKL has AVX2 alone, the bits of a product depend on where in memory its factors lie unless it is told otherwise.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Two processes with as many threads as there are cores wait for each other's: minutes become a quarter of an hour.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Until all tests are collected, which imports everything: to look for garbage meanwhile takes a third of that time.
gc.disable()

# Files whose tests take up to half a minute each, those of `make test-all` more.
LONGEST = ("test_ranks", "test_benchmarks", "test_compiled", "test_packages", "test_signals", "test_fsdp_utils")
LONGEST += ("test_checkpoints",)


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPU, as `make test-gpu` does")


def pytest_configure(config):
    if not config.option.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    import torch  # late: two seconds of the process that hands the tests out

    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu: torch finds no GPU")


def pytest_collection_modifyitems(items):
    """Begin with the longest tests: one that starts last leaves the other process without work."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish():
    """Keep what has been imported: to look through it again takes a tenth of a small run's time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "warm" in sys.modules:
        sys.modules["warm"].server()  # before a test changes anything that its commands would see


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """Settings of a run on a model of two blocks, scored by the brightness of its images."""
    import brightness  # takes, with the next one, five seconds, and few tests need them
    import recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brightness.rewards, "REGISTERED", {})
        brightness.rewards.register("brightness", brightness.brightness, brightness.brightness, limits=(0.0, 1.0))
        how = recorded.shallow_of(recorded.shared(tmp_path_factory.getbasetemp()))
        yield how | dict(reward_fn__shapes=0.0, reward_fn__brightness=1.0)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """(kind) -> one of the runs of recorded.py, for tests that only read it or go on with a copy."""
    import recorded

    return functools.partial(recorded.run_of, recorded.shared(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Settings of a run on preference pairs of 48 prompts, which two blocks drew and whose scores are JPEG's bytes."""
    import recorded

    return recorded.pairs_of(recorded.shared(tmp_path_factory.getbasetemp()))
