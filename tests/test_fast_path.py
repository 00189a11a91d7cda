"""Ways to make a run faster, against the plain way. Batching: test_stepwise.py; compiled blocks: test_models.py; merged
adapters: test_policies.py; embeddings from a disk: test_embeddings.py.
"""

import copy
import json
import math
import os
import weakref
from functools import partial

import draw_shapes
import pytest
import torch
import warm
from rounding import rounding
from small import ENV, MODELS, as_prompts, config_of, generators, loaded, train

from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import loading, registry
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise, joined
from flow_grpo.diffusers_patch.sample_with_logprob import SamplingJob, prepare_encode
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import compilation
from flow_grpo.kernels.single_frame_vae import convolve_in_2d
from flow_grpo.weights import policies

QWEN = MODELS["qwenimage"]
SIZE = Size(64, 64)
PROMPTS = ["a photo of a red circle", "a star left of a green triangle", "two blue squares"]


def as_a_run(name, **how):
    """A model as a run loads it."""
    return MODELS[name].load(registry.tiny_folder(name), torch.device("cpu"), **how)


bf16_attention = pytest.mark.skipif(
    "ATEN_CPU_CAPABILITY" in os.environ,
    reason="torch's attention in bf16 fails on a CPU with AVX-512 that is held to less: 'pack_vnni2 is only supported'",
)


@bf16_attention
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_vae_in_bf16_draws_the_same_picture(name):
    """Pictures are rendered shapes, where the VAE has learned to draw them, and noise."""
    plain = as_a_run(name)
    fast = as_a_run(name, vae_dtype=torch.bfloat16)
    latents = plain.noise(SIZE, generators(5))
    if name in ("qwenimage", "wan"):
        prompts = [prompt.metadata for prompt in load_prompts("dataset/shapes", "test")]
        latents = plain.encode_images(draw_shapes.pictures(prompts[:16], torch.Generator().manual_seed(0)))
    expected = plain.decode(latents, SIZE, 2)
    images = fast.decode(latents, SIZE, 2)
    assert images.dtype == torch.float32
    # Another picture is 1.3 times its contrast away.
    assert 0 < (images - expected).norm() < 0.2 * (expected - expected.mean()).norm()
    assert expected.std() > 0.01, "there must be something in the picture"


def test_a_compiled_decoder_meets_one_shape(monkeypatch):
    """The decoder is not compiled here, which takes a minute."""
    model = as_a_run("qwenimage")
    shapes = []
    model.pipeline.vae.decoder.register_forward_pre_hook(lambda module, inputs: shapes.append(len(inputs[0])))
    latents = torch.randn(7, *model.latent_shape(SIZE))
    plain = model.decode(latents, SIZE, 3)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    loading.compile_decoder(model.pipeline)
    torch.testing.assert_close(model.decode(latents, SIZE, 3), plain, rtol=0, atol=1e-4)
    assert shapes == [3, 3, 1, 3, 3, 3]


@torch.no_grad()
def test_a_decoder_looks_at_the_one_slice_of_its_kernels_that_meets_a_picture():
    model = as_a_run("qwenimage")
    latents = model.noise(SIZE, generators(1))
    expected = model.decode(latents, SIZE)
    for name, conv in model.pipeline.vae.decoder.named_modules():
        if name.endswith("conv1"):
            conv.weight[:, :, :-1] = torch.nan
    assert torch.equal(model.decode(latents, SIZE), expected)


