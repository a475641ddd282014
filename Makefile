# commlayer. `make demo` and `make test` are the two commands of the README; `make help` lists the rest.

PYTHON ?= python3
RANKS ?= 2
MINUTES ?= 1
CLANG ?= clang
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' requirements/torch.txt)
JOBS := $(shell nproc)
# Random tests draw their cases from this number, which is the commit's: each commit tries new ones, and a commit that
# has passed passes again. DRAW=n: others.
DRAW ?= $(shell printf %d 0x$$(git rev-parse HEAD 2>/dev/null | cut -c1-7 | grep . || echo 0))

.DEFAULT_GOAL := help
.PHONY: help demo site test test-torch test-torch-short test-slow torch torch-newest bench stress bench-training bench-convergence faults soak lint lint-c lint-python native native-test sim sim-short sim-asan sim-mutants venv clean fabric settings coverage overlap megatron wheel wheels gpu gpu-bundle hosts hosts-emulated native-test-aarch64
.DELETE_ON_ERROR:

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

# ---- environment: stamp files make the second call quick -----------------------------------------------------------
# Without CUDA, pip first looks for a CPU build of torch: the default build comes with gigabytes of CUDA libraries.
# TORCH_INDEX names a package index with CPU builds (see README), for machines where pip has none.
$(VENV)/.stamp-torch: requirements/torch.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if $(BIN)/python -c 'import importlib.metadata as m; assert m.version("torch").split("+")[0] == "$(TORCH)"' 2>/dev/null; \
	then echo 'torch $(TORCH) is there'; \
	elif command -v nvidia-smi >/dev/null; then $(PIP) install 'torch==$(TORCH)'; \
	elif [ -n "$(TORCH_INDEX)" ]; then $(PIP) install --index-url "$(TORCH_INDEX)" 'torch==$(TORCH)+cpu'; \
	else $(PIP) install 'torch==$(TORCH)+cpu' || $(PIP) install 'torch==$(TORCH)'; fi
	touch $@

$(VENV)/.stamp-demo: requirements/demo.txt $(VENV)/.stamp-torch
	$(PIP) install -q -r $<
	touch $@

$(VENV)/.stamp-coverage: requirements/coverage.txt $(VENV)/.stamp-dev
	$(PIP) install -q -r $<
	touch $@

# $(1): an environment that sees the packages of .venv; $(2): its own packages.
SITE = import sysconfig; print(sysconfig.get_path("purelib"))
define on_top
	test -x $(1)/bin/python || $(PYTHON) -m venv --without-pip $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(1)/bin/python -c '$(SITE)')/venv.pth
	DS_BUILD_OPS=0 $(PIP) --python $(1)/bin/python install -q --no-deps --no-build-isolation -r $(2)
endef

MEGATRON := .venv-megatron
$(MEGATRON)/.stamp: requirements/megatron.txt $(VENV)/.stamp-package
	$(call on_top,$(MEGATRON),$<)
	touch $@

.venv-hosts/%/.stamp: requirements/hosts/%.txt $(VENV)/.stamp-package
	$(call on_top,.venv-hosts/$*,$<)
	touch $@

$(VENV)/.stamp-wheel: requirements/wheel.txt $(VENV)/.stamp-demo
	$(PIP) install -q -r $<
	touch $@

$(VENV)/.stamp-release: requirements/release.txt $(VENV)/.stamp-wheel
	$(PIP) install -q -r $<
	touch $@

$(VENV)/.stamp-site: requirements/site.txt $(VENV)/.stamp-dev
	$(PIP) install -q -r $<
	touch $@

$(VENV)/.stamp-dev: requirements/dev.txt $(VENV)/.stamp-demo
	$(PIP) install -q -r $<
	touch $@

