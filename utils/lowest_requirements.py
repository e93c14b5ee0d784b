"""Prints the lower bounds of pyproject.toml as exact pins, for `make test-lowest`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["train"], *extras["demo"], *extras["test"]]:
    bound = re.fullmatch(r"([\w-]+)(?:>=|==)([\w.]+)", requirement)
    if bound:  # an extra that names other extras has no version
        print(f"{bound[1]}=={bound[2]}")
