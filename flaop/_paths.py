"""Which path a call takes: forcing it, asking for it, and making it ready."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flaop._extension import bindings
from flaop._version import __version__

PATHS = tuple(bindings.paths())


def _default_backend() -> str:
    """The paths that may be chosen here, and the version: compile caches must see both.

    FLAOP_FLASH_KDA=0 takes the fused kernel out of the list. It is read once, at import.
    """
    flash = bindings.FLASH_KDA_BUILT and os.environ.get("FLAOP_FLASH_KDA", "1") != "0"
    allowed = [path for path in PATHS if path != "flash_kda" or flash]
    return f"auto:{','.join(allowed)}@{__version__}"


# What the functions hand to the dispatcher. Dynamo guards it, and cache keys include it, because it
# is an argument of the op.
BACKEND = _default_backend()


@contextlib.contextmanager
def backend(path: str) -> Iterator[None]:
    """Force a path for every call of a dispatcher (`flaop.kda`, ...) inside a `with` block.

    The setting is one for the process, not for the thread. A checkpointed region that is
    recomputed in the backward runs outside the block: pass `backend=` to the function instead.

    Args:
        path: "chunk", "fused_recurrent", "flash_kda", or "auto" for the default choice.

    Raises:
        ValueError: at once for an unknown name; at the call if the path cannot serve it.

    Example:
        >>> with flaop.backend("chunk"):
        ...     o, _ = flaop.kda(q, k, v, g, beta)
    """
    global BACKEND
    if path != "auto" and path not in PATHS:
        raise ValueError(f"path must be one of {('auto', *PATHS)}, got {path!r}")
    previous = BACKEND
    BACKEND = _default_backend() if path == "auto" else f"{path}@{__version__}"
    try:
        yield
    finally:
        BACKEND = previous


class Explanation(NamedTuple):
    """What the dispatcher does with a call."""

    path: str  # empty if a forced path cannot serve the call
    passed_over: list[str]  # a sentence for each path that was passed over, or cannot serve it


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """The path that a call would take, and why not another. Runs no kernel.

    Args:
        fn: a dispatcher: `flaop.kda`, `gated_delta_rule`, `delta_rule`, `simple_gla`, `gla`,
            `retention`, `lightning_attn` or `linear_attn`.
        *args, **kwargs: the arguments of the call.

    Returns:
        Explanation(path, passed_over).

    Raises:
        TypeError: fn is not a dispatcher, or the arguments do not fit its signature.
        ValueError: q or v has the wrong rank, or the backend is unknown.

    Example:
        >>> flaop.explain(flaop.kda, q, k, v, g, beta).path
        'fused_recurrent'
    """
    return Explanation(*_explain_op(fn)(*_positional(fn, args, kwargs)))


def supports(path: str, fn: Callable, *args, **kwargs) -> bool:
    """Whether a path can serve a call when it is forced. Runs no kernel.

    Args:
        path: "chunk", "fused_recurrent" or "flash_kda".
        fn: a dispatcher: `flaop.kda`, `gated_delta_rule`, `delta_rule`, `simple_gla`, `gla`,
            `retention`, `lightning_attn` or `linear_attn`.
        *args, **kwargs: the arguments of the call.

    Raises:
        ValueError: the path is unknown; and as `explain`.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    return explain(fn, *args, **{**kwargs, "backend": path}).path == path


def warmup(fn: Callable, *args, **kwargs) -> None:
    """Compile and load everything that a call needs, before a CUDA graph is captured.

    Runs the call once on copies of its tensors, and its backward if an input requires grad. No
    argument changes and no `.grad` is written. Costs the memory and time of one call.

    Args:
        fn: a function of flaop, or anything that calls some, e.g. a layer.
        *args, **kwargs: arguments with the shapes, dtypes and flags of the call to come.
    """

    def copy(x):
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone().requires_grad_(x.requires_grad)

    args, kwargs = pytree.tree_map(copy, (args, kwargs))
    outputs = pytree.tree_leaves(fn(*args, **kwargs))
    outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    inputs = [
        x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad
    ]
    if outputs and inputs:
        gradients = [torch.ones_like(x) for x in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def _explain_op(fn: Callable):
    name = getattr(fn, "__name__", "")
    op = getattr(torch.ops.flaop, f"_explain_{name}", None)
    module = getattr(fn, "__module__", None) or ""
    if op is None or not module.startswith("flaop.functional"):
        raise TypeError(f"explain and supports take a dispatcher (flaop.kda, ...), got {fn!r}")
    return op.default


def _positional(fn: Callable, args: tuple, kwargs: dict) -> list:
    """The arguments in the order of the schema, which is that of the function."""
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["backend"] is None:
        bound.arguments["backend"] = BACKEND
    return list(bound.arguments.values())
