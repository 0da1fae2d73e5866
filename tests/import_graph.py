"""Which file of `src` imports which, read from the sources: imports inside functions and under
TYPE_CHECKING count like all others."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"


def modules(root: Path = SOURCES) -> dict[str, Path]:
    """Every module by its dotted name."""
    return {_name(path, root): path for path in sorted(root.rglob("*.py"))}


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(files: dict[str, Path]) -> dict[str, dict[str, int]]:
    """For each module, the modules of `files` that it imports, and the line of each."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in _targets(node, package, files):
                if target != module:
                    found[module].setdefault(target, node.lineno)
    return found


def _targets(node: ast.AST, package: str, files: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in files]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    # `from package import name` imports the module `package.name` if there is one
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [t for t in (name if name in files else base for name in names) if t in files]


def cycles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """A cycle for each import that closes one: [a, b, a] where a imports b and b imports a."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in graph.get(module, ()):
                visit(target, [*path, module])
            done.add(module)

    for module in list(graph):
        visit(module, [])
    return found


def shown(module: str, target: str, graph: dict[str, dict[str, int]]) -> str:
    """An import as a person looks it up."""
    return f"{module} imports {target} (line {graph[module][target]})"
