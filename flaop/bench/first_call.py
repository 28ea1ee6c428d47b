"""First-call time: a fresh process with empty compile caches runs one case once.

``python -m flaop.bench.first_call '<json>'`` is the fresh process itself; it prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from flaop.bench.case import Case, build_inputs
from flaop.bench.contenders import Unavailable, load
from flaop.bench.timing import Work, on

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "TILELANG_CACHE_DIR": "tilelang",
}


def measure(case: Case, contender: str, timeout_s: float) -> float:
    """Seconds of the first call of ``case`` in a fresh process; raises Unavailable without one."""
    with tempfile.TemporaryDirectory(prefix="flaop-first-call-") as folder:
        caches = {name: os.path.join(folder, sub) for name, sub in CACHES.items()}
        message = json.dumps({"case": case.to_dict(), "contender": contender})
        command = [sys.executable, "-m", "flaop.bench.first_call", message]
        try:
            done = subprocess.run(
                command,
                check=False,
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"first call took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"first call failed: {last[:200]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def run_once(case: Case, contender: str) -> float:
    """Seconds of one call; imports and the CUDA context come before the clock starts."""
    function = load(contender, case.op)
    device = torch.device(case.device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with on(device):
        work = Work(case, function, build_inputs(case), sets=1)
        synchronize()
        start = time.perf_counter()
        work.run(0)
        synchronize()
        return time.perf_counter() - start


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    seconds = run_once(Case.from_dict(request["case"]), request["contender"])
    print(json.dumps({"seconds": seconds}))
