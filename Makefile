# Every command that a person or a CI needs. Each target makes the environment that it uses.
PYTHON ?= python3
VENV ?= .venv
PARITY_VENV ?= .venv-parity
GPU_VENV ?= .venv-gpu
FUZZ_VENV ?= .venv-fuzz
CLIENTS_VENV ?= .venv-clients
export AIPERF_VENV ?= .venv-aiperf
RAY_VENV ?= .venv-ray
NODE_MODULES = tests/clients/node/node_modules
# The versions that GPU programs are compiled with need Python 3.12.
GPU_PYTHON ?= $(shell for each in $(PYTHON) python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python; do \
	"$$each" -c "import sys; assert sys.version_info >= (3, 12)" 2> /dev/null && echo "$$each" && break; done)
# Plain path entries: with setuptools' import hook the clone's folder would hide the package from a script beside it.
EDITABLE = --config-settings editable_mode=compat
SERVER_PATH = import pathlib, sysconfig; \
	pathlib.Path(sysconfig.get_path("purelib"), "jaxllm-server.pth").write_text("$(CURDIR)/server\n")
# Modules are compiled when they are first imported: all of them at once took half of an installation (100 s and 54).
PIP_QUIET = PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore
PIP_INSTALL = -m pip install --quiet --no-compile
# What was compiled is kept, whatever the shell says: the tests start a hundred processes, each of which would compile all
# that it imports again (5.4 s of processor time until a server can be asked for, 1.7 with what was kept).
export PYTHONDONTWRITEBYTECODE =
# A file's fixtures are made once. Files in the order of tests/conftest.py, and not in xdist's own, by number of tests.
BY_FILE = -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help run lines features test test-ci test-slow test-optimized fuzz soak overload simulate release check prose format parity gpu-aot flashinfer gpu-check golden proto clients ray bench notebooks train-embedded train-adapter train-tools train-embedder train-eagle train-shapes train-speech clean

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '%-16s %s\n' "$$name" "$$text"; done

run: $(VENV)/.run  ## install, then generate text with the embedded model
	$(VENV)/bin/jaxllm generate "Once upon a time" "There was once" --max-tokens 64
	printf 'What is 47 + 38?\nWhat is the capital of France?\n' | $(VENV)/bin/jaxllm chat

test: $(VENV)/.dev  ## the default tests: CPU, offline, three minutes
	$(VENV)/bin/python -m pytest $(BY_FILE) --durations=20

test-ci: $(VENV)/.dev  ## what CI has besides: further cases of a kind, loads, endurance, whole servers
	$(VENV)/bin/python -m pytest -m "ci and not slow" $(BY_FILE) --durations=20

test-slow: $(VENV)/.dev  ## what those hold a part of: whole matrices, thousands of combinations
	$(VENV)/bin/python -m pytest -m "slow and not parity" -n 2 --durations=10

test-optimized: $(VENV)/.dev  ## the tests of both under python -O; pytest's own assertions stay
	PYTHONOPTIMIZE=1 $(VENV)/bin/python -m pytest -m "not slow" $(BY_FILE)

fuzz: $(VENV)/.dev $(FUZZ_VENV)/.fuzz  ## ten thousand of each hostile input, then those that look for new code, MINUTES (1) for each target; ONLY="http stop"
	$(if $(ONLY),,FUZZ_EXAMPLES=10000 $(VENV)/bin/python -m pytest -m slow tests/fuzz -n 2)
	JAX_PLATFORMS=cpu $(FUZZ_VENV)/bin/python -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(ONLY)

soak: $(VENV)/.dev  ## 100,000 requests with faults against one process: nothing grows, every token is accounted for; REQUESTS=
	$(VENV)/bin/python -m tests.faults.soak $(REQUESTS)

overload: $(VENV)/.dev  ## calls at 1, 2, 5 and 10 times a server's capacity, one client beside ten, a minute each; SECONDS=
	failed=0; for each in overload fairness; do $(VENV)/bin/python -m tests.faults.$$each $(SECONDS) || failed=1; done; exit $$failed

simulate: $(VENV)/.dev  ## five million steps of the simulation, on all cores; SEED=, STEPS=
	$(VENV)/bin/python -m tests.simulation --processes 2 --steps $(or $(STEPS),5000000) --seed $(or $(SEED),0)

release: test-slow test-optimized simulate fuzz soak overload bench  ## what CI leaves out, for some hours: before a release
	$(MAKE) gpu-aot parity flashinfer ALL=1

