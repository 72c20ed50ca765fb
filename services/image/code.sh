#!/bin/sh
# Builds our own wheel, with a build backend that comes by its hash too, and installs it below /opt/code.
set -eu
python3 -m venv --without-pip /opt/build
python3 -m pip --python /opt/build/bin/python install --only-binary :all: --find-links . --require-hashes -r services/locks/build.txt
python3 -m pip --python /opt/build/bin/python wheel --no-build-isolation --no-deps --no-index --wheel-dir dist .
python3 -m pip --python /opt/venv/bin/python install --no-deps --no-index --prefix /opt/code dist/axon_ps-*.whl
