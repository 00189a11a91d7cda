"""Which GPUs this process may give to processes that it starts."""

import os
import shutil
import subprocess


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES of another one names them: its own entries where
    it is set, else the numbers of all of the machine's. [] on a machine without one. Does not import torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return gpu_names(listed)
    if not shutil.which("nvidia-smi"):
        return []
    lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
    gpu_lines = [line for line in lines if line.startswith("GPU ")]
    return [str(number) for number in range(len(gpu_lines))]


def gpu_names(listed: str) -> list[str]:
    """Return the entries of a list such as "0,1"."""
    return [name.strip() for name in listed.split(",") if name.strip()]
