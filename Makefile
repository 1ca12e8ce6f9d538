# make demo    set up, then train on real documents over local ranks; flags through ARGS="--ranks 2 --layout striped"
# make test    set up, then the whole suite
# Needs python3 >= 3.10 and make, and a C++ compiler for the compiled kernels; everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# the versions that are installed
CONSTRAINTS ?= constraints.txt
# of the tests: one more than CI has cores, as some tests wait
WORKERS ?= 3

BIN := $(VENV)/bin
READY := $(VENV)/.seqpar-ready
SMALL := $(VENV)/.seqpar-small
TIMM := $(VENV)/timm
OLDEST_TRITON := $(if $(filter Linux,$(shell uname -s)),$(VENV)/triton-3.6)

GPU_PYTHON = $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

# The tests start hundreds of processes, which load bytecode sooner than they compile it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick newest oldest exhaustive binaries soak bits results docs screenshots links gpu sanitize lint setup clean

# with less than the tests need, unless that is installed
demo: $(or $(wildcard $(READY)),$(SMALL))
	$(BIN)/seqpar demo $(ARGS)

test: $(READY) $(TIMM)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# the geometry, and a case of every op and comm: a minute, for who changes something
quick: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "quick and not exhaustive" $(ARGS)

# before a release: the suite and the tables of models with the newest releases, or with the lowest versions that
# pyproject.toml names, in a folder of their own; each downloads several GB, and the lowest need Python 3.10 or 3.11.
# pyarrow, of trl, needs NumPy 2 since 26, and its wheels do not say so.
newest oldest:
	rm -rf .venv-$@
	mkdir .venv-$@
	$(if $(filter oldest,$@),grep -oE '[a-z-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | sed -E 's/\[.*\]//; s/>=/==/; $$a pyarrow<26') > .venv-$@/versions
	PIP_CONSTRAINT=/dev/null $(MAKE) test VENV=.venv-$@ CONSTRAINTS=.venv-$@/versions EXTRAS=test
	.venv-$@/bin/python -m bench.cpu.architectures --show
	.venv-$@/bin/python -m bench.cpu.diffusion --show

exhaustive: $(READY) $(OLDEST_TRITON) $(TIMM)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "(exhaustive or hypothesis) and not binaries" --timeout 0 --hypothesis-profile=search $(ARGS)

# whether Triton makes of the GPU kernels what bench/results has of them, once per change of one or of Triton's version
binaries: $(READY) $(OLDEST_TRITON)
	$(BIN)/python -m pytest -q -m binaries --timeout 0 $(ARGS)

# ten minutes of random verbs over processes; ARGS="--minutes 2" takes less
soak: $(READY)
	$(BIN)/python -m bench.cpu.soak $(ARGS)

# whether a change alters bits; ARGS="--before COMMIT --only attention"
bits: $(READY)
	$(BIN)/python -m bench.bits $(ARGS)

# the first table of docs/results.md; nothing else should run meanwhile
results: $(READY)
	$(BIN)/python -m bench.cpu.step --json bench/results/cpu.json
	$(BIN)/python -m bench.cpu.import_time

# the site of docs/, into out/site; a broken link or anchor is an error
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# pages of the site at two widths and in two themes, into out/screenshots; needs Chromium (Debian: apt install chromium)
screenshots: docs
	$(BIN)/python -m tests.screenshots out/site out/screenshots

# whether the addresses that pages link to answer; it needs the internet, so no test calls it
links: $(READY)
	$(BIN)/python -m tests.links

# on one NVIDIA GPU, by any Python with torch, numpy and einops: nothing is installed. PYTHON=... names it, else that of
# $(VENV) if there is one. The first hour in parts; or with ARGS the words of bench.gpu.run: ARGS=--needs says what is
# missing, ARGS="--minutes 8" stops in time and goes on at the next call, ARGS=--rehearse needs no GPU
gpu:
	PYTHON="$(GPU_PYTHON)" bench/gpu/first_hour.sh bench/results one $(ARGS)

# the compiled CPU code under address, undefined-behaviour and thread sanitizers, without Python
sanitize: $(READY)
	SEQPAR_STRICT=1 $(BIN)/python setup.py --quiet sanitize

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/* bench/cpu/*.cpp)

setup: $(READY) $(OLDEST_TRITON) $(TIMM)

# A stamp for each set of extras: a second call is instant, and a change of what is installed sets up again. torch comes
# first and pinned, and the build is not isolated, so nothing can pull a second torch; pip itself, as old ones resolve for
# half a minute. To compile all of these modules would take a minute: what the tests import is compiled here, once, and
# not by all of their processes at a time.
$(READY): EXTRAS := dev
$(SMALL): EXTRAS := cli,plot
$(READY) $(SMALL): pyproject.toml setup.py constraints.txt $(wildcard csrc/*/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"seqpar needs Python >= 3.10, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=... chooses another")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) pip setuptools wheel numpy torch
	$(BIN)/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) --no-build-isolation -e '.[$(EXTRAS)]'
	$(if $(filter dev,$(EXTRAS)),$(BIN)/python -W ignore -c 'from tests.programs import import_libraries; import_libraries()')
	@touch $@

# The oldest supported Triton, beside the installed one: `make binaries` compiles the GPU kernels with both.
$(VENV)/triton-3.6: | $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@ triton==3.6.0

# timm and the torchvision that it needs, beside what is installed: pyproject.toml says why.
$(TIMM): constraints.txt | $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade -c $(CONSTRAINTS) --target $@ timm torchvision
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest seqpar/_C.abi3.so build dist out *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find seqpar tests bench examples -name __pycache__ -prune -exec rm -rf {} +
