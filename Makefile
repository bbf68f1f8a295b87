# up            set up, then `baton up` in the foreground (ARGS="--detach --port 8001" adds options)
# down          stop it (ARGS="--cluster NAME" for another than the default)
# test          set up, then the tests that need no other program (ARGS="-k name" for some)
# test-system   set up, then the tests that start Ray, ssh, a browser or Prometheus, and where npm is
#               installed Codex and Claude Code
# test-long     set up, then property-based tests with thousands of examples, the long tests, fuzzing
# lint          ruff, mypy
# format        ruff format
# proto         generate the gRPC stubs
# dashboards    Grafana's dashboards and Prometheus' rules, from cluster/dashboards and cluster/monitoring
# lock          requirements*.txt, with the hashes of all files of each release, from requirements*.in
# clean         remove what this file made
#
# PYTHON picks the interpreter: 3.11 or 3.12.

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
TORCH := 2.13.0
TORCH_CUDA := 13
TORCH_CUDA_12 := cu126
UV := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Installs into the environment $(1) what the files $(2) pin, and nothing without its hash. uv takes
# seconds where pip takes minutes; what pip is told of an index uv is told here; where uv cannot, pip.
install = index="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(PIP) config get global.index-url \
	2>/dev/null || echo https://pypi.org/simple)}}"; \
	UV_DEFAULT_INDEX="$$index" $(BIN)/uv pip install --quiet --compile-bytecode \
		--python $(1)/bin/python --require-hashes $(2) || \
	{ echo "setting up: not by uv: by pip"; \
	$(PIP) --python $(1)/bin/python install --require-hashes $(2); }
ARGS ?=
# Folders of the tests that are marked `alone` (each needs the machine for itself) or `system` (they
# mostly wait: two processes). All others run in three. Each process takes a file at a time. Bytecode
# is kept: tests start hundreds of processes.
APART := tests/e2e tests/router/ui tests/workers
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
# pytest exits with 5 where no test is selected, as by ARGS="-k name".
define run
	echo "pytest $(1)"; $(PYTEST) $(1) $(ARGS) || [ $$? = 5 ] || failed=1
endef
# Tests that time real processes can miss a deadline on a busy machine: those that fail run once
# more, one at a time, and have to pass then.
define run-timed
	echo "pytest $(1)"; $(PYTEST) $(1) $(ARGS) || [ $$? = 5 ] || { \
	echo "pytest, once more what failed"; \
	$(PYTEST) $(1) $(ARGS) -n 0 -x --last-failed --last-failed-no-failures none || failed=1; }
endef

.PHONY: up down test test-system test-long agents lint format proto dashboards lock clean

up: $(VENV)/installed
	env BATON_DIE_WITH_PARENT=1 $(BIN)/baton up $(ARGS)

down: $(VENV)/installed
	$(BIN)/baton down $(ARGS)

test: $(VENV)/installed-dev $(VENV)/installed-litellm $(VENV)/installed-nixl
	@failed=0; \
	$(call run,-n 3 --dist loadfile --no-loadscope-reorder -m "not alone and not system and not long"); \
	$(call run-timed,-m "alone and not system" $(APART)); \
	exit $$failed

test-system: $(VENV)/installed-dev agents
	@failed=0; $(call run-timed,-n 2 --dist loadfile --no-loadscope-reorder -m system $(APART)); exit $$failed

test-long: $(VENV)/installed-dev $(VENV)/installed-fuzz
	@failed=0; export HYPOTHESIS_PROFILE=long; \
	$(call run,-n 2 --dist loadfile --timeout 3600 -m "not alone and not system" \
		$$(grep -rlE "^from hypothesis" tests --include="test_*.py")); \
	$(call run,--timeout 3600 -m long); \
	for target in $$($(BIN)/python -m tests.fuzz --list); do \
		$(BIN)/python -m tests.fuzz $$target --seconds 60 || failed=1; \
	done; \
	exit $$failed

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. \
		--grpc_python_out=. --mypy_out=. --mypy_grpc_out=. protocol/wire/wire.proto

dashboards: $(VENV)/installed-dev
	$(BIN)/python -m cluster.dashboards.generate

# Nothing is resolved: the .in files name every package and version. What pip then installs must be
# a file that had this hash when the pin was made.
lock: $(VENV)/created
	$(PIP) install "uv==$(UV)"
	for name in requirements requirements-dev requirements-litellm requirements-nixl \
			requirements-fuzz; do \
		$(BIN)/uv pip compile --quiet --no-deps --generate-hashes --upgrade --no-header \
			--no-annotate --no-emit-index-url --python-version 3.11 \
			--output-file $$name.lock $$name.in && \
		{ echo "# Made by \`make lock\` from $$name.in: edit that."; cat $$name.lock; } \
			> $$name.txt && rm $$name.lock || exit 1; \
	done

