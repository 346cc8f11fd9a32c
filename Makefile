# Everything a fresh machine needs is Python 3.11 or newer and make: each target sets up .venv first.

PYTHON ?= python3
ARGS ?=
STAMP := .venv/.installed
DOCS := .venv/.docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test check docs fmt clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## create .venv and install remap with its development tools

# The stamp is newer than pyproject.toml exactly when the environment matches it.
$(STAMP): pyproject.toml
	@echo "Setting up .venv (a minute or two, once) ..."
	@$(PYTHON) -c 'import sys; sys.exit("remap needs Python 3.11 or newer: add PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## run the striped vector add (ARGS="--driver host" and so on)
	.venv/bin/remap demo vector-add $(ARGS)

# In several processes on the host driver, in one on CUDA: tests/conftest.py says how many.
test: $(STAMP) ## run the tests (ARGS="-k name --driver cuda" and so on)
	.venv/bin/python -m pytest -n auto --dist loadscope $(ARGS)

check: $(STAMP) ## check format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/pyright

# The documentation's tools are not needed for anything else, so they come with the first build of it.
$(DOCS): $(STAMP)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: $(DOCS) ## build the documentation into build/docs: notebooks run, warnings are errors
	.venv/bin/python -m sphinx -W --keep-going -q -j auto -d build/doctrees -b html docs build/docs $(ARGS)
	@echo "Open build/docs/index.html"

fmt: $(STAMP) ## format the code and apply the safe fixes of the linter
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove .venv and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
