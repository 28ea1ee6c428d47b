"""`python -m flaop demo`: train, save, reload and generate; `demo recall`: associative recall."""

import argparse
import sys

from flaop.demo import recall, text
from flaop.demo.runtime import DemoError


def main(argv: list[str] | None = None) -> int:
    """Runs a demo; returns the exit code, with one sentence on stderr if something is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    task, name = (recall, "demo recall") if argv[:1] == ["recall"] else (text, "demo")
    parser = argparse.ArgumentParser(
        prog=f"python -m flaop {name}",
        description=task.__doc__,
        epilog=None if task is recall else "`demo recall` trains on associative recall instead.",
    )
    task.add_arguments(parser)
    args = parser.parse_args(argv[1:] if task is recall else argv)
    try:
        return task.run(args)
    except DemoError as error:
        print(f"python -m flaop {name}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"\npython -m flaop {name}: interrupted", file=sys.stderr)
        return 130
