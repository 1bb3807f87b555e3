# The commands a person needs. Each does all it needs on a fresh Debian-like machine; scripts/bootstrap.sh says how.
.DEFAULT_GOAL := help
.PHONY: help build demo test test-all compression-evidence format clean distclean

help:
	@echo "make build      the program, at build/release/fedshard, and the library for cmake --install"
	@echo "make demo       trains a small Llama on real text, FSDP against federated (TEXT=folder: on your own *.txt, *.md)"
	@echo "make test       unit tests and pytest"
	@echo "make test-all   the same with long property tests, the unit tests under sanitizers, and fuzzers"
	@echo "make compression-evidence  trains the demo's model with int8 and int4 between groups, against fp32 (some minutes)"
	@echo "make format     formats the C++ code"
	@echo "make clean      removes build/; make distclean also .venv, .deps and .cache"

build:
	@scripts/bootstrap.sh build
	@scripts/build.sh release fedshard fedshard_engine

demo:
	@scripts/bootstrap.sh demo
	@scripts/build.sh release fedshard
	@scripts/demo_text.sh .cache/demo/text
	@scripts/demo.sh .cache/demo

test:
	@scripts/bootstrap.sh test
	@scripts/test.sh

test-all:
	@scripts/bootstrap.sh test-all
	@scripts/test.sh all

compression-evidence:
	@scripts/bootstrap.sh test
	@scripts/build.sh release fedshard
	@scripts/demo_text.sh .cache/demo/text
	@FEDSHARD_DEMO_TEXT=.cache/demo/text .venv/bin/python -m pytest -q -s tests/multi/test_compression.py

format:
	@scripts/bootstrap.sh test
	@find fedshard tests cmake examples -name '*.h' -o -name '*.cpp' | xargs .venv/bin/clang-format -i

clean:
	rm -rf build

distclean: clean
	rm -rf .venv .deps .cache
