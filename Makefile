# make demo   set up, fetch the bundled model, answer sums and compare configurations: under five minutes on two cores
# make test   set up, check style and types, run the quick tests: under five minutes
# make test-slow  the slow tests: of those with thousands of cases, 250 each, others every week or with SAMPLE=N
# make test-all  the same as make test with all tests
# make fuzz   many rounds of each fuzz test: FUZZ=N rounds
#
# Packages are installed in the versions of constraints.txt; `make test CONSTRAINTS=` installs the newest ones that
# pyproject.toml allows instead, and upgrades a VENV that has other ones.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
FUZZ ?= 3000
SAMPLE ?= $(shell date +%G%V)
BIN = $(VENV)/bin
CHECKED = $(VENV)/checked
INSTALLED = $(VENV)/$(if $(CONSTRAINTS),.installed,.newest)
INSTALL = $(BIN)/pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade --upgrade-strategy eager)

.PHONY: demo test test-slow test-all fuzz check

demo: $(INSTALLED)
	$(BIN)/specbatch models pull smollm2-135m
	$(BIN)/specbatch eval one_digit_sums --limit 10 --spec v2
	$(BIN)/specbatch sweep --concurrency 1 --output-len 64
	@echo
	@echo "next, with a folder, a .gguf file or a hub id as MODEL: $(BIN)/specbatch sweep --model MODEL"

test: check
	$(BIN)/pytest -q -n 2 --dist worksteal

test-slow: $(INSTALLED)
	$(INSTALL) --editable '.[test,ray,test-servers]'
	$(BIN)/pytest -q -n 2 --dist worksteal -m slow --sample $(SAMPLE)

test-all: check
	$(INSTALL) --editable '.[test,ray,test-servers]'
	$(BIN)/pytest -q -n 2 --dist worksteal -m "slow or not slow"

fuzz: $(INSTALLED)
	$(BIN)/pytest -q -n 2 tests/fuzz --fuzz $(FUZZ)

# Types and layers are checked in a copy in which kernels/, evals/ and sweeps/ lie under specbatch, as when installed.
check: $(INSTALLED)
	$(BIN)/ruff check
	rm -rf $(CHECKED)/specbatch
	mkdir -p $(CHECKED)
	cp -r specbatch $(CHECKED)
	cp -r kernels evals sweeps $(CHECKED)/specbatch
	touch $(CHECKED)/specbatch/kernels/__init__.py $(CHECKED)/specbatch/evals/__init__.py $(CHECKED)/specbatch/sweeps/__init__.py
	cd $(CHECKED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p specbatch
	cd $(CHECKED) && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed $(VENV)/.newest
	$(INSTALL) --editable '.[test]'
	touch $@
