#!/bin/sh
# Checks and measures the Triton kernels on the machine's first GPU, in under 8 minutes.
#
#     bench/gpu.sh [--only NAME] [--json FILE]
#
# Needs Python with torch and triton; nothing has to be installed from here, but for the last
# sections, which start whole meshes. Prints one table, writes one JSON file (gpu.json), and exits 1 when a
# section failed. See bench/gpu.py.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" bench/gpu.py "$@"
