"""How the compiler writes kernels that reduce rows, by its own records of what a kernel reads. The kernels run on GPUs
alone: benchmarks/RESULTS.md.
"""

from types import SimpleNamespace

import pytest
import sympy
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.dependencies import MemoryDep
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


def test_compiled_blocks_are_written_so(monkeypatch):
    """Choices name themselves, so that a kept graph of other ones is not taken for theirs."""
    monkeypatch.setattr(inductor, "inductor_choices_class", None)
    compilation.compile_units(nn.Sequential(), ())
    assert inductor.inductor_choices_class is not None
    choices = inductor.inductor_choices_class()
    assert isinstance(choices, RowsInRegisters)
    assert str(LONGEST_ROW) in choices.uuid()
