"""The architecture, read off the sources: what may import what, what is never imported, how long a file may be."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Modules of llama_jax from the bottom up: a module imports from its own layer or lower ones, and never in a circle.
# The functions named in COMMANDS are commands that sit above everything, whatever module they stand in.
LAYERS = [
    ["errors"],
    ["fields", "budget", "flops", "files", "faults"],
    ["hf_files"],
    ["hf_config"],
    ["config", "shards", "synthetic", "integrity", "tokenizer", "rows"],
    ["sft_source", "memory"],
    ["kernels"],
    ["resident"],
    ["gate", "rotary"],
    ["ops"],
    ["model", "arena", "topology", "consensus", "data"],
    ["loss", "network", "optimizer", "runtime"],
    ["step", "validation"],
    ["checkpoint", "metrics", "trackers", "run_folder", "hf", "generate"],
    ["outer", "control"],
    ["build"],
    ["describe", "records"],
    ["resume"],
    ["train"],
    ["main", "evaluate", "export"],
]
COMMANDS = {("generate", "main")}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

MAX_LINES = 350
LONGER = {  # file: most lines it may have
    "llama_jax/shards.py": 420,  # the whole cache format: write, read, verify
}
NEVER = {"tensorflow", "tf", "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
ALLOWED_OF_LLAMA_JAX = {
    "configs": {"config"},
    "data_pipeline": {"shards", "rows", "config", "errors", "files"},
}
DISTRIBUTIONS = {  # import name: distribution, where they differ
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
    "google": "protobuf",
}
EXTRAS = {
    "data_pipeline": ["prepare"],
    "scripts": ["report"],
}  # what a folder's module-level imports may use besides the core


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> list[tuple[str, int, str | None]]:
    """(dotted module, line, name of the outermost enclosing function) of every absolute import, wherever it stands."""
    found = []

    def visit(node: ast.AST, function: str | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function is None:
            function = node.name
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            # "from llama_jax import ops" names the module ops, "from llama_jax.ops import dense" a thing inside it.
            inside = node.module in ("llama_jax", "llama_jax.kernels", "data_pipeline", "bench", "scripts")
            found.extend(
                (f"{node.module}.{a.name}" if inside else node.module, node.lineno, function) for a in node.names
            )
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, None)
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def layer_of(module: str) -> str:
    """The name in LAYERS of a dotted module: llama_jax.kernels.adamw is "kernels"."""
    return module.split(".")[1]


def upward(name: str, tree: ast.AST) -> list[str]:
    """Imports of module `name` of llama_jax that break the order."""
    problems = []
    for module, line, function in imported(tree):
        if module.split(".")[0] != "llama_jax" or module == "llama_jax.__version__":
            continue
        other = layer_of(module)
        if other not in RANK:
            problems.append(f"line {line}: {module} has no place in LAYERS")
        elif RANK[other] > RANK[name] and (name, function) not in COMMANDS:
            problems.append(f"line {line}: {name} imports {other}, which lies above it")
    return problems


@pytest.mark.parametrize("path", sources("llama_jax"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down(path):
    relative = path.relative_to(ROOT / "llama_jax")
    name = "kernels" if relative.parts[0] == "kernels" else relative.stem
    if relative.as_posix() == "__init__.py":
        assert imported(parse(path)) == [], (
            "llama_jax/__init__.py stays free of imports: import llama_jax.config needs no JAX"
        )
        return
    assert name in RANK, f"give {relative} a place in LAYERS"
    assert upward(name, parse(path)) == []


def test_no_import_cycle():
    graph = {}
    for path in sources("llama_jax"):
        relative = path.relative_to(ROOT).with_suffix("")
        module = ".".join(relative.parts).removesuffix(".__init__")
        graph[module] = {
            other for other, _, function in imported(parse(path)) if other.startswith("llama_jax.") and function is None
        }
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*trail, module))
        if module in state or module not in graph:
            return
        state[module] = "open"
        for other in sorted(graph[module]):
            visit(other, (*trail, module))
        state[module] = "done"

    for module in graph:
        visit(module, ())


def test_order_check_can_fail():
    assert upward("ops", ast.parse("from llama_jax import train")) == ["line 1: ops imports train, which lies above it"]
    assert upward("ops", ast.parse("import llama_jax.train as t")) != []
    assert upward("ops", ast.parse("def f():\n    from llama_jax.step import x")) != []
    assert upward("generate", ast.parse("def main():\n    from llama_jax.train import x")) == []
    assert upward("generate", ast.parse("from llama_jax.train import x")) != []
    assert upward("train", ast.parse("from llama_jax import ops, nonsense")) != []


@pytest.mark.parametrize("folder", sorted(ALLOWED_OF_LLAMA_JAX))
def test_lower_packages_use_little(folder):
    for path in sources(folder):
        for module, line, _ in imported(parse(path)):
            where = f"{path.relative_to(ROOT)}:{line}: {module}"
            top = module.split(".")[0]
            if top == "llama_jax":
                assert layer_of(module) in ALLOWED_OF_LLAMA_JAX[folder], where
            assert top not in ("jax", "jaxlib", "flax", "optax", "orbax", "bench", "scripts"), where


def test_llama_jax_stands_alone():
    for path in sources("llama_jax"):
        for module, line, _ in imported(parse(path)):
            top = module.split(".")[0]
            assert top not in ("bench", "scripts", "data_pipeline", "configs", "tests"), f"{path.name}:{line}: {module}"


def test_nothing_unpickles_or_needs_tensorflow():
    for path in sources("llama_jax", "data_pipeline", "configs", "bench", "scripts"):
        tree = parse(path)
        for module, line, _ in imported(tree):
            assert module.split(".")[0] not in NEVER, f"{path.relative_to(ROOT)}:{line}: {module}"
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", where
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), where


def declared(*extras: str) -> set[str]:
    """Names of the distributions that pyproject.toml asks for, with the given extras ("all" for every one)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = list(project["dependencies"])
    for extra in optional if extras == ("all",) else extras:
        wanted += optional[extra]
    return {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in wanted}


@pytest.mark.parametrize("folder", ["llama_jax", "data_pipeline", "configs", "bench", "scripts"])
def test_every_import_is_declared(folder):
    at_start, anywhere = declared(*EXTRAS.get(folder, [])), declared("all")
    ours = {"llama_jax", "data_pipeline", "configs", "bench", "scripts"}
    for path in sources(folder):
        for module, line, function in imported(parse(path)):
            top = module.split(".")[0]
            if top in ours or top in sys.stdlib_module_names:
                continue
            distribution = DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
            where = f"{path.relative_to(ROOT)}:{line}: pyproject.toml does not ask for {distribution}"
            assert distribution in (at_start if function is None else anywhere), where


def test_files_are_short():
    for path in sources("llama_jax", "data_pipeline", "configs", "bench", "scripts"):
        name = path.relative_to(ROOT).as_posix()
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGER.get(name, MAX_LINES), f"{name} has {lines} lines"
    for name in LONGER:
        assert (ROOT / name).is_file(), f"{name} is gone: take it out of LONGER"


def test_config_needs_no_jax():
    block = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorflow"}:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Refuse())
import llama_jax.config
import llama_jax.shards

assert not [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib")]
try:
    import jax
except ImportError:
    print("blocked")
"""
    result = subprocess.run(
        [sys.executable, "-c", block],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "blocked\n"
