"""Test that each module imports only from its own layer and from lower layers, and that no imports form a circle.

Imports within functions count. Imports for annotations alone (`TYPE_CHECKING`) do not count. The compiled modules are
found by their sources, and a declaration file (.pxd) belongs to its module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The layers from the bottom up. Each has a title, and the names of its modules in `ascend_grad`. A package stands for
#: all of its modules that no other layer names. The name of a compiled module follows its folder in ``pyx/``, as in
#: "runtime/_cpu".
LAYERS = (
    (
        "declarations of the C headers",
        "runtime/_kernels rowwise/_rowwise_kernels linear/_linear_kernels",
    ),
    (
        "errors, and the machine",
        (
            "errors status _version _cyutility runtime/_openmp runtime/_cpu runtime/_tasks runtime/_threads "
            "runtime/_memory arrays/_dtypes arrays/_views arrays/_overlap arrays/_dlpack xla/_xla_frame"
        ),
    ),
    ("the Ascend libraries", "ascend/_acl ascend/_aclnn_types ascend/_aclnn"),
    (
        "arrays, arguments, settings, options",
        "arrays/_array_types arrays sparse_arrays arguments config operators.options",
    ),
    (
        "CPU schedules",
        (
            "loss/_loss_options xla/_xla_losses rowwise/_rowwise_plan rowwise/_rowwise_costs "
            "rowwise/_rowwise_candidates rowwise/_rowwise_expanded rowwise/_rowwise_schedule "
            "rowwise/_cross_entropy_rows rowwise/_cross_entropy_finish rowwise/_cross_entropy_full "
            "rowwise/_cross_entropy_tasks rowwise/_cross_entropy_schedule "
            "linear/_linear_grid linear/_linear_problem linear/_linear_plan linear/_linear_candidates "
            "linear/_linear_run linear/_linear_packing linear/_linear_partial_sums linear/_linear_results "
            "linear/_linear_packed linear/_linear_vocab_streamed linear/_linear_rows_streamed linear/_linear_features "
            "linear/_linear_top_k linear/_linear_schedule linear/_linear_loss linear/_linear_views "
            "linear/_linear_hvp_streamed linear/_linear_sparse"
        ),
    ),
    ("the call and its checks", "call/_call call/_checks call/_target_checks call/_loss_checks"),
    (
        "CPU schedules of arrays",
        (
            "loss/_loss_arguments rowwise/_rowwise_python rowwise/_cross_entropy_python linear/_linear_python "
            "linear/_linear_hvp linear/_linear_sparse_python"
        ),
    ),
    (
        "the CPU's results, and its operators for Cython and XLA",
        (
            "call/_cpu_backend rowwise/rowwise linear/linear xla/_xla_rowwise xla/_xla_linear xla/_xla_cross_entropy "
            "xla/_xla_python"
        ),
    ),
    ("the table of operators", "operators.table operators.ranks operators.results operators.signatures"),
    ("backends", "backends.base backends.cpu backends.loss_reference backends.reference"),
    ("the Ascend NPU", "backends.ascend"),
    ("the registry", "backends"),
    ("the choice of a backend", "call/_dispatch context_choice"),
    ("operators and questions", "option_types operators threads npu inspection"),
    ("what compiled modules import", "_compiled"),
    ("the public interface", "ascend_grad"),
    ("losses over ranks", "parallel"),
    ("objectives and estimators for other libraries", "objectives sklearn"),
    ("bounds on errors", "bounds"),
    ("demonstration", "demo"),
    ("tensors of PyTorch", "torch.tensors"),
    ("their operators and functions", "torch"),
    ("functions for JAX", "jax"),
    ("dask arrays: which are taken, what workers compute", "dask.arrays dask.tasks"),
    ("their blocks of rows", "dask.row_blocks"),
    ("their functions", "dask"),
    ("benchmark: cases, machine, tables", "bench.case bench.machine bench.tables"),
    ("benchmark: frameworks, results", "bench.frameworks bench.results"),
    ("benchmark: lists of cases, their arrays", "bench.cases bench.arrays"),
    ("benchmark: what the cases compare", "bench.sides"),
    ("benchmark: times and errors", "bench.measure bench.accuracy"),
    ("benchmark: targets, tables, pictures", "bench.targets bench.report bench.charts"),
    ("benchmark: losses over ranks", "bench.parallel"),
    ("benchmark: documents", "bench.documents bench bench.fit bench.parallel.__main__"),
    ("command line", "cli __main__"),
)


#: The layer of each named module, and the folder of each compiled module.
LAYER_OF: dict[str, int] = {}
FOLDER_OF: dict[str, str] = {}
for _number, (_, _modules_of_layer) in enumerate(LAYERS):
    for _entry in _modules_of_layer.split():
        _folder, _, _name = _entry.rpartition("/")
        LAYER_OF[_name] = _number
        if _folder:
            FOLDER_OF[_name] = _folder

_CYTHON_IMPORT = re.compile(r"^ *from +([.\w]+) +c?import +(\([^)]*\)|[^\n#]*)|^ *c?import +([.\w]+)", re.MULTILINE)


def _sources() -> Iterator[tuple[str, Path]]:
    """Yield names of modules, relative to the package, with their source files. The package is "ascend_grad"."""
    for folder, prefix in (("ascend_grad", ""), ("bench", "bench.")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = prefix + ".".join(part for part in parts if part != "__init__")
            yield name.rstrip(".") or "ascend_grad", path
    for pattern in ("pyx/*/*.pyx", "pyx/*/*.pxd", "ascend_grad/*.pxd"):
        yield from ((path.stem, path) for path in ROOT.glob(pattern))


SOURCES = list(_sources())
MODULES = {name for name, _ in SOURCES} | {"_cyutility"}  # Cython generates this one


def _modules(base: str, names: list[str]) -> Iterator[str]:
    """Yield the modules that ``from base import names`` imports. `base` is relative to the package, without dots."""
    for name in names:
        inner = f"{base}.{name}" if base else name
        yield inner if inner in MODULES else base or "ascend_grad"


def _relative(base: str) -> str | None:
    """Return an absolute name of a module relative to the package, or None for other packages."""
    return base.removeprefix("ascend_grad").lstrip(".") if base.partition(".")[0] == "ascend_grad" else None


def _within(name: str, path: Path, level: int) -> str:
    """Return the package that `level` dots stand for in a module."""
    parts = [] if name == "ascend_grad" else name.split(".")
    return ".".join(parts[: len(parts) + (path.name == "__init__.py") - level])


def _python_imports(name: str, path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    annotations = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for node in annotations for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            package = _within(name, path, node.level) if node.level else _relative(node.module or "")
            if package is None:
                continue
            base = ".".join(filter(None, (package, node.module))) if node.level else package
            yield from _modules(base, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                base = _relative(alias.name)
                if base is not None:
                    yield base or "ascend_grad"


def _cython_imports(path: Path) -> Iterator[str]:
    for base, names, plain in _CYTHON_IMPORT.findall(path.read_text()):
        module = _relative(plain or base) if not base.startswith(".") else base.lstrip(".")
        if module is None:
            continue
        yield from _modules(module, [each.split()[0] for each in names.strip("()").split(",") if each.strip()] or [""])


def _graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in SOURCES:
        imports = _python_imports(name, path) if path.suffix == ".py" else _cython_imports(path)
        graph[name] |= {each.rstrip(".") for each in imports} - {name}
        if path.suffix == ".pyx":
            graph[name].add("_cyutility")
    return graph


GRAPH = _graph()


def _layer(name: str) -> int:
    """Return the number of a module's layer: the layer that names it, or else the nearest package around it."""
    while name not in LAYER_OF:
        name, _, last = name.rpartition(".")
        assert last, "this module has no layer"
    return LAYER_OF[name]


