"""How the compiler writes kernels that reduce rows, by its own records of what a kernel reads. The kernels run on GPUs
alone: benchmarks/RESULTS.md.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.dependencies import MemoryDep
from torch._inductor.exc import InductorError
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from flow_grpo.kernels import compilation
from flow_grpo.kernels.row_reductions import LONGEST_ROW, RowsInRegisters

ROW, COLUMN = sympy.symbols("row column", integer=True)
WIDTH = 3072


class Kernel(SIMDKernelFeatures):
    """A kernel that reduces all numbers of one read, of 9,216 rows or columns."""

    def __init__(self, index, length):
        super().__init__([], sympy.Integer(9216), sympy.Integer(length))
        self.read = MemoryDep("x", index, (ROW, COLUMN), (sympy.Integer(9216), sympy.Integer(length)))

    def reduction_nodes(self):
        read_writes = SimpleNamespace(reads=[self.read], writes=[])
        return [SimpleNamespace(read_writes=read_writes)]

    def get_reduction_hint(self, tiling_scores=None):
        return ReductionHint.DEFAULT


def holds_a_row(index, length=WIDTH, shared=False):
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        return RowsInRegisters().should_use_persistent_reduction(Kernel(index, length), shared)


@pytest.mark.parametrize(
    "index", [WIDTH * ROW + COLUMN, WIDTH * (ROW // 1024) + COLUMN], ids=["row", "row of an image"]
)
def test_a_row_of_a_models_width_stays_in_registers(index):
    assert holds_a_row(index)


def test_columns_and_long_rows_and_shared_sums_are_the_compilers_choice():
    assert not holds_a_row(9216 * COLUMN + ROW)
    assert holds_a_row(LONGEST_ROW * ROW + COLUMN, LONGEST_ROW)
    assert not holds_a_row(12288 * ROW + COLUMN, 12288)
    assert not holds_a_row(WIDTH * ROW + COLUMN, shared=True)


def test_small_sums_that_the_compiler_would_hold_are_held():
    assert holds_a_row(64 * COLUMN + ROW, 64)


def test_every_thread_compiles_blocks_so():
    """Graphs as they are traced; those of backwards are compiled in autograd's threads."""
    model = nn.Sequential(nn.Linear(8, 8))
    choices = []

    def note(graph):
        choices.append(V.choices)
        raise RuntimeError("kernels, which take seconds, are next")

    def compiled():
        with inductor.patch(post_grad_custom_post_pass=note), pytest.raises(InductorError, match="are next"):
            model(torch.randn(2, 8))

    torch._dynamo.reset()
    compilation.compile_units(model, ("Linear",))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compiled).result()
    assert isinstance(choices[0], RowsInRegisters)


def test_a_kept_graph_of_other_choices_is_not_taken_for_one_of_these():
    """torch 2.11 knows choices by the name of the function that makes them."""
    make = compilation.CHOICES["inductor_choices_class"]
    assert str(LONGEST_ROW) in make.__name__
    assert str(LONGEST_ROW) in make().uuid()
