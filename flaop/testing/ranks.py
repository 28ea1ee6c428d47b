"""Processes that run a function side by side as the ranks of torch.distributed."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection

import torch
import torch.distributed as dist

# Imported once by the process that the ranks are forked from.
_PRELOADED = "flaop.testing.context_parallel_layers"
# Seconds for the others after a rank has failed: they may wait for it in a collective.
_GRACE = 5


class Ranks:
    """A pool of processes, started at the first use and again after a failure.

    Args:
        size: number of processes; the default process group holds them all.
        device: "cpu" (gloo), or "cuda": rank i has the i-th GPU (NCCL, and gloo for CPU tensors).
    """

    def __init__(self, size: int, device: str = "cpu"):
        self.size, self.device = size, device
        self._processes: list = []
        self._pipes: list = []

    def run(self, function: Callable, *args, timeout: float = 120, **options) -> list:
        """``function(*args, **options)`` on every rank, and what each returned.

        Args:
            function: of a module that processes can import.
            timeout: seconds until a rank that has not answered counts as hanging.

        Raises:
            AssertionError: a rank raised, with its traceback, or hangs.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, options))
        answers, failures = {}, []
        end = time.monotonic() + timeout
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            ready = connection.wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                failures += [f"rank {self._pipes.index(pipe)} hangs" for pipe in waiting]
                break
            for pipe in ready:
                answers[pipe], failure = pipe.recv()
                if failure:
                    failures.append(f"rank {self._pipes.index(pipe)}: {failure}")
                    end = min(end, time.monotonic() + _GRACE)
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [answers[pipe] for pipe in self._pipes]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOADED])
        file = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.size, self.device, file), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(here)


def _serve(pipe, rank: int, size: int, device: str, file: str) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    while True:
        function, args, options = pipe.recv()
        try:
            pipe.send((function(*args, **options), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