include native/build.mk
NATIVE_HEADERS := $(wildcard native/*/*.h)
NATIVE_SOURCES := $(wildcard $(ENGINE_FOLDERS:%=native/%/*.c))

$(VENV)/.stamp-package: setup.py pyproject.toml native/build.py native/build.mk $(NATIVE_HEADERS) $(NATIVE_SOURCES) $(VENV)/.stamp-demo
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

venv: $(VENV)/.stamp-dev ## the virtual environment .venv, with the development tools
native: $(VENV)/.stamp-package ## build the native engine in place

# ---- wheels: see docs/install.md -------------------------------------------------------------------------------------
# setuptools would ship files of build/lib that are gone from the tree.
CLEAN_DIST = rm -rf build/lib* build/bdist* build/wheel dist
AUDITWHEEL = PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel

wheel: native $(VENV)/.stamp-wheel ## build a wheel for this machine in dist/, and try it in a clean environment
	$(CLEAN_DIST)
	$(PIP) wheel -q --no-deps --no-build-isolation -w build/wheel .
	$(AUDITWHEEL) repair -w dist build/wheel/*.whl
	$(BIN)/python -m tests.wheel dist/*.whl

gpu: native ## check tensors of a GPU on this machine, in 10 minutes; writes gpu-report.json (docs/cuda.md)
	$(BIN)/python -m tests.gpu

gpu-bundle: wheel ## the same checks as one archive, for a machine with a GPU and no network
	$(BIN)/python -m tests.gpu.bundle dist/*.whl out/gpu-bundle.tar.gz

wheels: native $(VENV)/.stamp-release ## build an sdist, and wheels for x86-64 and aarch64, in dist/
	$(CLEAN_DIST)
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python native/wheels.py dist/*.tar.gz dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.wheel dist/*_$(shell uname -m).whl

# ---- what a newcomer runs ------------------------------------------------------------------------------------------
demo: native ## train a small GPT by DDP on gloo and on commlayer, and compare (RANKS=4: more ranks)
	$(BIN)/python examples/demo.py --ranks $(RANKS)

bench: native ## measure docs/results.md again (minutes; emulated links need root)
	$(BIN)/python -m bench.first_light

bench-training: native ## measure docs/training.md again (20 minutes, root)
	$(BIN)/python -m bench.time_to_loss

bench-convergence: native ## measure docs/convergence.md again (20 minutes, root)
	$(BIN)/python -m bench.convergence

stress: native ## measure docs/stress.md again: losses, bursts, incast, priorities, dying NICs (20 minutes, root)
	$(BIN)/python -m bench.stress

overlap: native ## measure docs/overlap.md again: gradients that travel while the model computes (an hour, root)
	$(BIN)/python -m bench.overlap --ddp --slower 2
	$(BIN)/python -m bench.overlap_tp
	$(BIN)/python -m bench.overlap_gpt
	$(BIN)/python -m bench.overlap_pipeline

megatron: $(MEGATRON)/.stamp ## compare losses of megatron-core on gloo and on commlayer (3 minutes)
	$(MEGATRON)/bin/python -m bench.megatron

HOSTS ?= accelerate trainer lightning lightning_fsdp fabric deepspeed pyg ray torchrec torchft torchtitan
hosts-emulated: $(HOSTS:%=.venv-hosts/%/.stamp) ## compare them on four emulated hosts that lose 1 % of the packets (root)
	@set -e; for host in $(HOSTS); do .venv-hosts/$$host/bin/python -m examples.hosts.emulated $$host; done

hosts: $(HOSTS:%=.venv-hosts/%/.stamp) ## compare losses of trainers on gloo and on commlayer (HOSTS="accelerate trainer": some)
	@set -e; for host in $(HOSTS); do .venv-hosts/$$host/bin/python examples/hosts/compare.py $$host; done

ROLLOUTS := trainer vllm verl
.PHONY: rollouts
rollouts: venv $(ROLLOUTS:%=.venv-hosts/%/.stamp) ## published weights in vLLM and verl themselves, and the example with transformers (minutes)
	.venv-hosts/trainer/bin/python -m pytest -q -rs tests/process/test_rl_rollout.py
	.venv-hosts/vllm/bin/python -m pytest -q -rs tests/process/test_vllm.py
	.venv-hosts/verl/bin/python -m pytest -q -rs tests/process/test_verl.py

faults: venv native ## faults in real processes, and a table of the errors (emulated hosts need root)
	rm -f out/faults.json
	$(BIN)/python -m pytest -q -rs tests/process/faults
	$(BIN)/python -m tests.process.faults

coverage: $(VENV)/.stamp-coverage native ## line coverage of C and Python (half an hour)
	$(BIN)/python -m bench.coverage

settings: native ## write the tables of docs/settings.md from commlayer/config.py
	$(BIN)/python -m docs.settings

# Warnings are errors. The variable silences advice on generators, which is in requirements/site.txt.
site: $(VENV)/.stamp-site ## build the documentation site in out/site/html
	$(BIN)/python -m docs.pages out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f out/site/mkdocs.yml
	$(BIN)/python -m docs.pages --check out/site

soak: native ## random collectives, every result verified, and no leaks (MINUTES=60: an hour)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --seed $(DRAW)

test: venv native native-test ## all tests that this machine can run; skipped ones give their reason
	@$(MAKE) --no-print-directory test-python

# More workers than cores, because single tests wait much. The tests of a file run in one worker, and share its
# fixtures. tests/conftest.py has the order of tests, the parameter sets that are drawn, and which failures are tried again.
WORKERS ?= $(shell expr 2 \* $(JOBS) + 1)
PYTEST := $(BIN)/python -m pytest -q -rsR --durations=20 -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
    --hypothesis-seed=$(DRAW)
.PHONY: test-python
test-python:
	rm -f out/first-failures.txt
	$(PYTEST) -m 'not slow' tests

test-slow: venv native ## one after the other: tests that need half a minute or idle cores, and sets not drawn by `test`
	$(BIN)/python -m pytest -q --hypothesis-seed=$(DRAW) -m slow tests

# A test of PyTorch's DistributedTest that passes with gloo must pass with commlayer. Tables and logs: out/torch_suite.
test-torch: venv native ## PyTorch's own tests of a backend, on gloo and commlayer (minutes)
	$(BIN)/python -m tests.torch_suite

test-torch-short: venv native ## one minute of PyTorch's tests
	$(BIN)/python -m tests.torch_suite --worlds 2 --gates gloo nccl --tests tests/torch_suite/short.txt

# An environment of its own: TORCH is also the version that .stamp-torch installs. Left out are the tests that say
# nothing about torch: engine, emulator, command line, bench. `make VENV=.venv-torch-VERSION TORCH=VERSION test-python` runs all.
ON_TORCH = $(MAKE) --no-print-directory VENV=.venv-torch-$(TORCH)
TORCH_UNITS := $(addprefix tests/unit/,compress pinned scheduler test_devices.py test_flight.py test_gradient.py test_imports.py \
               test_in_flight.py test_context.py test_submit.py test_work.py)
TORCH_PROCESS := $(patsubst %,tests/process/test_%.py,abort autoload backend backend_errors backend_native backend_partial \
                 backend_start collectives ddp disabled fsdp hook_state overlap overlap_ddp overlap_fsdp overlap_programs p2p pipeline \
                 pipeline_compiled pipeline_fsdp pipeline_state profile reconfigure split tp tp_codec tp_megatron tp_mesh tp_refused \
                 tp_sequence)
.PHONY: test-torch-some
torch: ## the Python tests that touch torch, on another release of it (TORCH=2.11.0), in .venv-torch-2.11.0
	$(ON_TORCH) venv native
	$(ON_TORCH) test-torch-some
	$(ON_TORCH) test-torch-short
torch-newest: ## the same on the newest release of torch, whether commlayer allows it or not: for a run each week
	$(MAKE) --no-print-directory torch TORCH=$$($(PYTHON) -m pip index versions torch | sed -n '1s/^torch (\(.*\))$$/\1/p')
test-torch-some:
	$(PYTEST) $(TORCH_UNITS) $(TORCH_PROCESS) tests/process/compat

# ---- lint ----------------------------------------------------------------------------------------------------------
lint: lint-python lint-c ## ruff, mypy --strict, clang-format, and gcc and clang with warnings as errors

lint-python: venv native
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

C_FILES := $(NATIVE_SOURCES) $(wildcard native/sim/*.c native/fabric/*.c native/speed/*.c native/tests/*.c native/fuzz/*.c)
lint-c: venv lint-c-gcc $(if $(shell command -v $(CLANG)),lint-c-clang,lint-c-no-clang)
	$(BIN)/clang-format --dry-run -Werror $(C_FILES) $(NATIVE_HEADERS)
lint-c-no-clang:
	@echo 'SKIPPED warnings of clang: $(CLANG) is not installed'

# ---- native builds: one folder of objects per variant --------------------------------------------------------------
C_TESTS := $(patsubst native/tests/%.c,%,$(wildcard native/tests/test_*.c))
# All files without a main function. An archive: each test links only the objects it needs.
C_ARCHIVED := $(NATIVE_SOURCES) $(wildcard native/sim/*.c native/fabric/*.c) $(filter-out native/tests/test_%.c,$(wildcard native/tests/*.c))
C_MAINS := native/sim/main.c native/fabric/main.c

# TSan of older compilers cannot map its shadow under strong address randomisation.
CALM := $(shell setarch -R true 2>/dev/null && echo setarch -R)
comma := ,

# In the simulator and the C tests, allocations can fail: native/sim/scarcity.h.
SCARCITY := -Wl$(comma)--wrap=malloc$(comma)--wrap=calloc$(comma)--wrap=realloc

# $(1) variant, $(2) compiler, $(3) flags
define variant
build/$(1)/%.o: native/%.c Makefile native/build.mk
	@mkdir -p $$(@D); echo '$(1): $$<'
	@$(2) $(C_FLAGS) $(3) -MMD -MP -c -o $$@ $$<
build/$(1)/libcommlayer.a: $(patsubst native/%.c,build/$(1)/%.o,$(filter-out $(C_MAINS),$(C_ARCHIVED)))
	@rm -f $$@
	@ar rcs $$@ $$^
build/$(1)/test_%: build/$(1)/tests/test_%.o build/$(1)/libcommlayer.a
	@$(2) $(3) $(SCARCITY) -o $$@ $$^ $(C_LIBS)
build/$(1)/fabric/simulate: build/$(1)/fabric/main.o build/$(1)/libcommlayer.a
	@$(2) $(3) -o $$@ $$^ $(C_LIBS)
build/$(1)/speed/%: build/$(1)/speed/%.o build/$(1)/libcommlayer.a
	@$(2) $(3) -o $$@ $$^ $(C_LIBS)
build/$(1)/simulate: build/$(1)/sim/main.o build/$(1)/libcommlayer.a
	@$(2) $(3) $(SCARCITY) -o $$@ $$^ $(C_LIBS)
.SECONDARY: $(patsubst native/%.c,build/$(1)/%.o,$(C_FILES))
-include $(wildcard build/$(1)/*.d build/$(1)/*/*.d)
endef
$(eval $(call variant,test,$(CC),-O2))
$(eval $(call variant,asan,$(CC),-O1 -fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer))
$(eval $(call variant,tsan,$(CC),-O1 -fsanitize=thread -fno-omit-frame-pointer))
$(eval $(call variant,cov,$(CC),-O0 --coverage -fprofile-update=atomic))
AARCH64 = $(BIN)/python -m ziglang cc -target aarch64-linux-gnu.2.36
$(eval $(call variant,aarch64,$$(AARCH64),-O2))
$(eval $(call variant,lint-gcc,gcc,-O2 -Werror))
$(eval $(call variant,lint-clang,$(CLANG),-O2 -Werror))

