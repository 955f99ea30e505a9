# Each target makes .venv first if it is missing. CONSTRAINTS= (empty) takes the newest versions the ranges allow.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
# As quick for a model this small, and on a busy machine many times quicker than threads that wait for each other.
export OMP_NUM_THREADS ?= 1

quickstart: .venv/ready  ## every row a CPU can run, offline, then the report
	$(BIN)/python -m qa_lib sweep --scale smoke
	$(BIN)/python -m qa_lib report

test: lint  ## unit tests, every notebook, the driver under faults
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/ready: requirements.txt tests/requirements.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv; once, for a few minutes."
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -r requirements.txt -r tests/requirements.txt $(addprefix -c ,$(CONSTRAINTS))
	@touch $@

.PHONY: quickstart test lint
