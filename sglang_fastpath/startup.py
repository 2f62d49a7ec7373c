"""What `sglang_fastpath.pth` runs at interpreter start, if the environment or the command line names the plugin.

It waits for `import sglang` and does nothing in programs that never import it.
"""

from types import ModuleType

import wrapt


def _register(sglang: ModuleType) -> None:
    from sglang_fastpath import plugin

    plugin.register()


wrapt.register_post_import_hook(_register, "sglang")
