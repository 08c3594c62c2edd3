# fp8fleet: what a person or CI runs.
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test test-unit test-long check bench locks tables docs clean

demo: $(VENV)/ready  ## a served model on a host made on this machine
	$(PY) -m lab.demo

test: check  ## everything but what test-long adds; end-to-end with root
	$(PY) -m pytest -m "not long"

test-long: check  ## what takes minutes more
	$(PY) -m pytest -m long

test-unit: check  ## what needs no root and no network
	$(PY) -m pytest tests/unit tests/operations

check: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	for part in unit operations e2e; do MYPYPATH=tests/$$part $(VENV)/bin/mypy tests/$$part || exit 1; done
	$(PY) -m fp8fleet.inventory_docs --check

bench: $(VENV)/ready  ## the figures of the docs, measured here
	$(PY) -m lab.bench
	$(PY) -m lab.bench_models

docs: $(VENV)/ready  ## the pages that are generated from the code
	$(PY) -m fp8fleet.inventory_docs

tables: $(VENV)/ready  ## fp8fleet/catalog/serve anew, from the releases' own argument parsers
	$(PY) -m lab.option_tables

# Those of the hosts: tools.txt and conda.txt by the command in their first lines, the engines' by
# `fp8fleet lock`, the lab's by `python -m lab.wheels --relock`.
locks: $(VENV)/ready  ## locks/dev.txt, the development environment, anew
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links --extra dev -o locks/dev.txt pyproject.toml

$(VENV)/ready: locks/dev.txt pyproject.toml bootstrap.sh
	sh bootstrap.sh $(VENV)

clean:  ## the environment; the lab's disks and cache: docs/lab.md
	rm -rf $(VENV)
