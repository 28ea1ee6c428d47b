"""`python -m flaop demo recall`: the task, and two KDA layers that learn it."""

import re

import pytest
import torch

from flaop.demo import main
from flaop.demo.recall import Task


def test_sequences():
    task = Task(pairs=5, length=24, keys=7)
    tokens, targets = task.split(task.sample(64, torch.Generator().manual_seed(0)))
    assert tokens.shape == (64, 24) and targets.shape == (64, 14)
    for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        table = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(table) == 5 and max(table) < 7 <= min(table.values())
        assert answers == [table[key] for key in row[10:]]


def test_fewer_distinct_pairs():
    task = Task(pairs=6, length=20, keys=9)
    tokens, _ = task.split(task.sample(16, torch.Generator().manual_seed(0), distinct=4))
    assert torch.equal(tokens[:, 0:4], tokens[:, 8:12])
    assert all(len(set(row[0:8:2])) == 4 for row in tokens.tolist())


def learn(arguments, capsys):
    assert main(["recall", *arguments]) == 0
    shown = capsys.readouterr().out
    reached = float(re.search(r"steps: ([\d.]+)% on new sequences", shown)[1])
    ablated = float(re.search(r"replaced by zero: ([\d.]+)%", shown)[1])
    return reached, ablated


@pytest.fixture
def one_thread():
    """Tensors this small gain nothing from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_eight_pairs(one_thread, capsys):
    reached, ablated = learn(["--device", "cpu", "--eager", "--seconds", "600"], capsys)
    assert reached > 95 and ablated < 30


@pytest.mark.gpu
def test_thirty_two_pairs(capsys):
    reached, ablated = learn(["--device", "cuda", "--pairs", "32", "--length", "256"], capsys)
    assert reached > 95 and ablated < 30