check: $(VENV)/.dev  ## lint, format, types, imports between rooms, plain prose
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	PYTHONPATH=.:server $(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/python -m tests.support.prose

prose: $(VENV)/.dev  ## bound hard phrases in changed comments and documents, and commit subjects; BASE=COMMIT
	$(VENV)/bin/python -m tests.support.prose $(if $(BASE),--base $(BASE))

lines: $(VENV)/.dev  ## lines of code by room, without comments and docstrings
	$(VENV)/bin/python -m tests.support.line_counts

features: $(VENV)/.dev  ## which files know each row feature; AGAINST=COMMIT counts those of a commit
	$(VENV)/bin/python -m tests.support.features $(if $(AGAINST),--against $(AGAINST))

format: $(VENV)/.dev  ## format all files, and mend what ruff can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

parity: $(PARITY_VENV)/.parity  ## compare with transformers on torch, live
	$(PARITY_VENV)/bin/python -m pytest tests/parity -m "parity$(if $(ALL),, and not slow)" -n 2
	$(PARITY_VENV)/bin/python -m pytest tests/server/grpc/test_stubs.py tests/server/grpc/test_messages.py tests/server/grpc/test_transport.py tests/client

gpu-aot: $(GPU_VENV)/.gpu $(GPU_VENV)/newer/.done  ## compile kernels and steps for an H200 where there is none (ALL=1: A100 and B200 too), and run kernels interpreted
	GPU_AOT=1 TRITON_INTERPRET=1 $(GPU_VENV)/bin/python -m pytest tests/gpu/test_interpreted*.py -n 2 -W ignore \
		$(if $(ALL),-m "slow or not slow")
	GPU_AOT=1 $(GPU_VENV)/bin/python -m pytest tests/gpu/test_compiled.py tests/gpu/test_steps.py tests/gpu/test_towers.py tests/gpu/test_parallel_steps.py tests/gpu/test_alignment.py tests/gpu/test_sass.py -n 2 --dist loadgroup \
		$(if $(ALL),-m "slow or not slow")
	GPU_AOT=1 PYTHONPATH=$(GPU_VENV)/newer $(GPU_VENV)/bin/python -m pytest tests/gpu/test_jax_triton.py

flashinfer: $(GPU_VENV)/flashinfer/.done  ## FlashInfer's decode kernel built by nvcc, and in compiled steps
	GPU_AOT=1 PYTHONPATH=$(GPU_VENV)/flashinfer $(GPU_VENV)/bin/python -m pytest tests/gpu/test_flashinfer.py -m slow

golden: $(PARITY_VENV)/.parity  ## make the committed golden outputs again; ONLY="llama qwen3"
	$(PARITY_VENV)/bin/python -m tests.parity.make_golden $(ONLY)
	$(if $(ONLY),,$(PARITY_VENV)/bin/python -m tests.parity.make_pooled)

proto: $(VENV)/.dev  ## check the gRPC API's files and make its stubs, jaxllm/v1, again
	cd proto && ../$(VENV)/bin/buf lint
	$(VENV)/bin/python proto/generate.py

clients: $(CLIENTS_VENV)/.clients $(AIPERF_VENV)/.aiperf $(NODE_MODULES)  ## published clients, unmodified, and docs/clients.md from what they do (needs node and npm); ONLY="openai or vercel"
	$(CLIENTS_VENV)/bin/python -m pytest tests/clients -m slow -W ignore $(if $(ONLY),-k "$(ONLY)") --durations=10

ray: $(RAY_VENV)/.ray  ## the examples of Ray Serve and Ray Data on a Ray that is started here; ONLY="kill or batch"
	$(RAY_VENV)/bin/python -m pytest tests/ray -m "" $(if $(ONLY),-k "$(ONLY)")

bench: $(VENV)/.dev  ## the figures that are promised, measured here; docs/benchmarks.md has more rounds of each
	$(VENV)/bin/python -m benchmarks

# A GPU machine brings its own jax, torch and triton: nothing is installed there. DRY=1 is a CPU with tiny shapes.
gpu-check: $(if $(DRY),$(VENV)/.dev)  ## correctness and speed on one NVIDIA GPU, in eight minutes; ONLY="model features", MINUTES=, OUT= folder
	$(if $(DRY),$(VENV)/bin/python,$(PYTHON)) -m tests.gpu_check $(if $(DRY),--dry) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

notebooks: $(VENV)/.dev  ## run the notebooks and write their outputs into them
	$(VENV)/bin/python -m tests.support.notebooks

train-embedded: $(VENV)/.dev  ## train the embedded model again: about half an hour on two cores
	$(VENV)/bin/python -m training.train --out jaxllm/embedded/model --seed 0
	$(VENV)/bin/python -m training.evaluate

train-adapter: $(VENV)/.dev  ## train the embedded model's adapter again: eight minutes of one core
	$(VENV)/bin/python -m training.train_adapter --out jaxllm/embedded/pirate --seed 0
	$(VENV)/bin/python -m training.evaluate_adapter

train-tools: $(VENV)/.dev  ## train the adapter that calls tools again: ten minutes beside other work
	$(VENV)/bin/python -m training.train_tools --out jaxllm/embedded/tools --seed 0
	$(VENV)/bin/python -m training.evaluate_tools

train-embedder: $(VENV)/.dev  ## train the embedder again: under half an hour on two cores
	$(VENV)/bin/python -m training.train_embedder --out jaxllm/embedded/embedder --seed 0
	$(VENV)/bin/python -m training.evaluate_embedder

train-eagle: $(VENV)/.dev  ## train the embedded model's EAGLE-3 head again: ten minutes of one core
	$(VENV)/bin/python -m training.train_eagle --out jaxllm/embedded/eagle --seed 0
	$(VENV)/bin/python -m training.evaluate_eagle

train-shapes: $(VENV)/.dev  ## train the model of coloured shapes again: half an hour of one core
	$(VENV)/bin/python -m training.train_shapes --out jaxllm/embedded/shapes --seed 0
	$(VENV)/bin/python -m training.evaluate_shapes

train-speech: $(VENV)/.dev  ## train the recogniser of speech again, with espeak-ng: an hour of one core
	$(VENV)/bin/python -m training.train_speech --out jaxllm/embedded/speech --seed 0
	$(VENV)/bin/python -m training.evaluate_speech

clean:  ## delete environments, caches and builds
	rm -rf $(VENV) $(PARITY_VENV) $(GPU_VENV) $(FUZZ_VENV) $(CLIENTS_VENV) $(AIPERF_VENV) $(RAY_VENV) .cache build *.egg-info

$(NODE_MODULES): tests/clients/node/package-lock.json
	cd $(@D) && npm ci --no-audit --no-fund --ignore-scripts --silent
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), about a minute"
	$(PIP_QUIET) $(VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e .
	$(VENV)/bin/python -c '$(SERVER_PATH)'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PIP_QUIET) $(VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e ".[dev,proto]"
	$(VENV)/bin/python -c '$(SERVER_PATH)'
	touch $@ $(VENV)/.run

$(FUZZ_VENV)/.fuzz: pyproject.toml
	$(PYTHON) -m venv --upgrade-deps $(FUZZ_VENV)
	$(PIP_QUIET) $(FUZZ_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e ".[fuzz]"
	$(FUZZ_VENV)/bin/python -c '$(SERVER_PATH)'
	touch $@

$(CLIENTS_VENV)/.clients: pyproject.toml tests/clients/requirements.txt
	$(PYTHON) -m venv --upgrade-deps $(CLIENTS_VENV)
	$(PIP_QUIET) $(CLIENTS_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e ".[server,media]" -r tests/clients/requirements.txt
	touch $@

$(AIPERF_VENV)/.aiperf: tests/clients/requirements-aiperf.txt
	$(PYTHON) -m venv --upgrade-deps $(AIPERF_VENV)
	$(PIP_QUIET) $(AIPERF_VENV)/bin/python $(PIP_INSTALL) -r $<
	touch $@

$(RAY_VENV)/.ray: pyproject.toml tests/ray/requirements.txt
	$(PYTHON) -m venv --upgrade-deps $(RAY_VENV)
	$(PIP_QUIET) $(RAY_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e ".[ray]" -r tests/ray/requirements.txt
	$(RAY_VENV)/bin/python -c '$(SERVER_PATH)'
	touch $@

# Beside the versions of the machine, those in which jax-triton's calls can be in CUDA graphs.
$(GPU_VENV)/newer/.done: tests/gpu/requirements-newer.txt | $(GPU_VENV)/.gpu
	$(PIP_QUIET) $(GPU_VENV)/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(GPU_VENV)/newer -r $<
	touch $@

# The package alone: its sources are compiled, and nothing of it is imported.
$(GPU_VENV)/flashinfer/.done: pyproject.toml | $(GPU_VENV)/.gpu
	$(PIP_QUIET) $(GPU_VENV)/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(@D) \
		"$$(sed -n 's/^flashinfer = \["\(.*\)"\]/\1/p' pyproject.toml)"
	touch $@

$(GPU_VENV)/.gpu: pyproject.toml tests/gpu/requirements.txt
	@test -n "$(GPU_PYTHON)" || { echo "gpu-aot needs Python 3.12: make gpu-aot GPU_PYTHON=/path/to/python3.12"; exit 1; }
	$(GPU_PYTHON) -m venv --upgrade-deps $(GPU_VENV)
	$(PIP_QUIET) $(GPU_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -r tests/gpu/requirements.txt -e .
	touch $@

# torch comes first and pinned: anything that only asks for "torch" would bring gigabytes of CUDA.
$(PARITY_VENV)/.parity: pyproject.toml
	$(PYTHON) -m venv --upgrade-deps $(PARITY_VENV)
	$(PIP_QUIET) $(PARITY_VENV)/bin/python $(PIP_INSTALL) torch==2.13.0 torchvision==0.28.0
	$(PIP_QUIET) $(PARITY_VENV)/bin/python $(PIP_INSTALL) $(EDITABLE) -e ".[dev,parity]"
	$(PARITY_VENV)/bin/python -c '$(SERVER_PATH)'
	touch $@
