"""README.md holds what it says: every Python block runs as it stands, every command that it names exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

# A block opens with a fence of three or more backticks and an info string, and closes with a fence as long or longer.
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
_ASSIGNMENT = re.compile(r"\w+=")  # in front of a command, a variable of its environment
# torch.utils.mkldnn is written with script_method, and importing torch._inductor imports it (see pyproject.toml).
TORCH_OWN = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
SHELLS = {"bash", "console", "sh", "shell"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string's first word and rest, the line its text starts at (from 1), and the text."""

    language: str
    rest: str
    line: int
    text: str


def fenced_blocks(markdown: str) -> list[Block]:
    """All fenced blocks, in order. A fence that nothing closes is an error, not a block that runs to the end."""
    blocks = []
    lines = iter(enumerate(markdown.splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if not opening:
            continue
        fence, indent, body = opening["fence"], len(opening["indent"]), []
        for _, inner in lines:
            closing = _FENCE.match(inner)
            if closing and closing["fence"].startswith(fence) and not closing["info"].strip():
                break
            body.append(re.sub(f"^ {{0,{indent}}}", "", inner))
        else:
            raise ValueError(f"line {number}: the fence is never closed")
        language, _, rest = opening["info"].strip().partition(" ")
        blocks.append(Block(language.lower(), rest.strip(), number + 1, "\n".join(body)))
    return blocks


def shell_commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, as words; in a console block only lines with a prompt are commands."""
    prompted = block.language == "console"
    commands = []
    for line in block.text.replace("\\\n", " ").splitlines():
        stripped = line.strip()
        if prompted and not stripped.startswith("$ "):
            continue
        for part in re.split(r"&&|\|\||[;|]", stripped.removeprefix("$ ")):
            words = list(dropwhile(_ASSIGNMENT.match, shlex.split(part, comments=True)))
            if words:
                commands.append(words)
    return commands


def make_targets() -> set[str]:
    """The targets that the Makefile declares."""
    declared = re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return {name for line in declared for name in line.split()}


BLOCKS = fenced_blocks(README.read_text(encoding="utf-8")) if README.exists() else []
PYTHON = [b for b in BLOCKS if b.language in ("python", "py")]
COMMANDS = [(b.line, words) for b in BLOCKS if b.language in SHELLS for words in shell_commands(b)]


def test_readme_has_blocks_of_both_kinds():
    """Guards the tests below against passing because they found nothing."""
    assert README.exists()
    assert PYTHON, "README.md has no ```python block"
    assert COMMANDS, "README.md has no ```bash or ```console block"


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: f"line{b.line}")
def test_python_block_runs(block: Block, tmp_path: Path):
    """Each block is a script of its own: it runs in a fresh namespace, in an empty folder, warnings being errors."""
    if block.rest.startswith("no-run"):
        reason = block.rest.removeprefix("no-run").strip(" :=\"'")
        assert reason, f"README.md:{block.line}: no-run without a reason; write ```python no-run: why"
        compile(block.text, f"README.md:{block.line}", "exec")
        pytest.skip(f"README.md:{block.line}: {reason}")
    if block.rest == "cuda" and not torch.cuda.is_available():
        compile(block.text, f"README.md:{block.line}", "exec")
        pytest.skip(f"README.md:{block.line}: needs a CUDA device")
    script = tmp_path / "readme_block.py"
    # Blank lines first, so that a traceback names README.md's own line numbers.
    script.write_text("\n" * (block.line - 1) + block.text + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", TORCH_OWN, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [pytest.param(w, id=f"line{n}-{'-'.join(w)}") for n, w in COMMANDS])
def test_command_names_what_exists(words: list[str]):
    """A `make` command names targets that the Makefile declares; a path to a file of ours names one that is there."""
    if words[0] == "make":
        targets = [w for w in words[1:] if "=" not in w and not w.startswith("-")]
        assert set(targets) <= make_targets(), f"the Makefile has no target {sorted(set(targets) - make_targets())}"
    for word in words:
        if word.endswith(".py") and not Path(word).is_absolute():
            assert (ROOT / word).exists(), f"{word} does not exist"


def test_fenced_blocks_are_found_as_markdown_means_them():
    """Language, rest of the info string, line and text; a shorter fence inside does not close a longer one."""
    text = "a\n```python\nx = 1\n```\n\n````md\n```python\n```\n````\n  ```console\n  $ CI=1 make demo\n  out\n  ```\n"
    assert fenced_blocks(text) == [
        Block("python", "", 3, "x = 1"),
        Block("md", "", 7, "```python\n```"),
        Block("console", "", 11, "$ CI=1 make demo\nout"),
    ]
    assert shell_commands(fenced_blocks(text)[2]) == [["make", "demo"]]
    with pytest.raises(ValueError, match="line 1"):
        fenced_blocks("```python\nx = 1\n")
