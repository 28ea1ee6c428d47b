"""The demo's text: source files of the running Python's standard library, as bytes."""

import hashlib
import math
import pathlib
import sysconfig
from typing import NamedTuple

import torch
from torch import Tensor

from flaop.demo.runtime import DemoError

# Tests and packages that are not part of the library itself.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VALIDATION_SHARE = 0.1


class Corpus(NamedTuple):
    """Files joined by a zero byte, split into training and validation text by file."""

    train: Tensor  # [bytes] uint8
    validation: Tensor  # [bytes] uint8
    files: int


def load(root: pathlib.Path | None = None) -> Corpus:
    """Reads every source file under root; a hash of its name decides which side it is on."""
    root = pathlib.Path(sysconfig.get_path("stdlib") if root is None else root)
    train, validation = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.isdisjoint(name.parts):
            draw = hashlib.sha256(name.as_posix().encode()).digest()[0] / 256
            side = validation if draw < _VALIDATION_SHARE else train
            side.append(path.read_bytes())
    if not train or not validation:
        raise DemoError(f"no Python source files to learn from under {root}")
    sides = (
        torch.frombuffer(bytearray(b"\0".join(s)), dtype=torch.uint8).clone()
        for s in (train, validation)
    )
    return Corpus(*sides, files=len(train) + len(validation))


def windows(text: Tensor, count: int, length: int) -> Tensor:
    """[count, length] windows spread evenly over the text."""
    if text.numel() < length:
        raise DemoError(f"the text has {text.numel()} bytes, a window needs {length}")
    starts = torch.linspace(0, text.numel() - length, count, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(length)]


def unigram_loss(train: Tensor, batch: Tensor) -> float:
    """Cross-entropy of batch[:, 1:] under the training text's byte counts plus one, in bits."""
    count = torch.bincount(train.long(), minlength=256).double() + 1
    return _bits((count / count.sum())[batch[:, 1:].long()])


def bigram_loss(train: Tensor, batch: Tensor) -> float:
    """The same given the byte before, with add-one counts of pairs."""
    text = train.long()
    count = torch.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256).double() + 1
    table = count.view(256, 256)
    table = table / table.sum(1, keepdim=True)
    return _bits(table[batch[:, :-1].long(), batch[:, 1:].long()])


def _bits(probability: Tensor) -> float:
    return -probability.log().mean().item() / math.log(2)
