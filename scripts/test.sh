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
# Engines spend most of their time starting: beside the other tests they cost few minutes.
engines=$(mktemp)
trap 'rm -f "$engines"' EXIT
.venv/bin/python -m pytest -m engine > "$engines" 2>&1 &
failed=0
.venv/bin/python -m pytest -m "not engine" || failed=1
wait $! || failed=1
cat "$engines"
exit $failed
