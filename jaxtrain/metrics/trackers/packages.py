"""Imports the packages of trackers in their threads, so that an import that failed once works at the next try."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

# Python's parser fails now and then where two threads parse at once, as imports of such packages do (CPython 3.11:
# "AST constructor recursion depth mismatch"). The thread that trains may still be the other one.
_importing = threading.Lock()


def import_package(name: str) -> ModuleType:
    """Import a module of a tracker's package, while no other tracker imports.

    Args:
        name: dotted name.
    """
    with _importing, importable_again():
        return import_module(name)


@contextlib.contextmanager
def importable_again() -> Iterator[None]:
    """Where an import inside fails, drop the submodules that it leaves behind.

    Python takes back the module that failed alone. What a package had imported of itself stays, and is not set on the
    package at the next import, which then fails as well: "partially initialized module 'wandb' has no attribute ...".
    """
    before = set(sys.modules)
    try:
        yield
    except BaseException:
        found = dict(sys.modules)
        for name, module in found.items():
            spec = getattr(module, "__spec__", None)  # None: it was made by code, which does not make it again
            # Modules of C may be initialized only once in a process.
            can_repeat = spec is not None and not isinstance(spec.loader, ExtensionFileLoader)
            if name not in before and can_repeat and any(parent not in found for parent in _parents(name)):
                sys.modules.pop(name, None)
        raise


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name
