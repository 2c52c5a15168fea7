"""Python reads this as it starts, in the ranks of the quick run, which start a third sooner for it.

Every optimizer imports torch's compiler, which takes as long as torch itself. Here it finds in its
place what it uses of it, which does nothing; so nothing can be compiled.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandIn(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch._dynamo" else None

    def exec_module(self, module: Any) -> None:
        module.disable = lambda function, recursive=True, wrapping=True: function
        module.graph_break = lambda: None


sys.meta_path.insert(0, StandIn())