# ---- fuzzing -------------------------------------------------------------------------------------------------------
# One harness, built twice: with gcc's sanitizers for random conversations, and with clang's libFuzzer.
PACKETS ?= 10000000
SECONDS ?= 60
$(eval $(call variant,fuzz,$(CLANG),-O1 -fsanitize=fuzzer-no-link$(comma)address$(comma)undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer))
C_FUZZ := command.o conversation.o message.o attack.o
build/asan/receive: build/asan/fuzz/main.o $(C_FUZZ:%=build/asan/fuzz/%) build/asan/libcommlayer.a
	@$(CC) -fsanitize=address,undefined -o $@ $^ $(C_LIBS)
build/fuzz/receive: build/fuzz/fuzz/libfuzzer.o $(C_FUZZ:%=build/fuzz/fuzz/%) build/fuzz/libcommlayer.a
	@$(CLANG) -fsanitize=fuzzer,address,undefined -o $@ $^ $(C_LIBS)

.PHONY: fuzz fuzz-short fuzz-coverage
fuzz: build/asan/receive ## send hostile packets to the endpoint under ASan and UBSan (PACKETS=10000000 SEED=1)
	$(CALM) $< $(PACKETS) $(or $(SEED),1) $(JOBS)
fuzz-short: build/asan/receive ## 5 million hostile packets, new ones for each commit (DRAW=)
	$(CALM) $< 5000000 $(DRAW) $(JOBS)
