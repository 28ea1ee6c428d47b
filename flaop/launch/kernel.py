"""The one launch path of Triton kernels.

Run by the interpreter, or launched by the driver: machine code that was shipped with the package,
or that Triton compiles at first use. triton is imported only where it has to compile or interpret.
"""

import contextlib
import functools
import os
import threading

import torch

from flaop._extension import bindings

from . import archive

# null pointers, for kernels that are told by a number whether they have a tensor
ABSENT = {
    dtype: torch.empty(0, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.int32, torch.int64)
}
_lock = threading.Lock()
_recorder = None
_forced_arch = None
_arch = {}
INTERPRETED_ARCH = 90  # the interpreter runs the configurations of Hopper


def arch(device):
    """Compute capability of a device as one number (90 for 9.0)."""
    if _forced_arch is not None:
        return _forced_arch
    if device.type != "cuda":
        return INTERPRETED_ARCH
    if device not in _arch:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise RuntimeError(
                "flaop's Triton kernels need compute capability 8.0 or newer, "
                f"{device} has {major}.{minor}"
            )
        _arch[device] = 10 * major + minor
    return _arch[device]


@functools.cache
def processors(device):
    """Multiprocessors of a GPU; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def configured(function, target, K, V, chunk_size, dtype, *flags):
    """(constexpr tiles, launch options) of a configuration function; calls share the two."""
    options = function(target, K, V, dtype, *flags)
    names = [name for name in ("BK", "BV", "BN") if name in options]
    return {"K": K, "V": V, "BT": chunk_size} | {n: options.pop(n) for n in names}, options


def or_absent(x):
    """The tensor itself, or a null pointer to fp32 for None."""
    return ABSENT[torch.float32] if x is None else x


def prepare(x):
    """The tensor itself if it is contiguous and 16-byte aligned, else such a copy.

    None stays None.
    """
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@contextlib.contextmanager
def recording(target_arch):
    """Collects launches instead of making them: (jit function, arguments, constexprs, options)
    each.

    The launchers then also accept meta tensors, so that everything they would launch on an
    architecture can be compiled ahead of time on a machine without a GPU.
    """
    global _recorder, _forced_arch
    with _lock:
        _recorder, _forced_arch = [], target_arch
    try:
        yield _recorder
    finally:
        _recorder, _forced_arch = None, None


def not_warmed(name):
    """The error of a first use inside a capture, where nothing may be compiled or loaded."""
    return RuntimeError(
        f"{name} is not loaded yet for this dtype, head size and set of options, and a CUDA graph "
        "is being captured: call flaop.warmup(...) with such arguments before the capture"
    )


def _key(index, args, constants, options):
    return (index, bindings.argument_types(args), *constants.values(), *options.items())


def _device_index(args):
    return next(a for a in args if isinstance(a, torch.Tensor)).device.index


def _run(handle, index, grid, args):
    """False if an argument is not aligned as the code takes for granted; nothing is launched then.
    """
    x, y, z = (*grid, 1, 1)[:3]
    return bindings.launch(handle, torch._C._cuda_getCurrentRawStream(index), x, y, z, args)


def _unaligned(args):
    """Places of tensors that do not lie at a multiple of 16 bytes."""
    return tuple(
        i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.data_ptr() % 16
    )


class Kernel:
    """A jit function of flaop.triton_kernels, by module and name, and its loaded variants.

    A variant is found by device, argument types, constants and options; never by a size, a stride
    or a value, so a call with other lengths compiles nothing.
    """

    def __init__(self, module, name):
        self.module, self.name = module, name
        self.variants = {}

    @functools.cached_property
    def function(self):
        """The jit function; imports triton."""
        from .compile import jit_function

        return jit_function(self.module, self.name)

    @functools.cached_property
    def interpreted(self):
        # read when triton defines its functions, hence before one is imported
        if os.environ.get("TRITON_INTERPRET", "0") not in ("1", "true", "on"):
            return False
        from triton.runtime.interpreter import InterpretedFunction

        return isinstance(self.function, InterpretedFunction)

    @functools.cached_property
    def places(self):
        """Position of each argument."""
        names = archive.argument_names(self.module, self.name) or self.function.arg_names
        return {name: i for i, name in enumerate(names)}

    def __call__(self, grid, args, constants, siblings=(), **options):
        """Launches on the current stream of the first tensor's device; returns the handle of what
        was launched, or None where nothing had to be.

        grid: 1 to 3 ints. args: the kernel's run-time arguments in order. constants: its
        constexprs; torch dtypes stand for Triton's. options: num_warps, num_stages, maxnreg.
        siblings: (constants, options) that calls of other sizes choose: loaded with this variant,
        so that a size compiles nothing.
        """
        if _recorder is not None:
            for others, more in ((constants, options), *siblings):
                _recorder.append((self.function, args, others, more))
            return None
        if 0 in grid:
            return None
        if self.interpreted:
            from .compile import with_types

            self.function[grid](*args, **with_types(constants))
            return None
        index = _device_index(args)
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(grid, args, constants, siblings, **options)
        key = _key(index, args, constants, options)
        handle = self.variants.get(key)
        if handle is None:
            for others, more in siblings:
                self._load(_key(index, args, others, more), args, others, more)
            handle = self._load(key, args, constants, options)
        if not _run(handle, index, grid, args):
            places = _unaligned(args)
            handle = self._load((*key, places), args, constants, options, places)
            _run(handle, index, grid, args)
        return handle

    def bound(self, args, constants, **options):
        """A function launch(grid, **changed) for many launches of one call: changed replaces
        run-time arguments by name, with others of the same types."""
        args, index, handle = list(args), _device_index(args), None

        def launch(grid, **changed):
            nonlocal handle
            for name, x in changed.items():
                args[self.places[name]] = x
            here = handle is not None and index == torch._C._cuda_getDevice()
            if not here or 0 in grid or not _run(handle, index, grid, args):
                handle = self(grid, args, constants, **options) or handle

        return launch

    def _load(self, key, args, constants, options, unaligned=()):
        """The handle of a variant: from the archive if it was shipped, else compiled."""
        if key in self.variants:
            return self.variants[key]
        if torch.cuda.is_current_stream_capturing():
            raise not_warmed(self.name)
        with _lock:
            if key in self.variants:
                return self.variants[key]
            target = arch(torch.device("cuda", key[0]))
            code = None
            if not unaligned:
                code = archive.find(self.module, self.name, target, args, constants, options)
            if code is None:
                from .compile import code as compile_code

                code = compile_code(self.function, args, constants, options, target, unaligned)
            self.variants[key] = bindings.load(
                self.name, key[0], code.image, code.entry, code.warps, code.shared, code.kinds
            )
        return self.variants[key]
