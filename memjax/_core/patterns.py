"""Patterns for paths of names."""

import fnmatch


def matches(path: str, pattern: str) -> bool:
    """Whether `pattern` matches consecutive names in `path`, "a/b/c", those of a module or of modules that contain it."""
    parts = path.split("/")
    runs = ("/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(run, pattern) for run in runs)
