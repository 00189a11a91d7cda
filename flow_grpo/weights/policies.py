"""The policies that live in one transformer: the trained one, and the reference it started from."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from ml_collections import ConfigDict
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from flow_grpo.base import rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import stochastic_rounding
from flow_grpo.weights import fsdp_utils, lora_files, quantisation
from flow_grpo.weights.ema import Ema


def attach(transformer: nn.Module, lora, targets: tuple[str, ...]) -> None:
    """Choose what is trained: a new LoRA adapter `default` on `targets`, or all weights where lora.rank is 0."""
    transformer.requires_grad_(lora.rank == 0)
    if lora.rank:
        with next(transformer.parameters()).device:  # on the meta device peft's own first weights cost no time
            transformer.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets)))


def targets(lora, family: type[FlowModel]) -> tuple[str, ...]:
    """Ends of the names of the layers that config.lora adapts."""
    return tuple(lora.targets) or family.LORA_TARGETS


def check_targets(lora, transformer: nn.Module, family: type[FlowModel]) -> None:
    """Raises UserError for an entry of lora.targets that is the end of no linear layer's name, or also of another's."""
    layers = dict(transformer.named_modules())
    for target in lora.targets:
        ends = [layer for name, layer in layers.items() if f".{name}".endswith(f".{target}")]
        if not ends or not all(isinstance(layer, nn.Linear) for layer in ends):
            raise UserError(
                f"config.lora.targets has {quoted(target)}, which is not the end of linear layers' names in "
                f"{family.NAME}; such ends are {', '.join(family.LORA_TARGETS[:12])}"
            )


def adapter_init(lora, seed: int) -> Callable[[str, torch.Size], Tensor]:
    """(parameter name, shape) -> the adapter's first weights: A normal / rank and B zero, or those of lora.path for the
    layers that it adapts. By name, so that every rank and every layout of the weights starts from the same numbers."""

    def init(name: str, shape: torch.Size) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shape)
        return torch.randn(shape, generator=rng.generator(seed, "lora", name)) / lora.rank

    return stored_adapter(lora.path, init) if lora.path else init


def stored_adapter(path: Path | str, otherwise: Callable = lambda name, shape: torch.zeros(shape)) -> Callable:
    """(parameter name, shape) -> the weights of the adapter in a LoRA file; `otherwise` for those of layers that it
    does not adapt."""
    stored = lora_files.weights(path)

    def weight(name: str, shape: torch.Size) -> Tensor:
        known = stored.get(name.replace(".default.", "."))
        return otherwise(name, shape) if known is None else known

    return weight


def check_lora(lora) -> lora_files.Adapter | None:
    """What is in lora.path; None where that is "".

    Raises:
        UserError: it is no LoRA file, or folder of one, of this rank and alpha, or not finite.
    """
    if not lora.path:
        return None
    try:
        file = lora_files.find(lora.path)
    except UserError as error:
        raise UserError(f"lora.path: {error}") from error
    adapter = lora_files.check(file)
    if (adapter.rank, adapter.alpha) != (lora.rank, lora.alpha):
        raise UserError(
            f"{in_one_line(file)} has rank {adapter.rank} and alpha {adapter.alpha}; set lora.rank and lora.alpha to "
            "these"
        )
    return adapter


def predict(
    model: FlowModel, precision: str, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size
) -> Tensor:
    """The model's velocity under the autocast that float32 adapters over weights of `precision` need."""
    dtype = fsdp_utils.DTYPES[precision]
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        return model.velocity(x, t, condition, guidance_scale, size)


def adapters_off(transformer: nn.Module) -> AbstractContextManager:
    """The base model inside this block. Touches nothing but a flag of each adapted layer (peft's own switch would also
    turn requires_grad off and on)."""
    return quantisation.flagged(_adapted_layers(transformer), "_disable_adapters")


def _adapted_layers(transformer: nn.Module) -> list[BaseTunerLayer]:
    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


