"""sglang-fastpath: makes an unmodified SGLang faster without changing a bit of its output.

Importing the package imports neither sglang nor triton and patches nothing; `plugin.register()` does.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a source checkout kernels/, loaders/ and patches/ lie beside this folder; installed, inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "setup.py").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout))