@torch.no_grad()
def test_convolutions_in_2d_decode_the_same_picture():
    """In float64 two kernels of one sum differ by 1e-15 of it; 1e-9 leaves room for what the layers make of that."""
    plain = loaded("qwenimage", torch_dtype=torch.float64).pipeline.vae
    vae = copy.deepcopy(plain)
    convolve_in_2d(vae)
    z = torch.randn(2, plain.config.z_dim, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clip = torch.cat([z, z.flip(0)], dim=2)
    for latents in (z, clip):
        torch.testing.assert_close(vae.decode(latents).sample, plain.decode(latents).sample, rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_short_text_is_for_steps_without_a_log_prob_and_changes_them_by_rounding(guidance):
    """In float64, where sums over fewer keys differ by 1e-15; what is left is the rounding of velocities to float32."""
    model = loaded("qwenimage", torch_dtype=torch.float64)
    condition = model.encode(as_prompts(PROMPTS), width=20)
    params = SamplingParams(6, guidance, 0.7)
    seen = {True: set(), False: set()}

    def velocity(x, t, text, guidance_scale, size):
        seen[len(x) == 3].add(text.num_tokens)
        return model.velocity(x, t, text, guidance_scale, size)

    def prepared(**how):
        job = SamplingJob(model, condition, generators(3), params, SIZE)
        return prepare_encode(job, names=range(3), noisy_steps=range(1, 4), **how)

    def walked(short):
        requests = prepared(num_branches=2, short_conditions=short)
        finished = denoise(velocity, requests, Batching(3, 8))
        return joined(sorted(finished, key=lambda request: request.name))

    plain, trace = walked(None)
    assert seen == {True: {20}, False: {20}}
    seen[False].clear()
    short = [condition.take(slice(n, n + 1)).trimmed(4) for n in range(3)]
    prefixes = prepared(short_conditions=short, groups=[0, 0, 1])
    assert [prefix.short_condition for prefix in prefixes] == [short[0], short[2]]
    latents, trace_of_short = walked(short)
    lengths = condition.mask.sum(1).tolist()
    widths = {math.ceil(length / 4) * 4 for length in lengths}
    assert seen == {True: {20}, False: widths}, "of branches, and of the trunks' step before the noise"
    # Velocities are up to 16.
    torch.testing.assert_close(latents, plain, rtol=0, atol=rounding(size=16))
    for ours, theirs in zip(trace_of_short, trace, strict=True):
        torch.testing.assert_close(ours.step.log_prob, theirs.step.log_prob, rtol=0, atol=rounding(size=16))


class Saved:
    """Tensor that a graph keeps for its backward."""

    def __init__(self, alive, tensor):
        # Detached, since an output would keep its own graph alive.
        self.tensor = tensor.detach()
        alive.add(self)


@pytest.mark.parametrize("name", [name for name, family in MODELS.items() if not family.MOST_SOURCES])
def test_a_training_graph_has_the_bits_and_the_graphs_of_training_and_keeps_nothing_for_a_backward(name, monkeypatch):
    graphs = []

    def note(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    family = MODELS[name]
    model = loaded(name)
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, family.LORA_TARGETS)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    compilation.compile_units(model.transformer, family.SHARD_UNITS)
    x = model.noise(SIZE, generators(3))
    condition = model.encode(as_prompts(PROMPTS), width=20)
    velocity = partial(model.velocity, x, torch.full((3,), 500.0), condition, 4.0, SIZE)
    alive = weakref.WeakSet()
    num_alive = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: num_alive.append(len(alive)))

    with torch.autograd.graph.saved_tensors_hooks(partial(Saved, alive), lambda saved: saved.tensor):
        in_training = velocity()
        assert max(num_alive) > 0
        num_alive.clear()
        num_graphs = len(graphs)
        kept_before = len(alive)
        with torch.no_grad(), compilation.training_graph(model.network, model.blocks):
            in_rollout = velocity()
    assert set(num_alive) == {kept_before}
    assert len(graphs) == num_graphs > 0
    assert in_training.requires_grad
    assert not in_rollout.requires_grad
    assert torch.equal(in_rollout, in_training)


@bf16_attention
def test_a_run_takes_the_fast_path_where_no_gradient_is_wanted(shallow, tmp_path, monkeypatch):
    widths = {True: set(), False: set()}
    dtypes = set()
    plain_velocity = QWEN.velocity
    plain_decode = QWEN.decode

    def velocity(model, x, t, condition, guidance_scale, size):
        widths[torch.is_grad_enabled()].add(condition.num_tokens)
        return plain_velocity(model, x, t, condition, guidance_scale, size)

    def decode(model, *args):
        dtypes.add(model.pipeline.vae.dtype)
        return plain_decode(model, *args)

    monkeypatch.setattr(QWEN, "velocity", velocity)
    monkeypatch.setattr(QWEN, "decode", decode)
    how = shallow | dict(vae_precision="bf16", sample__text_multiple=4, num_epochs=1, eval_freq=0)
    train("shapes_qwenimage_pr", tmp_path, **how)
    assert dtypes == {torch.bfloat16}
    assert widths[True] == {20}
    assert widths[False] > {20}
    assert all(width % 4 == 0 for width in widths[False])


@pytest.mark.slow
@bf16_attention
def test_blocks_are_measured():
    """Not compiled here, which takes a minute."""
    done = warm.run(["benchmarks/bench_blocks.py", "--tiny"], ENV | {"TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["what"] for line in lines] == [*["forward"] * 3, "step", *["decode"] * 4]
    assert min(line["ms"] for line in lines) > 0
