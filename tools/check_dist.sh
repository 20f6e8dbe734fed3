#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build the wheel and the source archive, and try the wheel in an environment of its own.
#
#   tools/check_dist.sh PYTHON FOLDER
#
# PYTHON has the packages build and twine.  FOLDER is made anew: it gets the archives, and
# an environment with the wheel and what it needs, neither an engine nor PyTorch.
set -eu

python=${1:?give the Python that builds}
folder=${2:?give the folder of the archives}

cd "$(dirname "$0")/.."
rm -rf "$folder"
"$python" -m build --outdir "$folder" . >/dev/null
"$python" -m twine check --strict "$folder"/*.whl "$folder"/*.tar.gz
"$python" -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet "$folder"/*.whl

# Not from the source tree, where everything is found whether or not it was packed.
cd "$folder/environment"
bin/python -c '
import importlib.metadata as metadata
import importlib.util as util
for name in ("hybrid_plugin", "hybrid_kernels", "hybrid_models"):
    place = util.find_spec(name).origin
    assert "site-packages" in place, place
for group, name in (("vllm.general_plugins", "vllm_hybrid"),
                    ("sglang.srt.plugins", "sglang_hybrid")):
    assert metadata.entry_points(group=group, name=name), (group, name)
'
bin/hybrid-plugin --help >/dev/null
bin/hybrid-plugin simulate --format agentic --requests 5 --kv-tokens 20000 \
    --state-slots 20 >/dev/null
echo "the wheel works by itself"
