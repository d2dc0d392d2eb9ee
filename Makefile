# CodeChat. `make help` lists the targets; each sets up what it needs, so none has to be run first.
#
#   make lab                         the main job: set up, then recipe `nano`; ARGS="--from rl" goes on to `codechat run nano`
#   make lab SYSTEM_TORCH=1          build .venv over the host's own torch, which is never reinstalled (GPU hosts)
#   make lab TORCH="torch==2.13.0 --index-url URL"    any pip arguments that bring another build of torch
#   make lab PYTHON=/path/to/python3                  build .venv with this interpreter
#
# A finished .venv keeps the torch it was made with until another is asked for or the pin below moves. An .venv whose making was
# interrupted, or that was moved with its folder, is made anew: an editable install would otherwise import from the old place.

# The tests run on 2.13.0. 2.14 and 2.15 have not been tried: PyPI's Linux wheel of 2.14 needs CUDA 13.
PINNED_TORCH := torch==2.13.0
TORCH ?= $(PINNED_TORCH)
SYSTEM_TORCH ?=
PYTHON ?=
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# .venv/.torch holds a kind (pinned, chosen, system) and, but for the last, pip's arguments for torch.
MADE := $(shell cat .venv/.torch 2>/dev/null)
ASKED := $(SYSTEM_TORCH)$(filter-out file,$(origin TORCH))
ifeq ($(SYSTEM_TORCH),1)
  WANT := system
else ifeq ($(ASKED)$(filter pinned,$(firstword $(MADE) pinned)),)
  WANT := $(MADE)
else
  WANT := $(if $(filter-out $(PINNED_TORCH),$(TORCH)),chosen,pinned) $(strip $(TORCH))
endif
SOUND := $(shell test ! -e .venv/.unfinished && test "$$(cat .venv/.place 2>/dev/null)" = "$$(pwd -P)" \
           && $(PY) -IS -c "print('yes')" 2>/dev/null)

# What chat, serve (row) and training have in C, docs/cpp.md; none where torch has to do alone.
ifeq ($(shell uname -sm) $(if $(shell command -v gcc),gcc),Linux x86_64 gcc)
  KERNELS := $(patsubst %,build/cpp/lib%.so,row row32 training training32)
endif

.DEFAULT_GOAL := help
.PHONY: help lab test test-all torture notebooks site jupyter cpp venv clean FORCE

lab: venv  ## set up, train the nano model through every stage, write notebooks and report
	@$(if $(KERNELS),$(MAKE) -s $(KERNELS) || echo "the C kernels were not built: torch alone takes up to twice as long")
	.venv/bin/codechat run nano $(ARGS)

test: venv  ## what the library guarantees, five to ten minutes on two cores; ARGS="-n 0" for one process
	$(PY) -m pytest -q -n auto -m "not slow and not gpu" $(ARGS)

test-all: venv  ## every test, half an hour: also each notebook, torchrun, learning, the compiler, mypy, the wheel
	$(PY) -m pytest -q -n auto $(ARGS)

torture: venv  ## kills, full disks, fuzzed inputs, hostile clients: an hour at most; ARGS="kills --minutes 10" for a part
	$(PY) tools/torture.py $(ARGS)

notebooks: venv  ## rebuild the notebooks from nbs_py/: sync, execute, stamp; ARGS="04_pretraining" for one
	$(PY) tools/notebook_pairs.py build $(ARGS)

site: venv  ## build the web site in build/site: documents, notebooks, reports, pages, API, search
	$(PIP) -e ".[site]"
	$(PY) tools/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file build/mkdocs.yml
	$(PY) tools/site_pages.py check

jupyter: venv  ## open JupyterLab on the notebooks
	$(PY) -m jupyterlab $(AS_ROOT) --notebook-dir=. $(ARGS)

cpp: venv $(KERNELS)  ## build the C kernels and C++ programs in build/cpp; needs cmake and g++ (apt install cmake g++)
	cmake -S cpp -B build/cpp -DPython3_EXECUTABLE="$(CURDIR)/$(PY)"
	cmake --build build/cpp

# Compiled with OpenMP and not linked with it: the threads are those of the torch that has loaded a library.
build/cpp/librow.so: build/cpp/product.o build/cpp/row.o
build/cpp/librow32.so: build/cpp/product32.o build/cpp/row32.o
build/cpp/libtraining.so: build/cpp/training.o
build/cpp/libtraining32.so: build/cpp/training32.o
build/cpp/lib%.so:
	gcc -shared -o $@ $^
