"""`without_kernels.py SCRIPT ARGUMENT ...` runs a script whose graphs are traced and guarded, but not compiled any
further, which takes minutes on each of two ranks."""

import runpy
import sys
from functools import partial

import torch

torch.compile = partial(torch.compile, backend="eager")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
