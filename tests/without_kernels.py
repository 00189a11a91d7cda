"""`without_kernels.py SCRIPT ARGUMENT ...` runs a script that compiles graphs, but not their kernels: minutes of a C++
compiler, on each of two ranks."""

import runpy
import sys
from functools import partial

import torch

torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
