"""A small training run on a tiny real transformer, for one process or for two CPU ranks."""

import os
from pathlib import Path

import torch
import warm
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig

from flow_grpo.base import distributed
from flow_grpo.weights import fsdp_utils
from flow_grpo.weights.ema import Ema
from flow_grpo.weights.safetensors_reader import StoredWeights

TINY = dict(
    num_layers=2,
    attention_head_dim=32,
    num_attention_heads=2,
    joint_attention_dim=64,
    axes_dims_rope=(8, 12, 12),
    in_channels=64,
    out_channels=16,
)
UNITS = ("QwenImageTransformerBlock",)
LORA = LoraConfig(r=3, lora_alpha=12, target_modules=["to_q", "to_k", "to_v", "net.2"])  # 3 rows do not halve
MAX_NORM = 0.03
CPU = torch.device("cpu")


def launch(program: str, folder: Path) -> list:
    """The last words of two gloo ranks that run a Python file and write to `folder`. Their exit status says nothing:
    gloo may abort at interpreter exit after all the work."""
    ranks = warm.torchrun([program, folder])
    files = [folder / f"rank{rank}.pt" for rank in (0, 1)]
    assert all(file.exists() for file in files), [rank.stderr[-4000:] for rank in ranks]
    return [torch.load(file, weights_only=False) for file in files]


def done(folder: Path, seen=None) -> None:
    """A rank's last word."""
    torch.save(seen, folder / f"rank{os.environ['RANK']}.pt")
    distributed.close()


def base(folder: Path, **how) -> Path:
    """Write the tiny transformer's random weights. how: save_pretrained's, e.g. max_shard_size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        QwenImageTransformer2DModel(**TINY).save_pretrained(folder, **how)
    return folder


def adapter_weights(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) / 8


class Rows(torch.nn.Module):
    """Stand in for a FlowModel's network: a transformer behind a call that returns one tensor."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, rows):
        image = rows[:, :16]
        text = rows[:, 16:]
        how = dict(timestep=rows[:, 0, 0].sigmoid())  # a row's own, whichever rank has it
        return self.transformer(image, text, img_shapes=[[(1, 4, 4)]] * len(rows), return_dict=False, **how)[0]


def build(weights: Path, mesh=None, *, lora: bool, precision: str = "fp32", checkpointed: bool = False, **how):
    with init_empty_weights():
        transformer = QwenImageTransformer2DModel(**TINY)
        if lora:
            transformer.requires_grad_(False)
            transformer.add_adapter(LORA)
    if checkpointed:
        transformer.enable_gradient_checkpointing()
    how = dict(units=UNITS, device=CPU, precision=precision, weights=StoredWeights(weights), init=adapter_weights) | how
    vars(transformer)["network"] = fsdp_utils.prepare(Rows(transformer), mesh, **how)  # hidden from the transformer
    return transformer


def velocity(transformer, rows: torch.Tensor) -> torch.Tensor:
    """The output for rows [B, 24, 64]: 16 image tokens, then 8 text tokens."""
    return (vars(transformer).get("network") or Rows(transformer))(rows)


def optimizer_of(transformer) -> torch.optim.AdamW:
    """AdamW whose weights hardly depend on the order of sums.

    The first step is lr g / (|g| + eps). Gradients of about 1e-3 come from sums of 192 rows, so that two orders of them
    differ by about 3e-9; with eps 1e-5 weights then differ by 3e-7 a step, even where g is near 0.
    """
    return torch.optim.AdamW(fsdp_utils.trainable_parameters(transformer).values(), lr=1e-3, eps=1e-5)


def ema_of(transformer) -> Ema:
    return Ema(fsdp_utils.trainable_parameters(transformer), interval=2)


def train(transformer, optimizer, steps: range, ema: Ema | None = None) -> list[float]:
    """Clipped AdamW steps on 8 rows each, in two accumulated halves that the ranks share. Gradient norms."""
    parameters = list(fsdp_utils.trainable_parameters(transformer).values())
    norms = []
    for step in steps:
        rows = torch.randn(2, 4, 24, 64, generator=torch.Generator().manual_seed(step))
        for half in rows:
            loss = (velocity(transformer, distributed.local_rows(half)) - 1).square().mean().div(2)
            loss.backward()
        fsdp_utils.average_gradients(parameters)
        norms.append(float(fsdp_utils.clip_grad_norm(parameters, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update(step + 1)
    return norms
