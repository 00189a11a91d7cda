"""Closed forms of a forward's arithmetic against what a profiler counts."""

import pytest
import torch
from flops import row_flops
from small import MODELS, config_of, tiny_folder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo import policies


@pytest.mark.parametrize("name", MODELS)
def test_the_closed_form_counts_what_a_profiler_counts(name, tmp_path):
    model = MODELS[name]
    pipeline = model.PIPELINE.from_pretrained(tiny_folder(name, tmp_path))
    embeds = model.encode_prompts(pipeline, ["a photo of a red circle"] * 2, guided=False)
    x = model.initial_latents(pipeline, [torch.Generator(), torch.Generator()], 64, "cpu")
    tokens = x.shape[1] if x.ndim == 3 else x[0, 0].numel() // pipeline.transformer.config.patch_size**2
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict_velocity(pipeline.transformer, x, torch.full((2,), 500.0), embeds, 1.0)
    found = row_flops(pipeline.transformer, tokens, embeds.embeds.shape[1])
    assert 2 * found == pytest.approx(counter.get_total_flops(), rel=1e-3)
    policies.attach(pipeline.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    assert row_flops(pipeline.transformer, tokens, embeds.embeds.shape[1]) == found
