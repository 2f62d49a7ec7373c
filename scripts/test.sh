#!/usr/bin/env bash
# The whole test suite: formatting, types, tests on the real SGLang 0.5.17 and on the release matrix.
#   scripts/test.sh [PYTEST ARGUMENTS]    with arguments, these tests alone
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python scripts/releases.py
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
# Two files at a time, in the order of tests/conftest.py.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
