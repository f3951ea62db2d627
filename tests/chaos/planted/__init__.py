"""Servers with a fault each, to see whether the checker finds it.

They are of Python where the server is compiled too: no other method can be put into what is compiled.
"""

import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)

SOURCES_FIRST = (SourceFileLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
sys.path_hooks.insert(0, FileFinder.path_hook(*SOURCES_FIRST))
sys.path_importer_cache.clear()
