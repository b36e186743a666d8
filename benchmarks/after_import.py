"""Change modules of another program once they are imported: for a ``sitecustomize`` inside DLIO."""

import importlib.abc
import importlib.util
import sys


def after_import(changes):
    """Have each module changed as it is imported.

    Args:
        changes: module's name → function that is called with the module, once.
    """
    sys.meta_path.insert(0, _Changer(dict(changes)))


class _Changer(importlib.abc.MetaPathFinder):
    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with our change after it."""
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec
