"""The policies that live in one transformer: the trained one, and the reference it started from."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from ml_collections import ConfigDict
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flow_grpo import finite, fsdp_utils, offload, quantised, rng, stochastic_rounding
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.quoting import in_one_line, quoted

LORA_FILE = "pytorch_lora_weights.safetensors"


def attach(transformer: nn.Module, lora, targets: tuple[str, ...]) -> None:
    """Choose what is trained: a new LoRA adapter `default` on `targets`, or all weights where lora.rank is 0."""
    transformer.requires_grad_(lora.rank == 0)
    if lora.rank:
        with next(transformer.parameters()).device:  # on the meta device peft's own first weights cost no time
            transformer.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets)))


def adapter_init(lora, seed: int) -> Callable[[str, torch.Size], Tensor]:
    """(parameter name, shape) -> the adapter's first weights: those of lora.path, or A normal / rank and B zero.

    By name, so that every rank and every layout of the weights starts from the same numbers.
    """
    if lora.path:
        return stored_adapter(lora.path)

    def init(name: str, shape: torch.Size) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shape)
        return torch.randn(shape, generator=rng.generator(seed, "lora", name)) / lora.rank

    return init


def stored_adapter(folder: Path | str) -> Callable[[str, torch.Size], Tensor]:
    """(parameter name, shape) -> the weights of the adapter in a diffusers LoRA folder."""
    stored = _read_lora(folder)
    return lambda name, shape: stored[name.replace(".default.", ".")]


def check_lora(lora) -> None:
    """Raises ValueError unless lora.path ("" is fine) is a diffusers LoRA folder of this rank and alpha, and finite."""
    if lora.rank < 0 or (lora.rank == 0 and lora.path):
        raise ValueError(f"lora.rank is {lora.rank} with lora.path {quoted(lora.path)}: 0 trains the full weights")
    if not lora.path:
        return
    path = Path(lora.path, LORA_FILE)
    name = in_one_line(path)
    if not path.is_file():
        raise ValueError(f"lora.path: {name} does not exist; lora.path is the folder that holds {LORA_FILE}")
    try:
        with safe_open(path, framework="pt") as file:
            stored_settings = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"lora.path: {name} cannot be read: {error}") from error
    rank = stored_settings.get("transformer.r", lora.rank)
    alpha = stored_settings.get("transformer.lora_alpha", lora.alpha)
    if (rank, alpha) != (lora.rank, lora.alpha):
        raise ValueError(f"{name} has rank {rank} and alpha {alpha}; set lora.rank and lora.alpha to these")
    if problem := finite.problem(_read_lora(lora.path)):
        raise ValueError(f"lora.path: {name} cannot be trained on: {problem}")


def _read_lora(folder: Path | str) -> dict[str, Tensor]:
    with safe_open(Path(folder, LORA_FILE), framework="pt") as file:
        return {name.removeprefix("transformer."): file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118


def predict(
    model: FlowModel,
    precision: str,
    x: Tensor,
    t: Tensor,
    condition: Condition,
    guidance_scale: float,
    size: Size,
) -> Tensor:
    """The model's velocity under the autocast that float32 adapters over weights of `precision` need."""
    dtype = fsdp_utils.DTYPES[precision]
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        return model.velocity(x, t, condition, guidance_scale, size)


@contextmanager
def adapters_off(transformer: nn.Module) -> Iterator[None]:
    """The base model inside this block. Touches nothing but a flag of each adapted layer (peft's own switch would also
    turn requires_grad off and on)."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merged(transformer: nn.Module, precision: str = "") -> Callable:
    """Add the present adapter to a copy of the weights it adapts; returns a context manager factory inside which the
    transformer computes with these, one product per layer instead of three.

    For forwards whose velocity enters no log-prob: its last bits differ, in bf16 by stochastic rounding of the sum.
    Weights that are not sharded only. Outside the context everything is bitwise what it was.

    Args:
        precision: "fp8" for a copy of 8 bits, and products of such: half of the memory, less time, other images.

    Raises:
        RuntimeError: on entering the context, if the adapter has changed since.
    """
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    others = [_merged_layer(layer, precision) for layer in layers]
    adapter = [p for name, p in transformer.named_parameters() if "lora_" in name]
    versions = [p._version for p in adapter]  # every write in place counts it up

    @contextmanager
    def use_merged() -> Iterator[None]:
        if [p._version for p in adapter] != versions:
            raise RuntimeError("the adapter has changed since it was merged: merge it again after an update")
        base_layers = [layer.base_layer for layer in layers]
        _set_base_layers(layers, others)
        try:
            with adapters_off(transformer):
                yield
        finally:
            _set_base_layers(layers, base_layers)

    return use_merged


def fast_forwards(config: ConfigDict, transformer: nn.Module) -> Callable:
    """() -> context of the forwards whose velocity enters no log-prob, with the present weights: as
    sample.merge_adapter and sample.fast_precision say."""
    sample = config.sample
    use_merged = merged(transformer, sample.fast_precision) if sample.merge_adapter else nullcontext
    rounds_x = sample.fast_precision and config.base_precision == "8bit"

    @contextmanager
    def fast() -> Iterator[None]:
        with use_merged(), quantised.products_of_8_bits(transformer) if rounds_x else nullcontext():
            yield

    return fast


def _merged_layer(layer: BaseTunerLayer, precision: str) -> nn.Module:
    base, change = layer.get_base_layer(), layer.get_delta_weight("default")
    if precision == "fp8":
        return quantised.merged_copy(base, change)
    other, total = copy.copy(base), base.weight.float() + change
    if base.weight.dtype != torch.float32:
        total = stochastic_rounding.rounded(total, base.weight.dtype)
    other._parameters = dict(base._parameters, weight=nn.Parameter(total, requires_grad=False))
    return other


def _set_base_layers(layers: list[BaseTunerLayer], others: list[nn.Module]) -> None:
    for layer, other in zip(layers, others, strict=True):
        layer.base_layer = other


class Reference:
    """The policy that the trained one is held to: the present one or, with an interval, the trained policy as it was
    after the last multiple of `interval` optimizer steps.

    A fresh LoRA adapter that is never followed needs no memory for it: the reference is the base. Otherwise a copy of
    what is trained is kept in its own layout (sharded weights stay sharded).

    Args:
        guidance_scale: of the first reference; 0 = as the policy's. What the reference becomes later is the policy as
            it is trained, so its guidance is the policy's.
    """

    def __init__(self, transformer: nn.Module, *, interval: int = 0, guidance_scale: float = 0.0, fresh: bool = True):
        self.transformer, self.interval, self.guidance_scale = transformer, interval, guidance_scale
        has_adapter = any(isinstance(module, BaseTunerLayer) for module in transformer.modules())
        copied = interval or not (fresh and has_adapter)
        self.weights = {name: p for name, p in transformer.named_parameters() if p.requires_grad and copied}
        self.copies = {name: p.detach().clone() for name, p in self.weights.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The transformer is the reference inside this block, and the trained policy, bit for bit, after it."""
        if not self.copies:
            with adapters_off(self.transformer):
                yield
            return
        offload.exchange(self.weights, self.copies)
        try:
            yield
        finally:
            offload.exchange(self.weights, self.copies)

    def guidance_at(self, step: int, of_policy: float) -> float:
        """The guidance scale of the reference's forwards after `step` optimizer steps."""
        moved = self.interval and step >= self.interval
        return of_policy if moved or not self.guidance_scale else self.guidance_scale

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Call after every optimizer step with the number taken so far."""
        if self.interval and step % self.interval == 0:
            for name, weight in self.weights.items():
                self.copies[name].copy_(weight)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep, live: nothing where the reference is the first policy."""
        return self.copies if self.interval else {}
