# Each target makes .venv first if it is missing. CONSTRAINTS= (empty) takes the newest versions the ranges allow.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
WORKERS ?= 4
# More tests of the slow tier have limits of time.
SLOW_WORKERS ?= 3
BIN := .venv/bin
# The reference project's matrix, and three variants of two processes; `python -m qa_lib sweep --preset smoke` runs all.
VARIANTS := A1,A0,A2,A3,A4-nb,A4,A4-b,B1,B1-all,B2,B3,B3-last4,C1,C2-8,C2,D1,D1-cudagraphs,D1-nvfuser,P1,P-fsdp,P-1f1b

quickstart: .venv/ready  ## eight small trainings on a CPU, and what came of them on one screen
	$(BIN)/python -m qa_lib quickstart

matrix: .venv/ready  ## every variant of the reference project, three parallel ones, two of a language model, then the report
	$(BIN)/python -m qa_lib sweep --preset smoke --variants $(VARIANTS)
	$(BIN)/python -m qa_lib sweep --preset lm-smoke --variants L1,L-sdpa
	$(BIN)/python -m qa_lib report --group cpu-smoke

app: .venv/ready  ## ask the best of your runs' models in the browser; and the dashboard
	$(BIN)/python -m qa_lib app

test: lint  ## everything once, in minutes: pairs of settings in few runs, the commonest faults
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: test test-slow  ## and every pair, fault, signal and notebook by itself

test-slow: .venv/ready  ## what `make test` leaves out
	$(BIN)/python -m pytest -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder -m slow

# Packages that print lines of their own into what other tests read; Triton comes with PyTorch's CUDA builds alone.
extras: .venv/extras  ## tests of kernels, without a GPU, and of quantized weights: 300 MB to fetch
	PYTHONPATH=.venv/extras $(BIN)/python -m pytest -n $(WORKERS) -m "triton or torchao"

links:  ## the checkout's own address on GitHub in its links to Colab and in the clone command, from its git remote
	@$(PYTHON) notebooks/links.py

lint: .venv/ready  ## style, and whether links lead to this repository
	@$(PYTHON) notebooks/links.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/ready: requirements.txt tests/requirements.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv; once, for a few minutes."
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -r requirements.txt -r tests/requirements.txt $(addprefix -c ,$(CONSTRAINTS))
	@touch $@

.venv/extras: .venv/ready
	$(BIN)/python -m pip install -q --no-deps --target $@ triton==3.9.0 torchao==0.18.0

.PHONY: quickstart matrix app test test-all test-slow extras links lint
