"""Layers on shards, on 4 processes, against the same layer in one process."""

import pytest

from flaop.testing.context_parallel_layers import LAYERS, check_layer

# of 48 tokens, shards of 12; the convolutions look 3 tokens back
LENGTHS = {
    "batched": None,
    "packed": [13, 0, 22, 12, 1],
    "on borders": [12, 24, 0, 12],
    "just behind borders": [11, 2, 24, 11],
}
MAIN = ("kda", "gdn", "convolution")


@pytest.mark.parametrize("name", LAYERS)
def test_layers(ranks, name):
    for i, lengths in enumerate(LENGTHS.values()):
        if name in MAIN or i < 2:
            ranks.run(check_layer, name, 4, lengths, i != 0 and name != "attention")


def test_states_of_a_batch(ranks):
    for name in ("convolution", "kda"):
        ranks.run(check_layer, name, 4, None, True)
        ranks.run(check_layer, name, 2, None, True)