def test_imports_are_found():
    """Imports of each kind are found, so that the tests below are not empty."""
    assert {"_call", "_rowwise_python", "_linear_python", "_dtypes"} <= GRAPH["_cpu_backend"]
    assert {"backends.ascend.backend", "backends.cpu", "config"} <= GRAPH["backends"]
    assert {"backends.ascend.calls", "backends.ascend.limits", "_call"} <= GRAPH["backends.ascend.backend"]
    assert {"arrays", "backends.reference", "_call"} <= GRAPH["backends.ascend.calls"]
    assert {"demo.corpus", "cli.errors", "ascend_grad"} <= GRAPH["cli.demo"]
    assert {"bench.results", "demo.tasks"} <= GRAPH["bench.report"] | GRAPH["bench.arrays"]
    assert {imported for modules in GRAPH.values() for imported in modules} <= MODULES


def test_compiled_modules_lie_in_their_folders():
    sources = [*ROOT.glob("pyx/*/*.pyx"), *ROOT.glob("pyx/*/*.pxd")]
    assert {path.stem: path.parent.name for path in sources} == FOLDER_OF


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_import_from_below(name: str):
    own = _layer(name)
    for imported in GRAPH[name]:
        layer = _layer(imported)
        assert layer <= own, f"{name} ({LAYERS[own][0]}) imports {imported} ({LAYERS[layer][0]}), which is above it"


