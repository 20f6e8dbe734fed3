# SPDX-License-Identifier: Apache-2.0
"""`python -m hybrid_plugin`, the same as `hybrid-plugin`."""

import sys

from hybrid_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
