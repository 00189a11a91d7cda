"""Policies of one transformer: the trained one, and the reference that it is held to."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.peft import PeftAdapterMixin
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
from flow_grpo.settings.sections import Lora
from flow_grpo.weights import fsdp_utils, lora_files, quantisation
from flow_grpo.weights.ema import Ema
from flow_grpo.weights.fsdp_utils import AdapterInit


def attach(transformer: nn.Module, lora: Lora | lora_files.Adapter, targets: tuple[str, ...]) -> None:
    """Choose what is trained: a new LoRA adapter `default` on `targets`, or all weights where lora.rank is 0."""
    transformer.requires_grad_(lora.rank == 0)
    if not lora.rank:
        return
    assert isinstance(transformer, PeftAdapterMixin), "only diffusers' own transformers take adapters"
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # it only divides alpha, which may be a fraction
        target_modules=list(targets),
    )
    # On the meta device, if the transformer is there, peft's own first weights cost no time.
    with next(transformer.parameters()).device:
        transformer.add_adapter(settings)


def begins_as_base(lora: Lora) -> bool:
    """Return whether a run's first policy computes what the base does, as a fresh adapter does, so that the base is its
    reference and takes no memory."""
    return lora.rank > 0 and not lora.path


def targets(lora: Lora, family: type[FlowModel]) -> tuple[str, ...]:
    """Return the ends of the names of the layers that config.lora adapts."""
    return tuple(lora.targets) or family.LORA_TARGETS


def check_targets(lora: Lora, transformer: nn.Module, family: type[FlowModel]) -> None:
    """Raise UserError for an entry of lora.targets that ends no layer's name, or the name of another kind of layer."""
    layers = dict(transformer.named_modules())
    for target in lora.targets:
        # With a dot in front, a target matches whole parts of a name alone.
        matching = [layer for name, layer in layers.items() if f".{name}".endswith(f".{target}")]
        if not matching or not all(isinstance(layer, nn.Linear) for layer in matching):
            raise UserError(
                f"config.lora.targets has {quoted(target)}, which is not the end of linear layers' names in "
                f"{family.NAME}; such ends are {', '.join(family.LORA_TARGETS[:12])}"
            )


def adapter_init(lora: Lora, seed: int) -> AdapterInit:
    """Return the adapter's first weights: A normal / rank and B zero, or those of lora.path for the layers that it
    adapts, see `stored_adapter`."""

    def init(name: str, shape: torch.Size) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shape)
        return torch.randn(shape, generator=rng.generator(seed, "lora", name)) / lora.rank

    return stored_adapter(lora.path, lora, init) if lora.path else init


def _zeros(name: str, shape: torch.Size) -> Tensor:
    return torch.zeros(shape)


def stored_adapter(path: Path | str, lora: Lora | lora_files.Adapter, otherwise: AdapterInit = _zeros) -> AdapterInit:
    """Return the weights of the adapter in a LoRA file, and `otherwise` for layers that it does not adapt.

    B is scaled for an adapter of lora.alpha, which then computes what the file does: bit for bit where the two alphas
    are the same, or one is the other times a power of two.

    Args:
        lora: of the adapter that takes the weights; the file has its rank.
    """
    adapter = lora_files.read_adapter(path)
    stored = lora_files.read_weights(path)
    scale = (adapter.alpha / adapter.rank) / (lora.alpha / lora.rank)
    for name, weight in stored.items():
        if ".lora_B." in name:
            stored[name] = weight * scale

    def init(name: str, shape: torch.Size) -> Tensor:
        # peft has the adapter's name, "default", in each parameter's; files have not.
        weight = stored.get(name.replace(".default.", "."))
        if weight is None:
            return otherwise(name, shape)
        return weight

    return init


def check_lora(lora: Lora) -> lora_files.Adapter | None:
    """Return the adapter of lora.path; None where that is "".

    Raises:
        UserError: the path is no LoRA file or folder of one, it has another rank, or is not finite.
    """
    if not lora.path:
        return None
    try:
        file = lora_files.find_file(lora.path)
    except UserError as error:
        raise UserError(f"lora.path: {error}") from error
    adapter = lora_files.check_adapter(file)
    if adapter.rank != lora.rank:
        raise UserError(f"{in_one_line(file)} has rank {adapter.rank}; set lora.rank to it")
    return adapter


def predict(
    model: FlowModel, precision: str, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size
) -> Tensor:
    """Return the model's velocity [B, ...] at x [B, ...] and timesteps t [B], under the autocast of all policies."""
    with autocast(precision, x.device):
        return model.velocity(x, t, condition, guidance_scale, size)


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the autocast that float32 adapters over weights of `precision` need."""
    dtype = fsdp_utils.DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def adapters_off(layers: Sequence[Any]) -> AbstractContextManager:
    """Make adapted layers those of the base model inside this block.

    Only a flag of each layer changes; peft's own switch would also turn requires_grad off and on.
    """
    return quantisation.flagged(layers, "_disable_adapters")


def adapted_layers(transformer: nn.Module) -> list[Any]:
    """Return peft's layers: modules that are a BaseTunerLayer, too."""
    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


