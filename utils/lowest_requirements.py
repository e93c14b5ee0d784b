"""Prints the lower bounds of pyproject.toml as exact pins, for `make test-lowest`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
installed = [requirement for name in ("train", "eval", "harness", "demo", "test") for requirement in extras[name]]
for requirement in dict.fromkeys([*project["dependencies"], *installed]):
    bound = re.fullmatch(r"([\w-]+)(?:>=|==)([\w.]+)", requirement)
    if bound:  # an extra that names other extras has no version
        print(f"{bound[1]}=={bound[2]}")
