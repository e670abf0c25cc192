#!/usr/bin/env bash
# Build wheel and sdist into dist/, and check them: what they say of themselves, size, files, and that the wheel works by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

rm -rf dist
uv build
uvx twine check --strict dist/*
wheel=$(echo "$PWD"/dist/*.whl)
test "$(stat -c %s "$wheel")" -lt 1000000
python3 -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' "$wheel" > "$fresh/files"
if grep -Ev '^memjax/.*\.(py|typed)$|^memjax/_commands/gpus/[a-z0-9-]+\.txtpb$|^memjax-[0-9.a-z]+\.dist-info/' "$fresh/files"; then
    echo "The wheel has these files too" >&2
    exit 1
fi

uv venv --quiet "$fresh/venv"
uv pip install --quiet --python "$fresh/venv" "$wheel[explain]"
cd "$fresh"
# What takes long to import waits until it is needed.
venv/bin/python -c 'import sys, memjax; late = {"scipy", "matplotlib", "tyro"} & {*sys.modules}; assert not late, late; print(memjax.__version__)'
venv/bin/python -m memjax --help > /dev/null