fuzz-coverage: build/fuzz/receive ## the same with libFuzzer, which follows coverage (clang; SECONDS=60)
	@mkdir -p out/corpus
	$(CALM) $< -max_total_time=$(SECONDS) -max_len=6000 -print_final_stats=1 out/corpus

.PHONY: lint-c-gcc lint-c-clang lint-c-no-clang
lint-c-gcc: $(patsubst native/%.c,build/lint-gcc/%.o,$(C_FILES))
lint-c-clang: $(patsubst native/%.c,build/lint-clang/%.o,$(C_FILES))

NATIVE_TESTS := $(addprefix build/test/,$(C_TESTS)) $(addprefix build/asan/,$(C_TESTS)) \
                $(addprefix build/tsan/,$(filter test_engine% test_events% test_group% test_host_queue% test_awaited% test_submission% test_submit% test_p2p% test_ring% test_doorbell% test_message_wait% test_packet_wait% test_port_set% test_eager% test_held%,$(C_TESTS)))
.PHONY: native-test-build
native-test-build: $(NATIVE_TESTS) build/test/simulate build/asan/simulate build/asan/receive
# $(1) label, $(2) command in front of a test, $(3) tests. As many tests run at a time as there are cores.
define run_native
@printf '%s\n' $(3) | xargs -P $(JOBS) -I@ sh -c \
    'said=$$($(2) @ 2>&1); failed=$$?; echo "-- @"; echo "$$said"; test $$failed = 0 || { echo "FAILED: @"; exit 1; }'
