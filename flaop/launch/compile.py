"""Triton's compiler: a jit function, argument types and constants to machine code.

The only module of this folder that imports triton. It is not needed where shipped machine code
serves.
"""

import importlib

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import ptxas
from .archive import Code

POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.bool: "*i1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_ELEMENTS = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.float32: tl.float32, torch.float64: tl.float64,
}  # fmt: skip
_KINDS = {"i32": "i", "i64": "l", "fp32": "f"}


def jit_function(module, name):
    """A kernel of flaop.triton_kernels."""
    return getattr(importlib.import_module(f"flaop.triton_kernels.{module}"), name)


def with_types(constants):
    """Constants of a launcher as Triton takes them: element types stand as torch dtypes."""
    return {name: _ELEMENTS.get(x, x) if isinstance(x, torch.dtype) else x
            for name, x in constants.items()}  # fmt: skip


def source(function, args, constants, unaligned=()):
    """The ASTSource of a launch: pointers 16-byte aligned but at the places `unaligned`; numbers
    are not specialised."""
    signature, values, attributes = {}, with_types(constants), {}
    names = function.arg_names
    for i, (name, arg) in enumerate(zip(names, args, strict=False)):
        if arg is None:
            signature[name], values[name] = "constexpr", None
        elif isinstance(arg, torch.Tensor):
            signature[name] = POINTERS[arg.dtype]
            if i not in unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(1 << 31) <= arg < 1 << 31 else "i64"
    for name in names[len(args) :]:
        signature[name] = "constexpr"
    positions = {(names.index(name),): value for name, value in values.items()}
    return ASTSource(function, signature, positions, attributes)


def compiled(function, args, constants, options, arch, unaligned=()):
    """What Triton makes of a launch for an architecture (80, 90, 100, ...), from its cache if it
    can."""
    ptxas.use()
    given = source(function, args, constants, unaligned)
    return triton.compile(given, target=GPUTarget("cuda", arch, 32), options=options)


def code(function, args, constants, options, arch, unaligned=()):
    """The Code of a launch."""
    made = compiled(function, args, constants, options, arch, unaligned)
    metadata, types = made.metadata, made.src.signature
    if metadata.global_scratch_size or metadata.num_ctas != 1:
        raise RuntimeError(f"{metadata.name} needs scratch memory or clusters")
    kinds = []
    for i, name in enumerate(function.arg_names[: len(args)]):
        kind = types[name]
        if kind == "constexpr":
            kinds.append("-")
        elif kind.startswith("*"):
            kinds.append("p" if i in unaligned else "P")
        else:
            kinds.append(_KINDS[kind])
    return Code(made.asm["cubin"], metadata.name, metadata.num_warps, metadata.shared,
                "".join(kinds))  # fmt: skip
