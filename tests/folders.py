"""Imports between the folders of the product, as the code has them.

``python -m tests.folders`` prints the graph in the form of ``tests/folders.toml``, which
declares it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = (
    "protocol",
    "engine",
    "kvtransfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
)


def sources() -> dict[str, Path]:
    """Every module of the product, by its dotted name. A package stands for its ``__init__.py``."""
    paths = [path for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    return {_dotted(path): path for path in paths}


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in the file, but for those of type checkers."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def graph() -> dict[str, set[str]]:
    """For each folder of the product, the other folders whose modules it imports."""
    known = sources()
    found: dict[str, set[str]] = defaultdict(set)
    for path in known.values():
        here = folder_of(path)
        named = [known[module] for module in imported(path) if module in known]
        # ``from a import b`` names the package ``a``, too: that is no import of what is in it.
        there = {folder_of(module) for module in named if module.name != "__init__.py"}
        found[here] |= there - {here}
    return dict(found)


def folder_of(path: Path) -> str:
    """The folder of a module, from the root of the repository."""
    return path.parent.relative_to(ROOT).as_posix()


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    for folder, imports in sorted(graph().items()):
        quoted = ", ".join(f'"{name}"' for name in sorted(imports))
        print(f'"{folder}" = [{quoted}]')
