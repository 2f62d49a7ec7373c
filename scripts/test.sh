#!/usr/bin/env bash
# The whole test suite: formatting, types, tests on the real SGLang 0.5.17 and on the release matrix.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python scripts/releases.py
.venv/bin/python -m pytest "$@"
