# One entry for people and for CI. PYTHON names the interpreter that creates .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check interop clean

demo: .venv/demo.stamp ## quantize a real model by rules, serve it and ask it a question
	$(BIN)/python scripts/demo.py

test: .venv/dev.stamp ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(TESTS)

check: .venv/dev.stamp ## style, types, floors and the size budget
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/budget.py

interop: ## other tools read what Terrazzo writes, and the other way round
	bash scripts/interop.sh

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[demo]'
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $@ .venv/demo.stamp
