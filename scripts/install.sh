#!/usr/bin/env bash
# Makes .venv with this package (editable) and the real SGLang; skips what is done. Sourced by demo.sh and test.sh.
SGLANG_VERSION=0.5.17
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
  echo "sglang-fastpath needs Python 3.11 or 3.12; $python is $("$python" -V). Set PYTHON=/path/to/python3.12." >&2
  exit 1
}
stamp=.venv/.installed-$(cat setup.py scripts/install.sh | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  echo "== Installing sglang[diffusion]==$SGLANG_VERSION and sglang-fastpath into .venv (about 5 minutes, 9.5 GB)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --disable-pip-version-check "sglang[diffusion]==$SGLANG_VERSION" -e ".[test]"
  rm -f .venv/.installed-* && touch "$stamp"
fi
# Random weights are made here: nothing is fetched from a hub. Compiling models on a CPU only costs time.
export HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