class MergedWeights:
    """A copy of the weights that an adapter adapts, with the present adapter added: one product per layer instead of
    three.

    For forwards whose velocity enters no log-prob: its last bits differ, in bf16 by stochastic rounding of the sum.
    Weights that are not sharded only.

    Args:
        fp8: a copy of 8 bits, and products of such: half of the memory, less time, other images.
    """

    @torch.no_grad()
    def __init__(self, transformer: nn.Module, fp8: bool = False):
        self.transformer, self.layers = transformer, _adapted_layers(transformer)
        self.base_layers = [_merged_layer(layer, fp8) for layer in self.layers]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The transformer computes with the copy inside this block; outside it, everything is bitwise what it was."""
        self._exchange()
        try:
            with adapters_off(self.transformer), quantisation.products_of_8_bits(self.transformer):
                yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.base_layer, self.base_layers[number] = self.base_layers[number], layer.base_layer


def fast_forwards(config: ConfigDict, transformer: nn.Module) -> Callable:
    """() -> context of the forwards whose velocity enters no log-prob, with the present weights: as
    sample.rollout_weights says."""
    weights = config.sample.rollout_weights
    if "merged" in weights:
        return MergedWeights(transformer, fp8=weights == "merged_fp8").applied
    return partial(quantisation.products_of_8_bits, transformer) if weights == "fp8" else nullcontext


def _merged_layer(layer: BaseTunerLayer, fp8: bool) -> nn.Module:
    base, change = layer.get_base_layer(), layer.get_delta_weight("default")
    if fp8:
        return quantisation.merged_copy(base, change)
    other, total = copy.copy(base), base.weight.float() + change
    if base.weight.dtype != torch.float32:
        total = stochastic_rounding.rounded(total, base.weight.dtype)
    other._parameters = dict(base._parameters, weight=nn.Parameter(total, requires_grad=False))
    return other


class Reference:
    """The policy that the trained one is held to: the present one or, with an interval, the trained policy as it was
    after the last multiple of `interval` optimizer steps.

    A fresh LoRA adapter that is never followed needs no memory for it: the reference is the base. Otherwise a copy of
    what is trained is kept in its own layout (sharded weights stay sharded).

    Args:
        guidance_scale: of the first reference; None = as the policy's. What the reference becomes later is the policy
            as it is trained, so its guidance is the policy's.
    """

    def __init__(
        self, transformer: nn.Module, *, interval: int = 0, guidance_scale: float | None = None, fresh: bool = True
    ):
        self.transformer, self.interval, self.guidance_scale = transformer, interval, guidance_scale
        self.num_moves = 0  # how often it has become the policy
        self.is_fresh = bool(fresh and _adapted_layers(transformer))  # the first reference is the base
        copied = interval or not self.is_fresh
        self.copy = Ema(fsdp_utils.trainable_parameters(transformer)) if copied else None

    def applied(self) -> AbstractContextManager:
        """The transformer is the reference inside this block, and the trained policy, bit for bit, after it."""
        return self.copy.applied() if self.copy else adapters_off(self.transformer)

    def guidance(self, of_policy: float) -> float:
        """The guidance scale of the reference's forwards: its own until it first becomes the policy."""
        return of_policy if self.num_moves or self.guidance_scale is None else self.guidance_scale

    def follow(self, step: int) -> None:
        """Call after every optimizer step with the number taken so far."""
        if self.interval and step % self.interval == 0:
            self.num_moves += 1
            self.copy.move(1.0)

    @torch.no_grad()
    def reset(self) -> bool:
        """Become the first reference again; False where that is not known any more."""
        if not self.is_fresh:
            return False
        for name, weight in self.copy.averages.items():
            if "lora_B" in name:
                weight.zero_()
        self.num_moves = 0
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep, live: nothing where the reference is the first policy."""
        return self.copy.state_dict() if self.interval else {}
