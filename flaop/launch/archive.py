"""Machine code that was compiled when the package was built (python -m flaop.aot).

The file starts with a line of the format, then the length of an index in JSON, the index, and the
codes, compressed. An archive of another version, or a damaged one, is left alone with one warning;
Triton then compiles at first use.
"""

import functools
import json
import os
import pathlib
import warnings
import zlib
from typing import NamedTuple

import torch

from flaop._version import __version__

PATH = pathlib.Path(__file__).parent.parent / "_archive.bin"
MAGIC = b"flaop kernels 1\n"
LENGTH = 8  # bytes of the index's length


class Code(NamedTuple):
    """Machine code of one variant of a kernel, and how it is launched."""

    image: bytes
    entry: str  # name of the function in it
    warps: int
    shared: int  # bytes
    kinds: str  # a letter for each run-time argument (csrc/launch/kernel.h)


class Variant(NamedTuple):
    """What a code is for: `name` is a kernel within `module` of flaop.triton_kernels."""

    module: str
    name: str
    arch: int
    label: str


def _type(x):
    if isinstance(x, torch.Tensor):
        return str(x.dtype).removeprefix("torch.")
    return "none" if x is None else "float" if isinstance(x, float) else "int"


def label(args, constants, options):
    """What a variant is compiled for, as text. Numbers are 32 bits wide."""
    types = ",".join(map(_type, args))
    values = ",".join(f"{name}={x}" for name, x in sorted(constants.items()))
    return f"{types} {values} " + ",".join(f"{name}={x}" for name, x in sorted(options.items()))


def write(path, codes, marks, arguments, made_with):
    """Writes an archive.

    codes: {Variant: Code}. marks: {Variant: str}, of what each was made from. arguments:
    {(module, name): argument names}. made_with: versions of the compilers.
    """
    kernels, blobs, position = {}, [], 0
    for variant, code in sorted(codes.items()):
        place = variant[:2]
        kernel = kernels.setdefault(" ".join(place), {"arguments": arguments[place], "codes": {}})
        blob = zlib.compress(code.image, 9)
        row = [position, len(blob), marks[variant], *code[1:]]
        kernel["codes"][f"{variant.arch} {variant.label}"] = row
        blobs.append(blob)
        position += len(blob)
    index = {"version": __version__, "made_with": made_with, "bytes": position, "kernels": kernels}
    head = json.dumps(index, separators=(",", ":")).encode()
    temporary = pathlib.Path(f"{path}.{os.getpid()}")
    temporary.write_bytes(MAGIC + len(head).to_bytes(LENGTH, "little") + head + b"".join(blobs))
    temporary.replace(path)


def read(path):
    """{(Variant, mark): Code} of an archive; raises as read_index."""
    index, start = read_index(path)
    found = {}
    with open(path, "rb") as file:
        for place, kernel in index["kernels"].items():
            for text, (position, size, mark, *rest) in kernel["codes"].items():
                arch, label = text.split(" ", 1)
                file.seek(start + position)
                code = Code(zlib.decompress(file.read(size)), *rest)
                found[Variant(*place.split(" "), int(arch), label), mark] = code
    return found


def read_index(path):
    """(index, position of the codes in the file). Raises ValueError for what is no archive of this
    version, OSError for no file."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("is of another format")
        size = int.from_bytes(file.read(LENGTH), "little")
        start = len(MAGIC) + LENGTH + size
        whole = os.fstat(file.fileno()).st_size
        if whole < start:
            raise ValueError("is truncated")
        index = json.loads(file.read(size))
    if index["version"] != __version__:
        raise ValueError(f"is of version {index['version']}, this is {__version__}")
    if whole != start + index["bytes"]:
        raise ValueError("is truncated")
    return index, start


@functools.cache
def opened():
    """(index, position of the codes), or None without a usable archive or with FLAOP_AOT=0."""
    if os.environ.get("FLAOP_AOT", "1") == "0" or not PATH.is_file():
        return None
    try:
        return read_index(PATH)
    except (OSError, ValueError, KeyError) as error:
        warnings.warn(
            f"flaop's kernel archive {PATH.name} {error}: kernels are compiled at first use",
            stacklevel=2,
        )
        return None


def _kernel(module, name):
    found = opened()
    return found and found[0]["kernels"].get(f"{module} {name}")


def argument_names(module, name):
    """Names of a kernel's arguments if the archive has it, else None."""
    kernel = _kernel(module, name)
    return kernel and kernel["arguments"]


def find(module, name, arch, args, constants, options):
    """The Code of a launch, or None if it was not shipped."""
    kernel = _kernel(module, name)
    if not kernel or any(isinstance(x, int) and not -(1 << 31) <= x < 1 << 31 for x in args):
        return None
    row = kernel["codes"].get(f"{arch} {label(args, constants, options)}")
    if row is None:
        return None
    position, size, _, *rest = row
    with open(PATH, "rb") as file:
        file.seek(opened()[1] + position)
        image = zlib.decompress(file.read(size))
    return Code(image, *rest)
