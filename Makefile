# Everything runs in .venv, made on first use. `make gpu` alone uses what the CUDA host has installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := rollout engine weight_sync kernels integrations
PROGRAMS := benchmarks examples
MYPY_PACKAGES := $(ROOMS:%=-p stoker.%) $(PROGRAMS:%=-p stoker.%)

# Written when the dependencies are in place, so an interrupted install is taken up again.
DEPENDENCIES := $(VENV)/.dependencies
# The name carries a checksum of all that is installed: an edited, added or deleted file asks for another stamp.
SOURCES := find $(ROOMS) $(PROGRAMS) pyproject.toml -name '*.py' -o -name py.typed -o -name pyproject.toml
INSTALLED := $(VENV)/.installed-$(shell $(SOURCES) | LC_ALL=C sort | xargs cksum | cksum | cut -d ' ' -f 1)
# Setuptools puts whatever an earlier build left there into the next wheel, deleted modules too.
CLEAN_BUILD := rm -rf build stoker.egg-info

export PYTHONUNBUFFERED := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles what is imported, and keeps it; the installer would compile all of torch, for half a minute. Where Python is
# told to keep nothing, as images of containers do, each of the tests' processes would compile torch and transformers anew.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test pytest bench lint ruff mypy docs gpu clean

help:
	@echo "make demo          train a small model with GRPO on this machine (ARGS: more flags)"
	@echo "make test          lint, and the tests that need no GPU (ARGS: more pytest arguments)"
	@echo "make bench         the benchmarks (ARGS: more flags)"
	@echo "make lint          ruff and mypy"
	@echo "make docs          the documentation, into outputs/docs"
	@echo "make gpu OUT=DIR   GPU tests, then the benchmarks, on a CUDA host with torch; results in DIR, in 9 minutes"
	@echo "                   (PARTS=tests or PARTS=benchmarks for one of the two; .ci/gpu names other settings)"
	@echo "make clean         remove the environment, the caches and what builds left"
	@echo "PYTHON=python3.12 chooses another interpreter, 3.11 or newer."

demo: $(INSTALLED)
	$(BIN)/python -P -m stoker.examples.grpo_arithmetic --output outputs/demo $(ARGS)

# mypy takes one processor half a minute, so tests begin beside it.
test: ruff
	@$(MAKE) --no-print-directory -j2 mypy pytest

# `pytest`, not `python -m pytest`: the latter puts the repository root on sys.path. A test runs on one thread, so there
# are as many processes as processors; a file's tests share what is made for them.
pytest: $(INSTALLED)
	$(BIN)/pytest -m "not gpu" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -P -m stoker.benchmarks.rollout --output benchmarks/results $(ARGS)

lint: ruff mypy

ruff: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mypy: $(INSTALLED)
	$(BIN)/mypy $(MYPY_PACKAGES)

docs: $(INSTALLED)
	@$(CLEAN_BUILD)
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt --no-build-isolation '.[docs]'
	@$(CLEAN_BUILD)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

gpu:
	@PYTHON="$(PYTHON)" OUT="$(OUT)" ARGS="$(ARGS)" bash .ci/gpu

clean:
	$(CLEAN_BUILD)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(DEPENDENCIES): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Stoker needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Setting up $(VENV); the first time this downloads torch and takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(CLEAN_BUILD)
	$(BIN)/python -m pip install -c constraints-cpu.txt setuptools
	$(BIN)/python -m pip install -c constraints-cpu.txt --no-build-isolation '.[trl,peft,plot,server,dev]'
# DeepSpeed's build looks at the torch that is installed. None of its compiled operations is used on a CPU.
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install -c constraints-cpu.txt --no-build-isolation '.[deepspeed]'
	touch $@

$(INSTALLED): $(DEPENDENCIES)
	@rm -f $(VENV)/.installed-*
	@$(CLEAN_BUILD)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@$(CLEAN_BUILD)
	@touch $@
