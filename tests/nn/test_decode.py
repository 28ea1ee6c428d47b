"""The Decoder in its three modes against a full run of prompt and continuation."""

import pytest
import torch

from flaop.decode import Decoder
from flaop.nn import HybridConfig, HybridModel
from flaop.testing import relative_error

CONFIG = HybridConfig(
    vocab_size=32, hidden_size=32, num_layers=2, layers=("kda", "attention"), num_heads=2,
    head_dim=16,
)  # fmt: skip
PROMPT, STEPS = 70, 6


@pytest.fixture
def model(device):
    return HybridModel(CONFIG).to(device)


def check(model, decoder, device, batch_size):
    for _ in range(2):  # a second prompt in the same buffers
        prompt = torch.randint(32, (batch_size, PROMPT), device=device)
        decoder.reset()
        decoder.prefill(prompt)
        logits = []
        for _ in range(STEPS):
            decoder.step()
            logits.append(decoder.logits.clone())
        chosen = decoder.tokens()
        assert chosen.shape == (batch_size, STEPS + 1)
        with torch.no_grad():
            full = model(torch.cat([prompt, chosen[:, :-1]], dim=1))[0][:, PROMPT - 1 :]
        assert relative_error(torch.stack(logits, dim=1), full[:, 1:]) < 5e-4
        assert torch.equal(chosen, full.argmax(-1))
        decoder.reset()
        decoder.prefill(prompt)
        assert torch.equal(decoder.generate(STEPS), chosen)


def test_eager(model, device):
    check(model, Decoder(model, 3, PROMPT + STEPS, mode="eager"), device, 3)


def test_compiled(model, device):
    decoder = Decoder(model, 2, PROMPT + STEPS, mode="compiled", backend="aot_eager")
    check(model, decoder, device, 2)


@pytest.mark.gpu
def test_captured():
    model = HybridModel(CONFIG).cuda()
    check(model, Decoder(model, 2, PROMPT + STEPS, mode="captured"), "cuda", 2)


@pytest.mark.gpu
def test_captured_sampling_draws_anew():
    model = HybridModel(CONFIG).cuda()
    decoder = Decoder(model, 2, PROMPT + 40, mode="captured", temperature=5.0)
    draws = []
    for _ in range(2):
        decoder.reset()
        decoder.prefill(torch.zeros(2, PROMPT, dtype=torch.long, device="cuda"))
        draws.append(decoder.generate(40))
    assert not torch.equal(*draws)


def test_sampling_follows_the_softmax(model, device):
    decoder = Decoder(model, 1, 4, mode="eager", temperature=0.5)
    decoder.logits = torch.zeros(4000, 32, device=device)
    decoder.logits[:, 5] = 0.5 * torch.tensor(31.0).log()  # as likely as the 31 others
    decoder._token = torch.zeros(4000, 1, dtype=torch.long, device=device)
    decoder._history = torch.zeros(4000, 1, dtype=torch.long, device=device)
    decoder._count.zero_()
    decoder._choose()
    assert 0.46 < (decoder._token == 5).float().mean().item() < 0.54


def test_bad_use(model, device):
    decoder = Decoder(model, 1, 10, mode="eager")
    with pytest.raises(ValueError, match="11 more tokens after 0 exceed max_length = 10"):
        decoder.prefill(torch.zeros(1, 11, dtype=torch.long, device=device))
    decoder.prefill(torch.zeros(1, 8, dtype=torch.long, device=device))
    with pytest.raises(ValueError, match="3 more tokens after 8"):
        decoder.generate(3)
    assert decoder.generate(2).shape == (1, 3)
    with pytest.raises(ValueError, match="mode must be one of"):
        Decoder(model, mode="graph")
    if device == "cpu":
        with pytest.raises(ValueError, match="needs a model on a CUDA device, got cpu"):
            Decoder(model)
