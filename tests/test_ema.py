"""The average follows its closed form, and evaluation with it leaves no trace in training."""

from contextlib import nullcontext

import pytest
import torch

from flow_grpo.weights.ema import Ema


def linear(value):
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.constant_(layer.bias, -value)
    return layer


def ema_of(layer, **how):
    return Ema(dict(layer.named_parameters()), **how)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_the_average_is_the_weights_and_then_moves_at_every_intervalth_step_by_the_closed_form():
    layer = linear(0.0)
    expected = 0.0
    ema = ema_of(layer, decay=0.4, interval=3)
    for step in range(1, 10):
        torch.nn.init.constant_(layer.weight, float(step))
        ema.update(step)
        decay = {1: 0, 2: 0, 3: 4 / 13, 6: 0.4, 9: 0.4}.get(step, 1)
        expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(ema.state_dict()["weight"], torch.full((2, 3), expected))


def test_evaluation_sees_the_average_and_training_gets_its_bits_back_after_an_exception_too():
    layer = linear(1.0)
    ema = ema_of(layer)
    average = flat(layer.parameters())
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.ndim)))
    trained = flat(layer.parameters())
    storage = layer.weight.data_ptr()
    for error in (None, KeyError, None):
        with pytest.raises(error) if error else nullcontext(), ema.applied():
            assert torch.equal(flat(layer.parameters()), average)
            if error:
                raise error
        assert torch.equal(flat(layer.parameters()), trained)
    assert torch.equal(flat(ema.state_dict().values()), average)
    assert layer.weight.data_ptr() == storage
    assert layer.weight.requires_grad


def test_a_graph_of_other_weights_has_no_backward():
    layer = linear(1.0)
    ema = ema_of(layer)
    loss = layer(torch.ones(1, 3, requires_grad=True)).sum()
    with ema.applied(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("misuse", [lambda ema: ema.update(8), lambda ema: ema.state_dict()])
def test_the_average_cannot_be_updated_or_saved_while_it_is_in_use(misuse):
    ema = ema_of(linear(1.0))
    with ema.applied(), pytest.raises(AssertionError):
        misuse(ema)
