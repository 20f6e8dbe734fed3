# SPDX-License-Identifier: Apache-2.0
"""Let torchvision be imported beside PyTorch's CPU build.

Symptom: with the build of PyPI, `import torchvision` ends in "operator
torchvision::nms does not exist".
Cause: its operators are in a library that needs PyTorch's CUDA build.  Without the
library torchvision goes on, but for two operators that it says more about all the
same.  Images are made ready for models without any of them.
Fix: declare the two, without code, where the library could not be loaded.  Beside
torchvision's own CPU build, which is in PyTorch's index, nothing is done.
Delete when: torchvision can be imported without its library, or its CPU build is on
PyPI.

python tools/declare_torchvision.py FOLDER

FOLDER has the package `torchvision`.
"""

from __future__ import annotations

import sys
from pathlib import Path

DECLARED = """
if not _has_ops():  # by hybrid-plugin's tools/declare_torchvision.py
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(
            f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def main(folder: Path) -> None:
    """Add the declarations to what torchvision imports first, once."""
    module = folder / "torchvision" / "extension.py"
    text = module.read_text()
    if not text.endswith(DECLARED):
        # Another file: this one may be a link into the installer's cache.
        changed = module.with_suffix(".new")
        changed.write_text(text + DECLARED)
        changed.replace(module)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
