"""The commands of README.md, for the tests that run them."""

import os
import re
from pathlib import Path

import harness

README = Path(os.environ.get("LLAMA_JAX_README", harness.ROOT / "README.md"))


def commands(heading):
    """The commands in the code blocks below a heading; a line that ends in a backslash goes on in the next."""
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{README} has no section {heading}"
    joined = re.sub(r"\\\n\s+", "", found[1])
    lines = [line.strip() for line in re.findall(r"^    (.*)$", joined, re.MULTILINE)]
    assert lines, f"the section {heading} has no commands"
    return lines