build/cpp/%32.o: cpp/%.c cpp/numbers.h
	@mkdir -p $(@D)
	gcc -O3 -fopenmp -fPIC -DFLOAT32 -c -o $@ $<
build/cpp/%.o: cpp/%.c cpp/numbers.h
	@mkdir -p $(@D)
	gcc -O3 -fopenmp -fPIC -c -o $@ $<

venv: .venv/.installed  ## set up .venv only

clean:  ## remove .venv and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

ifneq ($(SOUND) $(MADE),yes $(WANT))
.venv/.torch: FORCE
endif
.venv/.torch:
	@sh -c "$$MAKE_VENV"

.venv/.installed: pyproject.toml .venv/.torch
	@sh -c "$$INSTALL_PROJECT"

help:
	@awk -F '  ## ' '/^[a-z-]+:.*  ## / { sub(/:.*/, "", $$1); printf "make %-11s %s\n", $$1, $$2 }' Makefile

# Says why an interpreter will not do, on one line; runs under any Python there is.
define CHECK_PYTHON
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d; 3.11 or newer is needed" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot make a venv (Debian and Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
if sys.argv[1] == "system":
    try:
        import torch
    except (ImportError, OSError) as error:
        sys.exit("cannot import torch (%s); SYSTEM_TORCH=1 needs a Python that can" % error)
    if [int(n) for n in torch.__version__.split(".")[:2]] < [2, 11]:
        sys.exit("has torch %s; 2.11 or newer is needed" % torch.__version__)
endef
export CHECK_PYTHON

define SHOW_TORCH
import pathlib, sys
from importlib.metadata import version
import torch
pathlib.Path(".venv/.constraints.txt").write_text("torch==%s\n" % version("torch"))
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
print("torch %s from %s (%s)" % (torch.__version__, pathlib.Path(torch.__file__).parent, device))
endef
export SHOW_TORCH

define MAKE_VENV
set -eu
kind=$(firstword $(WANT))
for candidate in $(CANDIDATES); do
    if command -v "$$candidate" >/dev/null 2>&1; then
        if why=$$("$$candidate" -W ignore -c "$$CHECK_PYTHON" "$$kind" 2>&1); then python=$$candidate; break; fi
        why=$$(printf '%s\n' "$$why" | head -n 1)
    else
        why="is not on the PATH"
    fi
    rejected="$${rejected:-}  $$candidate $$why\n"
done
if [ -z "$${python:-}" ]; then
    printf 'error: no Python to build .venv with:\n%b' "$$rejected" >&2
    echo "Install Python 3.11 or newer with its venv module, or name one: make lab PYTHON=/path/to/python3" >&2
    exit 1
fi
if [ -e .venv ]; then
    echo "Making .venv anew: it is unfinished, was moved, or holds another torch than the one asked for."
    rm -f .venv/.place
    rm -rf .venv
fi
echo "Making .venv with $$("$$python" -V 2>&1)"
if [ "$$kind" = system ]; then
    "$$python" -m venv --system-site-packages .venv
    if ! $(PY) -W ignore -c "import torch" 2>/dev/null; then
        site=$$($(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))")
        "$$python" -W ignore -c "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))" > "$$site/host_torch.pth"
    fi
else
    "$$python" -m venv .venv
    echo "Installing $(wordlist 2,99,$(WANT)): up to some minutes"
    $(PIP) $(wordlist 2,99,$(WANT))
fi
$(PY) -W ignore -c "$$SHOW_TORCH"
pwd -P > .venv/.place
echo "$(WANT)" > .venv/.torch
endef
export MAKE_VENV

define INSTALL_PROJECT
set -eu
echo "Installing codechat and what it needs: a minute or two"
touch .venv/.unfinished
$(PIP) -c .venv/.constraints.txt -e ".[test]"
$(PY) -m ipykernel install --sys-prefix >/dev/null 2>&1
$(PY) -W ignore -c "from importlib.metadata import version; assert 'torch==' + version('torch') == open('.venv/.constraints.txt').read().strip(), 'torch was replaced'"
rm .venv/.unfinished
touch .venv/.installed
endef
export INSTALL_PROJECT
