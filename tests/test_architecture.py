"""The rooms of docs/architecture.md: who may import whom, who may name what, and what no file may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "fxgraph").rglob("*.py"))
RULES = sorted((ROOT / "passes").rglob("*.py"))

LEAVES = {"errors", "fallback", "_version"}
# Which modules of fxgraph each may import; `engines` and `_torch_compat` stand for their modules. The order of the
# page: api, graphed, backend, program, replay, slots, engines; and program, replay, slots may use plan, which may use
# trace.
MAY: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "fallback": set(),
    "options": {"errors"},
    "_torch_compat": set(),
    "breaks": set(),
    "engines": {"errors", "_torch_compat"},
    "weight_casts": set(),
    "likeness": {"_torch_compat"},
    "layers": {"likeness"},
    "stitching": {"layers", "_torch_compat"},
    "trace": {"errors", "layers", "stitching", "weight_casts", "_torch_compat"},
    "signature": {"plan", "trace"},
    "effects": {"trace", "_torch_compat"},
    "plan": {"effects", "trace", "_torch_compat"},
    "sharing": {"likeness", "plan", "trace", "_torch_compat"},
    "again": {"plan", "_torch_compat"},
    "partial": {"plan", "effects", "trace", "_torch_compat"},
    "places": {"plan"},
    "accumulate": {"engines", "plan", "trace", "_torch_compat", "errors"},
    "compiling": {"engines", "plan", "trace", "_torch_compat"},
    "slots": {"accumulate", "compiling", "places", "engines", "signature", "plan", "trace", "_torch_compat", "errors"},
    "replay": {"accumulate", "again", "slots", "partial", "plan", "trace", "engines", "_torch_compat", "errors"},
    "asking": {"replay", "accumulate", "_torch_compat"},
    "verifying": {"replay", "slots", "plan", "trace", "errors", "_torch_compat"},
    "program": {
        *(
            "verifying",
            "replay",
            "accumulate",
            "again",
            "asking",
            "compiling",
            "partial",
            "sharing",
            "effects",
            "slots",
            "signature",
            "plan",
            "trace",
            "weight_casts",
            "engines",
            "options",
            "errors",
            "fallback",
        ),
        "_torch_compat",
    },
}
# The front of the house may import all that is above, and each other in this order.
FRONT = ["stages", "backend", "graphed", "api", "checking", "stats", "__init__"]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "fxgraph").with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted absolute name, line) of everything a file imports, inside functions too."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{prefix}.{alias.name}", node.lineno


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """The rooms of fxgraph that a file imports."""
    names = {room(source) for source in SOURCES} - {"__init__"}
    for module, line in imports(path):
        parts = module.split(".")
        if parts[0] == "fxgraph" and len(parts) > 1 and parts[1] in names:
            yield parts[1], line


# -- direction --------------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_on_the_page() -> None:
    rooms = {room(path) for path in SOURCES}
    assert rooms == set(MAY) | set(FRONT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_table_only(path: Path) -> None:
    own = room(path)
    allowed = set(MAY[own]) if own in MAY else set(MAY) | set(FRONT[: FRONT.index(own)])
    if own in ("engines", "_torch_compat"):
        allowed |= {own}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports fxgraph.{name}"
        for name, line in own_imports(path)
        if name not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_itself_has_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(MAY)
    while waiting:
        free = [name for name, needs in waiting.items() if needs <= done]
        assert free, f"a cycle among {sorted(waiting)}"
        for name in free:
            done.add(name)
            del waiting[name]


@pytest.mark.parametrize("path", RULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_passes_never_imports_fxgraph_and_imports_itself_relatively(path: Path) -> None:
    for module, line in imports(path):
        assert module.split(".")[0] != "fxgraph", f"line {line}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] != "passes" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] != "passes", f"line {node.lineno}: not relative"


def test_engines_do_not_touch_dynamo_and_plan_no_engine() -> None:
    for path in SOURCES:
        modules = {module for module, _ in imports(path)}
        if room(path) in ("engines", "slots", "plan", "replay", "signature"):
            assert not [m for m in modules if m.startswith("torch._dynamo")], path
        if room(path) in ("plan", "trace", "signature"):
            assert not [m for m in modules if ".engines" in m], path


# -- who may name what ------------------------------------------------------------------------------------------------


def code_of(path: Path) -> str:
    """The source without comments and texts."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


CUDA = re.compile(r"torch\.cuda|CUDAGraph|\bStream\b|graph_pool|torch\._C\._cuda|cudart|default_generators")
# The rules have to know which ops of a user's graph are CUDA's; they run none.
CUDA_IN_RULES = re.compile(r"CUDAGraph|\bStream\b|graph_pool|torch\._C\._cuda|cudart|current_stream|cuda\.graph")


@pytest.mark.parametrize("path", [*SOURCES, *RULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_cuda_engine_names_streams_graphs_pools_and_generators(path: Path) -> None:
    found = (CUDA if path in SOURCES else CUDA_IN_RULES).findall(code_of(path))
    if path == ROOT / "fxgraph" / "engines" / "cuda.py":
        assert found, "the pattern finds nothing where it should"
    else:
        assert not found


PRIVATE = re.compile(r"torch\._(?!_|debug_has_internal_overlap|foreach_copy_|ops\b|guards\b)\w+(?:\.\w+)*")
# Registration of a backend and turning Dynamo off have no public names of their own; the types of errors are Dynamo's.
PRIVATE_ALLOWED = {
    "__init__": {"torch._dynamo.backends.registry"},
    "backend": {"torch._dynamo", "torch._dynamo.disable"},
    "trace": {"torch._subclasses.fake_tensor.UnsupportedOperatorException"},
}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if room(path) not in ("_torch_compat", "engines")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_private_torch_is_reached_through_torch_compat(path: Path) -> None:
    found = set(PRIVATE.findall(code_of(path)))
    found |= {m for m, _ in imports(path) if re.match(r"torch\._|torch\.\w+\._", m) and m != "torch.utils._pytree"}
    allowed = PRIVATE_ALLOWED.get(room(path), set())
    wrong = {name for name in found if not any(name == a or name.startswith(a + ".") for a in allowed)}
    assert not wrong


def test_fxgraph_imports_nothing_but_torch_and_the_standard_library() -> None:
    known = {"torch", "passes", "fxgraph", *sys.stdlib_module_names}
    for path in [*SOURCES, *RULES]:
        outside = {module.split(".")[0] for module, _ in imports(path)} - known
        assert not outside, path


# -- what no file may say ---------------------------------------------------------------------------------------------


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to it is not known")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_a_machines_paths_or_hosts() -> None:
    # Written so that this file does not match itself.
    words = [
        r"/wor" + r"k/",
        r"/ro" + r"ot/",
        r"/ho" + r"me/\w",
        r"(https?://|@)[\w.-]*(proxy|mirror|artifactory)[\w.-]*",
    ]
    words += [r"index-u" + r"rl\s*=", r"\b(?:10|192\.168|172\.16)\.\d+\.\d+\b(?!\.)\S*:\d+", r"loc" + r"alhost:\d"]
    pattern = re.compile("|".join(words))
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_a_pickle_of_ours_does_not_name_passes_by_its_folder() -> None:
    """`passes` is a common name; a custom op or logger that carried it would clash with a user's own."""
    for path in RULES:
        code = code_of(path)
        assert "torch.library" not in code, path
        assert "getLogger" not in code, path