@pytest.mark.parametrize(
    ("own", "other"), [("_rowwise_schedule", "_linear_kernels"), ("_linear_loss", "_rowwise_kernels")]
)
def test_families_share_no_kernels(own: str, other: str):
    """Modules of one family do not depend on the other family's kernels.

    A change of one family's headers therefore needs no new build of the other family's modules.
    """
    reached, left = set[str](), {own}
    while left:
        name = left.pop()
        reached.add(name)
        left |= GRAPH[name] - reached
    assert "_kernels" in reached
    assert other not in reached


def test_no_circles():
    # The package itself is left out: each import of a module imports the package, which imports the public modules.
    inner = {name: imports - {"ascend_grad"} for name, imports in GRAPH.items() if name != "ascend_grad"}
    try:
        TopologicalSorter(inner).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def _reached(start: set[str], through: set[str]) -> set[str]:
    """Return the modules that these modules import, directly or by way of the modules `through`."""
    reached: set[str] = set()
    left = set(start)
    while left:
        name = left.pop()
        reached.add(name)
        parts = name.split(".")
        packages = {".".join(parts[:end]) for end in range(1, len(parts))}
        left |= (packages | (GRAPH[name] if name in through else set())) - reached
    return reached


PYTHON = {name for name, path in SOURCES if path.suffix == ".py"}
COMPILED = {name for name, path in SOURCES if path.suffix == ".pyx"} | {"_cyutility"}


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_python_sources_tell_all_imports(name: str):
    """A tool that freezes a program reads Python sources alone, and finds all modules that compiled modules import."""
    start = {name, "ascend_grad"}
    missing = _reached(start, MODULES) & (PYTHON | COMPILED) - _reached(start, PYTHON)
    assert not missing, "add these to ascend_grad/_compiled.py, or to the package of their users"


def test_python_sources_tell_imports_of_other_packages():
    pattern = re.compile(r"^(?:import|from) +([a-z]\w*(?:\.\w+)*)(?= +import\b| +as\b| +#|$)", re.MULTILINE)
    paths = dict(SOURCES)
    by_compiled = {module for path in ROOT.glob("pyx/*/*.pyx") for module in pattern.findall(path.read_text())}
    visible = _reached({"ascend_grad"}, PYTHON) & PYTHON
    by_python = {module for name in visible for module in pattern.findall(paths[name].read_text())}
    assert "numpy" in by_compiled & by_python
    assert not by_compiled - by_python - {"ascend_grad"}, "add these to ascend_grad/_compiled.py"
