"""Early signs that a run goes wrong before its reward says so: what is measured on the sampled latents, and the limits.

Reward hacking shows in the images first: latents grow or shrink, patterns of the pixel grid appear, the images of a
group become one image. Everything is compared with the run's own first epoch.
"""

import statistics

import torch
from torch import Tensor

SIGNS = ("x0_norm", "high_frequency", "diversity")
SPIKE_OVER = 20  # updates whose median gradient norm is the usual one


@torch.no_grad()
def measure(latents: Tensor, groups: Tensor) -> Tensor:
    """Signs of M images, [M, 3] float64 on their device, in the order of SIGNS.

    Args:
        latents: [M, c, h, w] float32, as the VAE sees them but for its normalisation.
        groups: [M] int64, images that compete; only neighbours within this batch are compared.
    """
    flat = latents.flatten(1).double()
    norm = flat.square().mean(1).sqrt()
    _, group = groups.to(flat.device).unique(return_inverse=True)
    count = torch.bincount(group)[:, None]
    mean = flat.new_zeros(len(count), flat.shape[1]).index_add(0, group, flat) / count
    spread = (flat - mean[group]).square().mean(1).sqrt()
    return torch.stack([norm, high_frequency_share(latents), spread / norm], 1)


def high_frequency_share(latents: Tensor) -> Tensor:
    """Share of each image's energy, mean apart, above half the Nyquist frequency in either direction, [M] float64."""
    height, width = latents.shape[-2:]
    energy = torch.fft.fft2(latents.double()).abs().square().sum(1)
    energy[:, 0, 0] = 0
    rows, columns = (torch.fft.fftfreq(size, device=latents.device).abs() > 0.25 for size in (height, width))
    high = energy * (rows[:, None] | columns)
    return high.sum((1, 2)) / energy.sum((1, 2)).clamp(min=1e-30)


def spike(grad_norms: list[float], num_new: int) -> float:
    """The largest of the last `num_new` gradient norms over the median of up to SPIKE_OVER before them; 1 at first."""
    usual = grad_norms[:-num_new][-SPIKE_OVER:]
    return max(grad_norms[-num_new:]) / max(statistics.median(usual), 1e-30) if usual else 1.0


def crossed(now: dict[str, float], first: dict[str, float], trouble) -> list[str]:
    """What is beyond its limit in config.trouble, each as a sentence for the user."""
    change = {sign: now[sign] / max(first[sign], 1e-30) for sign in SIGNS if sign in now}
    falls = {sign: 1 / max(factor, 1e-30) for sign, factor in change.items()}
    change |= {sign: max(change[sign], falls[sign]) for sign in change if sign == "x0_norm"}
    change |= {sign: falls[sign] for sign in change if sign == "diversity"}
    limits = {
        "x0_norm": trouble.x0_norm_change,
        "high_frequency": trouble.high_frequency_change,
        "diversity": trouble.diversity_change,
        "grad_norm_spike": trouble.grad_norm_spike,
    }
    found = change | {"grad_norm_spike": now["grad_norm_spike"]}
    return [
        f"trouble/{sign}: factor {factor:.3g}, over its limit {limits[sign]:g} in config.trouble"
        for sign, factor in found.items()
        if 0 < limits[sign] < factor
    ]
