"""The average follows its closed form, and evaluation with it leaves no trace in training."""

from contextlib import nullcontext

import pytest
import torch

from flow_grpo.weights.ema import Ema, decay_at


def linear(value):
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.constant_(layer.bias, -value)
    return layer


def ema_of(layer, **how):
    return Ema(dict(layer.named_parameters()), **how)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_decay_warms_up_to_its_maximum():
    assert [decay_at(n, 0.9) for n in (0, 8, 16)] == [1 / 10, 9 / 18, 17 / 26]
    assert decay_at(80, 0.9) == pytest.approx(0.9)
    assert decay_at(8000, 0.9) == 0.9


def test_the_average_moves_at_every_intervalth_step_by_the_closed_form():
    layer = linear(1.0)
    ema, expected = ema_of(layer, decay=0.4, interval=2), 1.0
    for step in range(1, 7):
        torch.nn.init.constant_(layer.weight, float(step))
        ema.update(step)
        if step in (2, 4, 6):
            decay = {2: 3 / 12, 4: 5 / 14, 6: 0.4}[step]
            expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(ema.state_dict()["weight"], torch.full((2, 3), expected))


def test_before_the_first_averaging_the_average_is_the_weights():
    layer = linear(0.0)
    ema = ema_of(layer, decay=0.9, interval=3)
    for step in range(1, 5):
        torch.nn.init.constant_(layer.weight, 0.1 * step)
        ema.update(step)
        if step < 3:
            assert torch.equal(ema.state_dict()["weight"], layer.weight)
        else:  # the third step averages the second and the third, the fourth none
            torch.testing.assert_close(ema.state_dict()["weight"], torch.full((2, 3), 4 / 13 * 0.2 + 9 / 13 * 0.3))


def test_evaluation_sees_the_average_and_training_gets_its_bits_back_after_an_exception_too():
    layer = linear(1.0)
    ema, average = ema_of(layer), flat(layer.parameters())
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.ndim)))
    trained, storage = flat(layer.parameters()), layer.weight.data_ptr()
    for error in (None, KeyError, None):
        with pytest.raises(error) if error else nullcontext(), ema.applied():
            assert torch.equal(flat(layer.parameters()), average)
            if error:
                raise error
        assert torch.equal(flat(layer.parameters()), trained)
    assert torch.equal(flat(ema.state_dict().values()), average)
    assert layer.weight.data_ptr() == storage
    assert layer.weight.requires_grad


@pytest.mark.parametrize("misuse", [lambda ema: ema.update(8), lambda ema: ema.state_dict()])
def test_the_average_cannot_be_updated_or_saved_while_it_is_in_use(misuse):
    ema = ema_of(linear(1.0))
    with ema.applied(), pytest.raises(AssertionError):
        misuse(ema)
