"""`python -m flaop <command>`."""

import sys

COMMANDS = {
    "demo": "train a small language model, save it, reload it, generate (demo recall: recall)",
    "doctor": "say what is installed and built, and which path typical calls take",
    "bench": "measure operators against their peers",
}


def _usage() -> str:
    rows = (f"  {name:<8}{text}" for name, text in COMMANDS.items())
    return "\n".join(["usage: python -m flaop <command> [options]", "", "commands:", *rows])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command == "demo":
        from flaop.demo import main as run
    elif command == "doctor":
        from flaop.doctor import main as run
    elif command == "bench":
        from flaop.bench import main as run
    else:
        print(f"python -m flaop: unknown command {command!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return run(rest)


if __name__ == "__main__":
    sys.exit(main())
