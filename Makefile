# fp8fleet: what a person or CI runs.
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test test-unit test-long check bench locks docs clean

demo: $(VENV)/ready  ## a served model on a host made on this machine
	$(PY) -m lab.demo

test: check  ## everything, the end-to-end part included
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

docs: $(VENV)/ready  ## the pages that are generated from the code
	$(PY) -m fp8fleet.inventory_docs

locks: $(VENV)/ready  ## the development and tools environments, locked anew
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links --extra dev -o locks/dev.txt pyproject.toml

$(VENV)/ready: locks/dev.txt pyproject.toml bootstrap.sh
	sh bootstrap.sh $(VENV)

clean:
	rm -rf $(VENV)
