"""Queries and keys of one kernel: the numbers and gradients of diffusers' own attention, eager and compiled."""

import copy
import os
from functools import partial

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

from flow_grpo.diffusers_patch.models.qwenimage import JointAttention, QwenImage, join_attention
from flow_grpo.kernels import compilation, flash_attention
from flow_grpo.kernels.qk_norm_rope import norm_rotate_join

ROWS = 2
TEXT = 5
IMAGE = 12
HEADS = 3
WIDTH = 16
EPS = 1e-6


def drawn(dtype=torch.float32, device="cpu"):
    """Arguments of the op, of text and image each: tokens, weights, angles."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(ROWS, length, HEADS, WIDTH, generator=generator) for length in (TEXT, IMAGE)]
    weights = [torch.rand(WIDTH, generator=generator) + 0.5 for _ in range(2)]
    angles = []
    for length in (TEXT, IMAGE):
        turns = torch.rand(length, WIDTH // 2, generator=generator) * 7
        angles.append(torch.polar(torch.ones_like(turns), turns).to(device))
    tokens = [x.to(device, dtype) for x in tokens]
    weights = [weight.to(device, dtype) for weight in weights]
    return tokens, weights, angles


def expected(tokens, weights, angles, eps):
    """In float64."""
    parts = []
    for x, weight, part_angles in zip(tokens, weights, angles, strict=True):
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()
        pairs = torch.view_as_complex(normed.unflatten(-1, (-1, 2)))
        parts.append(torch.view_as_real(pairs * part_angles.to(torch.complex128)[:, None]).flatten(3))
    return torch.cat(parts, 1)


def gradients(function, tokens, weights, angles, grad):
    """The result, and the gradients of the tokens from that of the result."""
    text, image = (x.clone().requires_grad_() for x in tokens)
    out = function([text, image], weights, angles, EPS)
    (out * grad).sum().backward()
    return out.detach(), text.grad, image.grad


def test_values_and_gradients_are_the_expected_ones():
    tokens, weights, angles = drawn()
    grad = torch.randn(ROWS, TEXT + IMAGE, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    ours = gradients(norm_rotate_join, tokens, weights, angles, grad)
    exact = gradients(expected, tokens, weights, angles, grad.double())
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    for x in tokens:
        x.requires_grad_()
    torch.library.opcheck(norm_rotate_join, (tokens, weights, angles, EPS))


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    size = dict(num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))
    return QwenImageTransformer2DModel(num_layers=2, in_channels=16, out_channels=4, **size).requires_grad_(False)


def velocity(transformer, masked):
    """The velocity, and the gradient of the image tokens."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 16, 16, generator=generator).requires_grad_()
    text = torch.randn(2, 5, 32, generator=generator)
    mask = torch.arange(5) < torch.tensor([[3], [5]]) if masked else None
    out = transformer(
        hidden_states=x,
        timestep=torch.tensor([0.3, 0.7]),
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("attention", ["", flash_attention.NAME])
@pytest.mark.parametrize(("masked", "compiles"), [(True, False), (False, False), (True, True)])
def test_a_transformer_computes_the_same_with_it(transformer, masked, compiles, attention, monkeypatch):
    """Graphs are cut as they are for compiled kernels, which take seconds."""
    ours = copy.deepcopy(transformer)
    join_attention(ours, attention)
    if compiles:
        torch._dynamo.reset()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
        compilation.compile_units(ours, QwenImage.SHARD_UNITS)
    for block in ours.transformer_blocks:
        assert type(block.attn.processor) is JointAttention
        assert block.attn.processor.attention == attention
    for one, other in zip(velocity(ours, masked), velocity(transformer, masked), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_norms_that_are_trained_or_of_another_width_keep_the_attention_of_diffusers(transformer):
    trained = copy.deepcopy(transformer)
    odd = copy.deepcopy(transformer)
    trained.transformer_blocks[0].attn.norm_k.weight.requires_grad_()
    odd.transformer_blocks[0].attn.norm_k.weight = torch.nn.Parameter(torch.ones(24), requires_grad=False)
    for changed in (trained, odd):
        join_attention(changed)
        first, second = changed.transformer_blocks
        assert type(first.attn.processor) is QwenDoubleStreamAttnProcessor2_0
        assert type(second.attn.processor) is JointAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_agree(dtype):
    """To a rounding of the result; each row by itself."""
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("takes a GPU, or Triton's interpreter: make test-kernels")
    from flow_grpo.kernels import qk_norm_rope_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, weights, angles = drawn(dtype, device)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(ROWS, TEXT + IMAGE, HEADS, WIDTH, generator=generator).to(tokens[0])
    joint = qk_norm_rope_triton.join(tokens, weights, angles, EPS)
    grads = qk_norm_rope_triton.split_gradient(grad, tokens, weights, angles, EPS)
    exact = gradients(expected, [x.double() for x in tokens], weights, angles, grad.double())
    rounding = 2 * torch.finfo(dtype).eps
    for one, other in zip((joint, *grads), exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=rounding)
    alone = qk_norm_rope_triton.join([x[1:] for x in tokens], weights, angles, EPS)
    assert torch.equal(alone, joint[1:])
