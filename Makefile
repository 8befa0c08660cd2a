# make demo   set up, fetch the bundled model, answer sums and compare configurations: a few minutes on two cores
# make test   set up, check style and types, run the quick tests: under five minutes
# make test-all  the same with all tests
#
# Packages are installed in the versions of constraints.txt; `make test CONSTRAINTS=` installs the newest ones instead.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-all check

demo: $(INSTALLED)
	$(BIN)/specbatch models pull smollm2-135m
	$(BIN)/specbatch eval one_digit_sums --limit 40 --spec off
	$(BIN)/specbatch eval one_digit_sums --limit 40 --spec v2
	$(BIN)/specbatch sweep --concurrency 1,4 --configs baseline,v1,v2 --input-len 64 --output-len 32 --repeats 3

test: check
	$(BIN)/pytest -q -n 2 --dist worksteal

test-all: check
	$(BIN)/pytest -q -n 2 --dist worksteal -m "slow or not slow"

# Types are checked in an installed copy: only there do kernels/, evals/ and sweeps/ lie under specbatch.
check: $(INSTALLED)
	$(BIN)/ruff check
	rm -rf build $(VENV)/typed
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/typed .
	cd $(VENV)/typed && ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p specbatch

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[test]'
	touch $@
