"""The benchmark behind ``python -m flaop bench``: one command produces every number.

Protocol, columns and record format: docs/bench.md. Importing this package imports neither triton
nor matplotlib nor any peer library.
"""

from flaop.bench.cli import main

__all__ = ["main"]
