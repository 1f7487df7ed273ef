#!/usr/bin/env bash
# Puts together what pack.sh has packed, without a network: bench/gpu/unpack.sh FOLDER TARGET
# Penstock is installed from this checkout; vLLM is left out where its parts are not in FOLDER.
# Environment: PYTHON (python3), the one that has torch.
set -euo pipefail

FOLDER=${1:?usage: bench/gpu/unpack.sh FOLDER TARGET}
TARGET=${2:?usage: bench/gpu/unpack.sh FOLDER TARGET}
PYTHON=${PYTHON:-python3}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tar -C "$scratch" -xzf "$FOLDER/small.tar.gz"
if [ -e "$FOLDER/vllm.tar.gz.00" ]; then cat "$FOLDER"/vllm.tar.gz.* | tar -C "$scratch" -xz; fi
mkdir -p "$TARGET"
TARGET=$(cd "$TARGET" && pwd)

install() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
        --target "$TARGET" "$@"
}

install "$scratch"/*.whl
PYTHONPATH=$TARGET install --no-build-isolation "$(cd "$(dirname "$0")/../.." && pwd)"
echo "PYTHONPATH=$TARGET $PYTHON -m bench gpu --check"
