# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one engine, stock and with the plugin, side by side.

`python -m hybrid_plugin.tools.demo` starts both servers on the bundled model, sends
them the same requests over their OpenAI API, prints a table and writes it as
JSON.  What is particular to an engine is in `engines.py`.
"""
