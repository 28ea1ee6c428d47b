"""The one launch path of Triton kernels.

Interpreter, or compiled at first use and launched from a cache.
"""

import contextlib
import functools
import threading

import torch
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from . import ptxas

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
    return (
        index, *constants.values(), *options.items(),
        *[a.dtype if isinstance(a, torch.Tensor) else a is None or type(a) for a in args],
    )  # fmt: skip


def _device_index(args):
    return next(a for a in args if isinstance(a, torch.Tensor)).device.index


def _run(variant, index, grid, args):
    run, function, metadata, tail = variant
    x, y, z = (*grid, 1, 1)[:3]
    run(
        x, y, z, torch._C._cuda_getCurrentRawStream(index), function, metadata, None,
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args, *tail,
    )  # fmt: skip


class Kernel:
    """A jit function and its compiled variants.

    A variant is found by device, argument types, constants and options; never by a size, a stride
    or a value, so a call with other lengths compiles nothing.
    """

    def __init__(self, function):
        self.function = function
        self.interpreted = isinstance(function, InterpretedFunction)
        self.variants = {}
        self.places = {name: i for i, name in enumerate(function.arg_names)}

    def __call__(self, grid, args, constants, siblings=(), **options):
        """Launches on the current stream of the first tensor's device; returns the variant, or None
        where none was needed.

        grid: 1 to 3 ints. args: the kernel's run-time arguments in order. constants: its
        constexprs. options: num_warps, num_stages, maxnreg. siblings: (constants, options) that
        calls of other sizes choose: compiled with this variant, so that a size compiles nothing.
        """
        if _recorder is not None:
            for variant in ((constants, options), *siblings):
                _recorder.append((self.function, args, *variant))
            return None
        if 0 in grid:
            return None
        if self.interpreted:
            self.function[grid](*args, **constants)
            return None
        index = _device_index(args)
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(grid, args, constants, siblings, **options)
        key = _key(index, args, constants, options)
        variant = self.variants.get(key)
        if variant is None:
            for others in siblings:
                self._compile(_key(index, args, *others), args, *others)
            variant = self._compile(key, args, constants, options)
        _run(variant, index, grid, args)
        return variant

    def bound(self, args, constants, **options):
        """A function launch(grid, **changed) for many launches of one call: changed replaces
        run-time arguments by name, with others of the same types."""
        args, index, variant = list(args), _device_index(args), None

        def launch(grid, **changed):
            nonlocal variant
            for name, x in changed.items():
                args[self.places[name]] = x
            if variant is None:
                variant = self(grid, tuple(args), constants, **options)
            elif 0 not in grid and index == torch._C._cuda_getDevice():
                _run(variant, index, grid, args)
            else:
                self(grid, tuple(args), constants, **options)

        return launch

    def _compile(self, key, args, constants, options):
        name = self.function.fn.__name__
        if torch.cuda.is_current_stream_capturing():
            raise not_warmed(name)
        with _lock:
            if key in self.variants:
                return self.variants[key]
            ptxas.use()
            compiled = self.function.warmup(*args, grid=(1,), **options, **constants)
            run = compiled.run  # loads the machine code
            tail = [constants[p] for p in self.function.arg_names if p in constants]
            variant = (run, compiled.function, compiled.packed_metadata, tail)
            self.variants[key] = variant
        return variant
