"""Closed forms of a forward's arithmetic against what a profiler counts."""

import pytest
import torch
from flops import row_flops
from small import MODELS, as_prompts, config_of, loaded
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.diffusers_patch.size import Size
from flow_grpo.weights import policies


@pytest.mark.parametrize("name", MODELS)
def test_the_closed_form_counts_what_a_profiler_counts(name, tmp_path):
    model, size = loaded(name, tmp_path), Size(64, 96)
    condition = model.encode(as_prompts(["a photo of a red circle"] * 2), guided=False)
    x, tokens = model.noise(size, [torch.Generator(), torch.Generator()]), model.num_tokens(size)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.velocity(x, torch.full((2,), 500.0), condition, 1.0, size)
    found = row_flops(model.transformer, tokens, condition.num_tokens)
    assert 2 * found == pytest.approx(counter.get_total_flops(), rel=1e-3)
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    assert row_flops(model.transformer, tokens, condition.num_tokens) == found
