"""Who is measured: flaop itself, and peers that are imported only when they are asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable

import torch

from flaop.bench.families import POOL_OPS, family_name, oracle

PEERS = ("fla", "flash_qla")
# fla hands some shapes to other libraries unless told not to; the peer meant here is fla itself.
FLA_ENVIRONMENT = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0"}

# Arguments of flaop that functions of fla do not have; some swallow them.
FLA_LACKS = {
    "retention": ("state_v_first",),
    "delta_rule": ("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"),
}
FLA_NAMES = {"fused_recurrent_gla": {"g": "gk"}}
FLASH_QLA_LACKS = (
    *("use_gate_in_kernel", "A_log", "dt_bias"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
)

Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Unavailable(Exception):
    """The contender cannot be measured; the message says why in one sentence."""


def _flaop(op: str) -> Function:
    import flaop

    function = getattr(flaop, op)
    if op not in POOL_OPS:
        return function
    return lambda **inputs: (function(**inputs), None)


def _fla(op: str) -> Function:
    os.environ.update(FLA_ENVIRONMENT)
    if op in POOL_OPS or not op.startswith(("chunk_", "fused_recurrent_")):
        raise Unavailable(f"fla has no {op}")
    name = family_name(op)
    lacks = ("split_size", *FLA_LACKS.get(name, ()))
    return _peer("fla", f"fla.ops.{name}", op, lacks, FLA_NAMES.get(op, {}))


def _flash_qla(op: str) -> Function:
    if op != "chunk_gated_delta_rule":
        raise Unavailable(f"FlashQLA has no {op}")
    return _peer("FlashQLA", "flash_qla", op, FLASH_QLA_LACKS, {})


def _peer(
    peer: str, module: str, op: str, lacks: tuple[str, ...], renamed: dict[str, str]
) -> Function:
    """``op`` of a peer's module under its names; an argument it lacks must not be asked for."""
    try:
        function = getattr(importlib.import_module(module), op)
    # Importing a peer may raise anything; the reason goes into the record.
    except Exception as error:
        raise Unavailable(f"{peer} cannot be imported ({first_line(error)})") from error

    def call(**inputs):
        for name in lacks:
            value = inputs.pop(name, None)
            if isinstance(value, torch.Tensor) or value:
                raise Unavailable(f"{peer}'s {op} has no {name}")
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


_LOADERS = {
    "flaop": _flaop,
    "fla": _fla,
    "flash_qla": _flash_qla,
    "token loop": _token_loop,
    "torch": _torch,
}
PACKAGES = {"fla": "fla-core", "flash_qla": "flash-qla", "token loop": "flaop"}


def load(contender: str, op: str) -> Function:
    """The callable that runs ``op`` for this contender; raises Unavailable."""
    return _LOADERS[contender](op)


def version(contender: str) -> str | None:
    """The installed version of the library behind a contender."""
    try:
        return importlib.metadata.version(PACKAGES.get(contender, contender))
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
