"""How the compiler writes kernels that reduce rows: a norm, the largest number of a row."""

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

# Numbers of the longest row that a kernel holds in registers: a width of these models. Their MLPs have four times as
# many, which are faster read again than held (H200). Of kernels over blocks of two dimensions PyTorch knows none that
# holds more.
LONGEST_ROW = 4_096


class RowsInRegisters(InductorChoices):
    """PyTorch's choices, but rows of up to LONGEST_ROW numbers stay in registers. By PyTorch's own choice a row of more
    than 1,024 is read from memory again for each sum over it, and for what is made of the sums."""

    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """Tell whether a kernel holds all numbers of a reduction at once.

        Args:
            cooperative_reduction: several blocks of threads share a reduction.
        """
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST_ROW)
        return fits and not cooperative_reduction and _reads_rows(features)

    def uuid(self) -> str:
        """Return what the key of a kept graph says of these choices."""
        return f"rows of up to {LONGEST_ROW} in registers"


def _reads_rows(features: SIMDKernelFeatures) -> bool:
    """Tell whether all that is reduced lies in memory side by side. Columns would be read number by number."""
    for node in features.reduction_nodes():
        for read in node.read_writes.reads:
            if not (isinstance(read, MemoryDep) and read.stride1_for_last_dim()):
                return False
    return True
