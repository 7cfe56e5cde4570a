"""The wheel that users get, seen from outside: what it holds, what it requires, and that it works where it lands."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command that sees no Python path but the one given; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_version() -> str:
    """The version as the one file that states it states it, read without importing the package."""
    namespace: dict[str, str] = {}
    exec((ROOT / "fxgraph" / "_version.py").read_text(), namespace)
    return namespace["__version__"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here, so no wheel can be built (it is in the extra `test`)")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content, as an installer lays it out, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def test_top_level_of_the_wheel_is_both_packages_and_nothing_else(unpacked: Path):
    """Two import packages and the dist-info: no tests, no examples, no stray module."""
    assert {path.name for path in unpacked.iterdir()} == {
        "fxgraph",
        "passes",
        f"fxgraph-{source_version()}.dist-info",
    }


@pytest.mark.parametrize("package", ["fxgraph", "passes"])
def test_wheel_holds_every_module_and_the_typing_mark(unpacked: Path, package: str):
    """What the checkout has, the wheel has; `py.typed` makes type checkers read our annotations."""
    sources = {p.relative_to(ROOT) for p in (ROOT / package).rglob("*.py")}
    assert Path(package, "__init__.py") in sources
    shipped = {p.relative_to(unpacked) for p in (unpacked / package).rglob("*") if p.is_file()}
    assert sources | {Path(package, "py.typed")} <= shipped


def test_wheel_carries_the_license(unpacked: Path, metadata: Message):
    """The licence's name in the metadata and its text in the dist-info."""
    assert metadata["License-Expression"] == "BSD-3-Clause"
    (text,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert text.read_text() == (ROOT / "LICENSE").read_text()


def test_version_has_one_source(metadata: Message):
    """The metadata's version is `fxgraph/_version.py`'s."""
    assert metadata["Version"] == source_version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", source_version())


def test_torch_is_the_only_runtime_requirement(metadata: Message):
    """Everything else is behind an extra."""
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert [str(r) for r in requirements if r.marker is None] == ["torch>=2.11"]
    assert all("extra ==" in str(r.marker) for r in requirements if r.marker is not None)
    assert metadata["Requires-Python"] == ">=3.10"


def test_entry_point_names_the_backend(unpacked: Path):
    """One entry point in the group that Dynamo reads."""
    (distribution,) = importlib.metadata.distributions(path=[str(unpacked)])
    (entry,) = distribution.entry_points
    assert (entry.group, entry.name, entry.value) == ("torch_dynamo_backends", "graphed", "fxgraph.backend:graphed")


def test_wheel_works_from_an_empty_directory(unpacked: Path, tmp_path: Path):
    """`torch.compile(backend="graphed")` without importing fxgraph, and both packages come from the wheel."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "f = torch.compile(lambda x: (x * 2).sin(), backend='graphed')\n"
        "x = torch.arange(4.0)\n"
        "assert torch.equal(f(x), (x * 2).sin())\n"
        "import fxgraph, passes\n"
        "from fxgraph import passes as ours\n"
        "assert ours is passes\n"
        "print(fxgraph.__version__, fxgraph.__file__, passes.__file__, sep='\\n')\n"
    )
    out = run(sys.executable, script, cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert out.split() == [
        source_version(),
        str(unpacked / "fxgraph" / "__init__.py"),
        str(unpacked / "passes" / "__init__.py"),
    ]


def pins() -> dict[str, str]:
    """Distribution name -> version that constraints.txt pins for this interpreter."""
    found = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"not a pin: {line}"
            if requirement.marker is None or requirement.marker.evaluate():
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def installed_closure(root: str, extras: tuple[str, ...]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions that `root[extras]` needs here, itself excepted; not what torch pins exactly by itself."""
    todo, seen = [(root, extras)], {root}
    while todo:
        name, wanted = todo.pop()
        distribution = importlib.metadata.distribution(name)
        if name != root:
            yield distribution
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *wanted)):
                continue
            if name == "torch" and "==" in str(requirement.specifier):
                continue
            needed = canonicalize_name(requirement.name)
            if needed not in seen:
                seen.add(needed)
                todo.append((needed, tuple(requirement.extras)))


def test_constraints_pin_everything_that_gets_installed():
    """Every direct and indirect requirement of `fxgraph[examples,test,dev]` is pinned, to the version that is here."""
    try:
        importlib.metadata.distribution("fxgraph")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fxgraph is not installed here; the environment is not the one that constraints.txt makes")
    pinned = pins()
    if torch.__version__.partition("+")[0] != pinned["torch"]:
        pytest.skip("another torch than constraints.txt names; the environment is not the one that it makes")
    here = {
        canonicalize_name(d.name): d.version.partition("+")[0]
        for d in installed_closure("fxgraph", ("examples", "test", "dev"))
    }
    assert here == {name: pinned.get(name) for name in here}