@echo '$(1): $(words $(3)) passed'
endef
native-test: $(NATIVE_TESTS) ## the C tests: plain, under ASan and UBSan, and those with threads under TSan
	$(call run_native,native,$(CALM) timeout 300,$^)

QEMU_AARCH64 ?= qemu-aarch64-static -L /usr/aarch64-linux-gnu
AARCH64_TESTS := $(filter-out test_host,$(C_TESTS)) # qemu-user lacks process_vm_readv
native-test-aarch64: $(VENV)/.stamp-release $(AARCH64_TESTS:%=build/aarch64/%) ## the C tests for aarch64, by qemu-user (docs/install.md)
	$(call run_native,aarch64,timeout 300 $(QEMU_AARCH64),$(filter build/%,$^))

# ---- deterministic simulation: see docs/simulation.md --------------------------------------------------------------
SIM_JOBS ?= 2
FIRST ?= 1
SEEDS ?= 10000
SEED ?=
CONTROL ?= delay
# What a failed seed is named with.
COMMIT = $(shell git describe --always --abbrev=12 --dirty --exclude='*' 2>/dev/null || echo 'an unknown commit')
SIM_OPTIONS = --rate-control $(CONTROL) --commit '$(COMMIT)'
SIM_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# The plans of the package in one file. Only numpy is needed.
build/plans.bin: native/sim/plans.py native/include/commlayer.h commlayer/config.py commlayer/errors.py $(wildcard commlayer/plans/*.py)
	@mkdir -p build
	@$(SIM_PYTHON) -c 'import numpy' 2>/dev/null || { echo 'the simulator needs Python with numpy to make its plans: \
	run `make venv`, or name one with PYTHON='; exit 1; }
	@$(SIM_PYTHON) native/sim/plans.py $@

build/fabric.bin: build/plans.bin
	@$(SIM_PYTHON) native/sim/plans.py $@ fabric

sim: build/test/simulate build/plans.bin ## 10,000 seeds of the deterministic simulation (FIRST=, SEEDS=); SEED=n replays one with a trace; CONTROL=fixed: without congestion control
	@build/test/simulate --plans build/plans.bin $(SIM_OPTIONS) $(if $(SEED),--seed $(SEED),--first $(FIRST) --seeds $(SEEDS) --jobs $(SIM_JOBS))

# A failure names its seed.
sim-short: build/test/simulate build/plans.bin ## 1,000 seeds of the simulation, new ones for each commit (DRAW=)
	@first=$$(($(DRAW) * 1000)); echo "seeds from $$first on"; \
	build/test/simulate --plans build/plans.bin $(SIM_OPTIONS) --first $$first --seeds 1000 --jobs $(SIM_JOBS)

sim-asan: build/asan/simulate build/plans.bin ## the simulation under ASan and UBSan
	@$(CALM) build/asan/simulate --plans build/plans.bin $(SIM_OPTIONS) --first $(FIRST) --seeds $(if $(filter file,$(origin SEEDS)),500,$(SEEDS)) \
	    --jobs $(SIM_JOBS)

fabric: build/test/fabric/simulate build/fabric.bin ## measure docs/fabric.md again: DLCP and DCTCP on a simulated leaf-spine of 144 hosts (minutes)
	@$(SIM_PYTHON) -m bench.fabric

sim-mutants: build/plans.bin ## put bugs into the engine, and show that the simulator finds each
	@$(SIM_PYTHON) native/sim/mutants.py

clean: ## remove all built files, except .venv
	rm -rf build dist out *.egg-info commlayer/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(VENV)/.stamp-package
