"""`python -m memjax explain PACKAGE.MODULE:FACTORY`, and `fit`: see docs/guides/command-line.md."""

import importlib.util
import sys


def main() -> int:
    """Runs a command. The result is the exit status."""
    missing = [name for name in ("tyro", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {' and '.join(missing)} missing: pip install 'memjax[explain]'", file=sys.stderr)
        return 2
    from memjax._commands import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
