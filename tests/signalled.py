"""`signalled.py ARGUMENT ...` runs train_qwenimage_pr.py with the reward of brightness.py, and sends itself SIGTERM in
the second epoch's update, after its first optimizer step."""

import functools
import os
import runpy
import signal

import train_qwenimage
from brightness import brightness

from flow_grpo import rewards

add_gradients = train_qwenimage.add_gradients


@functools.wraps(add_gradients)
def signalling(run, rows):
    if run.epoch == 1 and run.step > run.first_step:
        os.kill(os.getpid(), signal.SIGTERM)
    add_gradients(run, rows)


if __name__ == "__main__":
    rewards.register("brightness", brightness)
    train_qwenimage.add_gradients = signalling
    runpy.run_path("scripts/train_qwenimage_pr.py", run_name="__main__")
