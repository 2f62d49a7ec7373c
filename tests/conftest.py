"""What every test shares: `tests/` on the import path, and no trace of the plugin left from one test to the next."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# torch.compile builds C++ on a CPU: minutes for nothing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def plugin_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Starts from an environment without the plugin's variables and ends with SGLang's own objects in place."""
    for name in list(os.environ):
        if name.startswith("SGLANG_FASTPATH"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    from sglang_fastpath import plugin

    plugin.deactivate()
