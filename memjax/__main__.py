"""`python -m memjax explain PACKAGE.MODULE:FACTORY`, and `fit`: see docs/guides/command-line.md."""

import importlib.util
import os
import sys

_CLOSED = 141  # as a shell says of a program that a pipe has ended


def main() -> int:
    """Runs a command. The result is the exit status."""
    missing = [name for name in ("tyro", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {' and '.join(missing)} missing: pip install 'memjax[explain]'", file=sys.stderr)
        return 2
    from memjax._commands import run

    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    return status


if __name__ == "__main__":
    sys.exit(main())