clean:
	if [ -x $(BIN)/baton ]; then $(BIN)/baton down; fi
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: set-up runs again only when what it depends on has changed.

$(VENV)/created:
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: needs Python 3.11 or 3.12; say where it is: make PYTHON=/path/to/python3.11"; \
		exit 1; fi
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "make: $(PYTHON) is not Python 3.11 or 3.12"; exit 1; }
	@echo "setting up: a virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install "uv==$(UV)"
	@touch $@

# With a GPU: the build for the CUDA that the driver serves. PyPI has the one for CUDA $(TORCH_CUDA);
# a driver of CUDA 12 runs every build for CUDA 12, which uv gets from PyTorch's own index; an older
# driver runs none. Where nvidia-smi does not tell the version, PyPI's is taken.
# The CPU build where there is no GPU: from the configured index if it has one, else by way of uv,
# which knows where PyTorch keeps it, else the build that brings CUDA along. Some of its files are for
# newer versions of Python than this one: they do not compile, and need not.
$(VENV)/torch-$(TORCH): $(VENV)/created
	@echo "setting up: torch $(TORCH)"
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		cuda=$$(nvidia-smi 2>/dev/null | \
			sed -nE 's/.*CUDA (UMD )?Version: *([0-9]+)\.([0-9]+).*/\2.\3/p' | head -n 1); \
		major=$${cuda%%.*}; \
		if [ "$${major:-$(TORCH_CUDA)}" -ge $(TORCH_CUDA) ]; then \
			$(PIP) install "torch==$(TORCH)"; \
		elif [ "$$major" -eq 12 ]; then \
			echo "setting up: the driver serves CUDA $$cuda: torch for CUDA 12 ($(TORCH_CUDA_12))"; \
			$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
				--torch-backend=$(TORCH_CUDA_12) "torch==$(TORCH)"; \
		else \
			echo "make: the driver serves CUDA $$cuda, torch $(TORCH) needs 12 or newer:" \
				"install a newer NVIDIA driver (525 or newer; 580 or newer for CUDA 13)"; \
			exit 1; \
		fi; \
	elif $(PIP) install --no-compile "torch==$(TORCH)+cpu" 2>/dev/null; then \
		$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3.*/site-packages/torch || \
			true; \
	elif $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
		--torch-backend=cpu "torch==$(TORCH)"; then :; \
	else \
		echo "setting up: no CPU build of torch found; taking the one with CUDA (some GB)"; \
		$(PIP) install "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/installed: requirements.txt pyproject.toml $(VENV)/torch-$(TORCH)
	@echo "setting up: pinned dependencies"
	@$(call install,$(VENV),-r requirements.txt)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	@echo "setting up: pinned dependencies of tests and checks"
	@$(call install,$(VENV),-r requirements.txt -r requirements-dev.txt)
	@touch $@

# Clients under test that want other versions than Baton.
$(VENV)/installed-litellm: requirements-litellm.txt $(VENV)/created
	@echo "setting up: litellm, to be tested against"
	@$(PYTHON) -m venv --clear --without-pip $(VENV)/litellm
	@$(call install,$(VENV)/litellm,-r $<)
	@touch $@

# Codex and Claude Code, to be tested against, where npm and its registry can be reached. Without them
# their tests skip: that is no failure.
AGENTS := tests/e2e/agents/package.json tests/e2e/agents/package-lock.json
agents: $(VENV)/created
	@mkdir -p $(VENV)/agents
	@if cmp -s tests/e2e/agents/package-lock.json $(VENV)/agents/installed; then :; \
	elif ! npm --version > /dev/null 2>&1; then \
		echo "setting up: no npm: the tests with Codex and Claude Code will skip"; \
	elif echo "setting up: Codex and Claude Code, to be tested against"; \
		cp $(AGENTS) $(VENV)/agents && cd $(VENV)/agents && \
		timeout 300 npm ci --no-audit --no-fund --loglevel=error --fetch-retries=0; then \
		cp package-lock.json installed; \
	else \
		echo "setting up: npm failed: the tests with Codex and Claude Code will skip"; \
	fi

# The extra `nixl`, whose carrier is tested over TCP and shared memory. What it depends on is there.
$(VENV)/installed-nixl: requirements-nixl.txt $(VENV)/installed-dev
	@echo "setting up: NIXL, to be tested against"
	@$(call install,$(VENV),--no-deps -r $<)
	@touch $@

# What guides the fuzzing of `make test-long`; without a wheel for this machine it is not guided.
$(VENV)/installed-fuzz: requirements-fuzz.txt $(VENV)/installed-dev
	@echo "setting up: atheris, which guides fuzzing"
	@{ $(call install,$(VENV),--no-deps -r $<); } || echo "setting up: no atheris for this machine"
	@touch $@
