# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STUDY ?= studies/first.yaml
NOTEBOOKS ?= examples/*.ipynb
unexport PYTHONDONTWRITEBYTECODE  # without bytecode every process of the tests compiles all again

.PHONY: help run test fuzz lint docs notebooks dist simulate test-fast test-all test-ray test-versions bench bench-peers bench-positions results pages rhythm tune bench-attrformer clean bench-serve bench-recommend bench-gpu bench-reading bench-scale toolkits

run: $(VENV)/installed  ## train PosSASRec on ml-100k to early stopping and print the test table
	$(BIN)/recbole-pos run -m PosSASRec -d ml-100k

tune: $(VENV)/installed  ## search for FPARec's settings on ml-100k, 20 trials (ARGS="--max_concurrent 2 ...")
	$(BIN)/recbole-pos tune -m FPARec -d ml-100k --num_samples 20 --MAX_ITEM_LIST_LENGTH=50 $(ARGS)

test: lint  ## lint, then all tests
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long"

test-all: lint  ## with those that wait for rare events (Ray giving up a trial, a pipe nobody reads)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/installed  ## what a change most likely breaks, in a minute
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow and not long"

RAY_OLDEST := $(shell sed -n 's/.*ray\[.*>=\([0-9.]*\),.*/\1/p' setup.cfg)
RAY_TESTS := $(wildcard tests/test_tune*.py tests/test_study_driver.py tests/test_*ray*.py)

test-ray: .venv-ray-oldest/installed .venv-ray-newest/installed  ## searches and studies on the oldest Ray that setup.cfg allows, and on the newest
	.venv-ray-oldest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(RAY_TESTS)
	.venv-ray-newest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(RAY_TESTS)

.venv-ray-oldest/installed: RAY = ray[tune]==$(RAY_OLDEST)
.venv-ray-newest/installed: RAY = ray[tune]<3
.venv-ray-%/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	grep -v '^ray==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt '$(RAY)' -e '.[test]'
	touch $@

PYTHONS := 3.10-lowest-direct 3.12-highest 3.13-highest

test-versions: $(PYTHONS:%=.venv-versions-%/installed)  ## the fast tests with the oldest versions that setup.cfg allows (Python 3.10) and with the newest (3.12, 3.13)
	for set in $(PYTHONS); do .venv-versions-$$set/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not long" || exit 1; done

.venv-versions-%/installed: setup.cfg $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv venv --quiet --clear --python $(firstword $(subst -, ,$*)) $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --resolution $(patsubst $(firstword $(subst -, ,$*))-%,%,$*) --torch-backend cpu -e '.[test]'
	touch $@

fuzz: $(VENV)/installed  ## damaged data, absurd options: every generated case
	$(BIN)/python -m pytest -n 2 --fuzz $(wildcard tests/test_fuzz_*.py)

docs: $(VENV)/installed  ## build the documents into site/, every warning an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/installed  ## execute examples/*.ipynb, outputs kept (NOTEBOOKS=examples/ten_minutes.ipynb)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	$(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.timeout=3600 --ExecutePreprocessor.record_timing=False $(NOTEBOOKS)

dist: $(VENV)/installed  ## wheel and source distribution, into dist/ (REPOSITORY_URL=https://... makes links absolute)
	REPOSITORY_URL=$(REPOSITORY_URL) $(BIN)/python -m build --outdir dist .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check twine
	$(BIN)/python -m twine check --strict dist/*

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed  ## speed against RecBole; writes results/speed.md
	$(BIN)/python benchmarks/speed.py

bench-peers: $(VENV)/installed .venv-rectools/installed .venv-replay/installed  ## speed against RecTools and RePlay
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py

toolkits: $(VENV)/installed .venv-rectools/installed .venv-replay/installed  ## models of RecTools, RePlay and implicit on ml-100k beside PosSASRec; writes results/toolkits.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/toolkits.py $(ARGS)

bench-reading: $(VENV)/installed  ## a log until its first batches, CPU-seconds and memory (ARGS="--events 20000000"); writes results/reading.md
	$(BIN)/python benchmarks/reading.py $(ARGS)

bench-scale: $(VENV)/installed  ## how cost grows with events, length and items; writes results/scale.md
	OMP_NUM_THREADS=1 BENCH_THREADS=1 $(BIN)/python benchmarks/scale.py

bench-serve: $(VENV)/installed  ## how fast `recbole-pos serve` answers; writes the table of docs/serving.md
	$(BIN)/python benchmarks/serving.py serve

bench-recommend: $(VENV)/installed  ## users a second, and memory at a million items; writes results/recommend.md
	$(BIN)/python benchmarks/serving.py recommend

bench-attrformer: $(VENV)/installed  ## AttrFormer's epoch and memory on Amazon Beauty (ARGS="--data_path FOLDER")
	$(BIN)/python benchmarks/attrformer.py $(ARGS)

bench-gpu: $(VENV)/installed  ## training on this machine's GPU, nine minutes; writes results/gpu.md
	$(BIN)/python benchmarks/gpu.py

bench-positions: $(VENV)/installed  ## cost of the position schemes; writes results/speed_positions.md
	$(BIN)/python benchmarks/positions.py $(ARGS)

simulate: $(VENV)/installed  ## whether intervals of studies cover what they say: 16 cases of 1,000 studies
	$(BIN)/python tests/study_simulation.py

results: $(VENV)/installed  ## compare the models of a study (STUDY=studies/... ARGS="--data_path ... --seeds 3"; ten minutes)
	$(BIN)/recbole-pos compare $(STUDY) $(ARGS)

pages: $(VENV)/installed  ## tables of results/*.md from the runs kept in results/runs/ (ARGS="--data_path FOLDER")
	$(BIN)/python studies/pages.py $(ARGS)
	$(BIN)/python studies/leaderboard.py
	$(BIN)/python studies/claims.py

rhythm: $(VENV)/installed  ## two generated periodic datasets (two hours)
	$(BIN)/python studies/to_rope/make_rhythm.py saved/rhythm
	$(BIN)/recbole-pos compare studies/to_rope/rhythm-weekly.yaml --data_path saved/rhythm $(ARGS)
	$(BIN)/recbole-pos compare studies/to_rope/rhythm-bursts.yaml --data_path saved/rhythm $(ARGS)

$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv-%/installed: benchmarks/requirements-peers-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 20

clean:  ## remove environments and builds
	rm -rf $(VENV) .venv-* build dist *.egg-info
