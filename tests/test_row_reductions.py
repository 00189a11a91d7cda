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
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.exc import InductorError
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from flow_grpo.kernels import compilation
from flow_grpo.kernels.row_reductions import LONGEST_ROW, RowsInRegisters

ROW, COLUMN = sympy.symbols("row column", integer=True)
WIDTH = 3072
OF_ROWS = WIDTH * ROW + COLUMN
OF_COLUMNS = 9216 * COLUMN + ROW
WHOLE = object()  # a read of what has no index


class Kernel(SIMDKernelFeatures):
    """A kernel whose nodes reduce what they read of 9,216 rows or columns, by the indices of each node's reads."""

    def __init__(self, nodes, length):
        super().__init__([], sympy.Integer(9216), sympy.Integer(length))
        self.nodes = []
        for indices in nodes:
            self.nodes.append([self.read(index) for index in indices])

    def read(self, index):
        """One of a buffer by an index, or of the whole of it."""
        if index is WHOLE:
            return StarDep("x")
        return MemoryDep("x", index, (ROW, COLUMN), (sympy.Integer(9216), self.reduction_numel))

    def reduction_nodes(self):
        return [SimpleNamespace(read_writes=SimpleNamespace(reads=reads, writes=[])) for reads in self.nodes]

    def get_reduction_hint(self, tiling_scores=None):
        return ReductionHint.DEFAULT


def holds(nodes, length=WIDTH, shared=False):
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        return RowsInRegisters().should_use_persistent_reduction(Kernel(nodes, length), shared)


def holds_a_row(index, length=WIDTH, shared=False):
    return holds([[index]], length, shared)


@pytest.mark.parametrize("index", [OF_ROWS, WIDTH * (ROW // 1024) + COLUMN], ids=["row", "row of an image"])
def test_a_row_of_a_models_width_stays_in_registers(index):
    assert holds_a_row(index)


def test_columns_and_long_rows_and_shared_sums_are_the_compilers_choice():
    assert not holds_a_row(OF_COLUMNS)
    assert holds_a_row(LONGEST_ROW * ROW + COLUMN, LONGEST_ROW)
    assert not holds_a_row(12288 * ROW + COLUMN, 12288)
    assert not holds_a_row(OF_ROWS, shared=True)


@pytest.mark.parametrize("other", [OF_COLUMNS, WHOLE], ids=["columns", "no index"])
def test_a_row_is_held_only_where_all_that_a_kernel_reduces_lies_side_by_side(other):
    scale_of_a_row = ROW
    assert holds([[OF_ROWS, scale_of_a_row], [OF_ROWS]])
    assert not holds([[OF_ROWS, other]])
    assert not holds([[OF_ROWS], [other]])


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