class MergedWeights:
    """Copy of the adapted weights with the present adapter added: one product per layer instead of three.

    For forwards whose velocity enters no log-prob: its last bits differ, in bf16 by stochastic rounding of the sum.
    Only for weights that are not sharded.

    Args:
        fp8: copy weights in 8 bits, and multiply in 8 bits: half of the memory, less time, other images.
    """

    @torch.no_grad()
    def __init__(self, transformer: nn.Module, fp8: bool = False):
        self.layers = adapted_layers(transformer)
        self.base_layers = [_merged_layer(layer, fp8) for layer in self.layers]

        # Found once: each forward enters `applied`, and a walk over all modules takes the host milliseconds.
        self._exchange()
        self.eight_bit_layers = quantisation.eight_bit_layers(transformer)
        self._exchange()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the transformer compute with the copy inside this block; after it, everything is bitwise as before."""
        self._exchange()
        try:
            with adapters_off(self.layers), quantisation.products_of_8_bits(self.eight_bit_layers):
                yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.base_layer, self.base_layers[number] = self.base_layers[number], layer.base_layer


def fast_forwards(rollout_weights: str, transformer: nn.Module) -> Callable[[], AbstractContextManager]:
    """Return what makes the context of forwards whose velocity enters no log-prob, with the present weights.

    Args:
        rollout_weights: as sample.rollout_weights.
    """
    if "merged" in rollout_weights:
        return MergedWeights(transformer, fp8=rollout_weights == "merged_fp8").applied
    if rollout_weights == "fp8":
        return partial(quantisation.products_of_8_bits, quantisation.eight_bit_layers(transformer))
    return nullcontext


def _merged_layer(layer: Any, fp8: bool) -> nn.Module:
    """Copy the linear layer below an adapted one, with the adapter's product added to its weight."""
    base = layer.get_base_layer()
    change = layer.get_delta_weight("default")
    if fp8:
        return quantisation.merged_copy(base, change)
    total = base.weight.float() + change
    if base.weight.dtype != torch.float32:
        total = stochastic_rounding.rounded(total, base.weight.dtype)
    # A shallow copy shares the bias and whatever else the layer has; its own dict of parameters has the new weight.
    merged = copy.copy(base)
    merged._parameters = dict(base._parameters, weight=nn.Parameter(total, requires_grad=False))
    return merged


class Reference:
    """Policy that the trained one is held to: the first one or, where it moves, the trained policy as it was after the
    last multiple of `interval` optimizer steps, or after the last one that left it too far away.

    A fresh LoRA adapter whose reference never moves needs no memory for it: the reference is the base. Otherwise the
    trained weights are copied in their own layout (sharded ones stay sharded).

    Args:
        interval: optimizer steps; 0 = no such moves.
        kl_limit: distance of an optimizer step's rows above which the reference moves; 0 = no such moves.
        guidance_scale: of the first reference; None = the policy's. A later reference is the policy as it was trained,
            so it has the policy's guidance.
        fresh: the adapter is new, so that the first reference is the base.
    """

    def __init__(
        self,
        transformer: nn.Module,
        *,
        interval: int = 0,
        kl_limit: float = 0.0,
        guidance_scale: float | None = None,
        fresh: bool = True,
    ):
        self.adapted_layers = adapted_layers(transformer)
        self.interval = interval
        self.kl_limit = kl_limit
        self.moves = bool(interval or kl_limit)
        self.guidance_scale = guidance_scale
        self.num_moves = 0  # times that it has become the policy
        self.is_fresh = bool(fresh and self.adapted_layers)
        self.copy: Ema | None = None
        if self.moves or not self.is_fresh:
            self.copy = Ema(fsdp_utils.trainable_parameters(transformer))

    def applied(self) -> AbstractContextManager:
        """Make the transformer the reference inside this block, and the trained policy, bit for bit, after it."""
        return self.copy.applied() if self.copy else adapters_off(self.adapted_layers)

    def guidance(self, policy_scale: float) -> float:
        """Return the guidance scale of the reference's forwards: its own until it first becomes the policy."""
        if self.guidance_scale is None or self.num_moves:
            return policy_scale
        return self.guidance_scale

    def follow(self, step: int, distance: float) -> None:
        """Call after every optimizer step.

        Args:
            step: number of steps taken so far.
            distance: mean of this step's rows from the reference, the same on all ranks.
        """
        is_due = self.interval > 0 and step % self.interval == 0
        is_far = self.kl_limit > 0 and distance > self.kl_limit
        if self.copy and (is_due or is_far):
            self.num_moves += 1
            self.copy.move(1.0)

    @torch.no_grad()
    def reset(self) -> bool:
        """Become the first reference again, once it has moved. Returns False if its weights are not known any more."""
        if not self.is_fresh:
            return False
        # An adapter whose B is zero computes nothing: the policy is the base again.
        assert self.copy is not None, "a reference without a copy never moves"
        for name, weight in self.copy.averages.items():
            if "lora_B" in name:
                weight.zero_()
        self.num_moves = 0
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint has to keep: none if the reference never moves, since the run then
        makes it again from its base or lora.path."""
        return self.copy.state_dict() if self.copy and self.moves else {}
