# SPDX-License-Identifier: Apache-2.0
"""One function out of a source file, to be tried without the rest of it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from copy import deepcopy
from typing import Any


def cut_out(node: object) -> Callable[..., Any]:
    """Compile a function definition alone: no decorators, no annotations.

    What it uses of its module is absent, so a call raises NameError where the
    function gets to that.

    Raises:
        TypeError: if `node` is no plain function definition.
    """
    if not isinstance(node, ast.FunctionDef):
        raise TypeError("it is not a function")
    bare = _Bare().visit(deepcopy(node))
    tree = ast.fix_missing_locations(ast.Module(body=[bare], type_ignores=[]))
    namespace: dict[str, Any] = {}
    exec(compile(tree, "<hook point>", "exec"), namespace)
    function: Callable[..., Any] = namespace[node.name]
    return function


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node
