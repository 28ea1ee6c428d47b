"""Who is measured: flaop itself, and peers that are imported only when they are asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable

import torch

from flaop.bench.families import family, family_name, oracle

PEERS = ("fla",)
# fla hands some shapes to other libraries unless told not to; the peer meant here is fla itself.
FLA_ENVIRONMENT = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0"}

Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Unavailable(Exception):
    """The contender cannot be measured; the message says why in one sentence."""


def _flaop(op: str) -> Function:
    import flaop

    return getattr(flaop, op)


def _fla(op: str) -> Function:
    os.environ.update(FLA_ENVIRONMENT)
    if not op.startswith(("chunk_", "fused_recurrent_")):
        raise Unavailable(f"fla has no {op}")
    try:
        module = importlib.import_module(f"fla.ops.{family_name(op)}")
        function = getattr(module, op)
    except Exception as error:
        raise Unavailable(f"fla cannot be imported ({first_line(error)})") from error
    return _fla_decay(op, function) if family(op).decay else function


def _fla_decay(op: str, function: Function) -> Function:
    """With fla's names; some of its functions swallow arguments they do not have."""
    renamed = {"g": "gk"} if op == "fused_recurrent_gla" else {}

    def call(split_size: int = 0, **inputs):
        if split_size:
            raise Unavailable("fla has no split_size")
        if op.endswith("retention") and inputs.pop("state_v_first"):
            raise Unavailable(f"fla's {op} has no state_v_first")
        return function(**{renamed.get(name, name): value for name, value in inputs.items()})

    return call


def _token_loop(op: str) -> Function:
    return oracle(op)


def _torch(op: str) -> Function:
    def attention(q, k, v):
        """Causal attention over the same q, k and v: the quadratic alternative."""
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return o.transpose(1, 2), None

    return attention


_LOADERS = {"flaop": _flaop, "fla": _fla, "token loop": _token_loop, "torch": _torch}


def load(contender: str, op: str) -> Function:
    """The callable that runs ``op`` for this contender; raises Unavailable."""
    return _LOADERS[contender](op)


def version(contender: str) -> str | None:
    """The installed version of the library behind a contender."""
    package = {"fla": "fla-core", "token loop": "flaop"}.get(contender, contender)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
