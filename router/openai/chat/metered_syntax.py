"""Which templates can be metered, and the charges that are added to them when they are compiled.

Called by ``router.openai.chat.metered_template``.
"""

from __future__ import annotations

from collections.abc import Container

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro),
    *(nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.With, nodes.Scope, nodes.Continue),
    *(nodes.Break, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict),
    *(nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
    *(nodes.Not, nodes.And, nodes.Or, nodes.Neg, nodes.Pos),
)
_RESERVED_NAMES = {"caller", "kwargs", "self", "varargs"}
CONCAT = "_concat"
"""Name of the filter that takes the place of the operator ``~``."""

SEARCHED = "_searched"
"""Name of the filter that what ``in`` searches passes through."""


class Unmetered(Exception):
    """The template needs what cannot be metered; the message names it."""


def check_syntax(tree: nodes.Template, filters: Container[str]) -> None:
    """Raise Unmetered for what has no place in a metered template."""
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, _NODES):
            raise Unmetered(type(node).__name__)
        if isinstance(node, nodes.For) and node.recursive:
            raise Unmetered("a recursive loop")
        if isinstance(node, nodes.Filter) and node.name not in filters:
            raise Unmetered(f"the filter {node.name}")
        if isinstance(node, nodes.Name) and node.name in _RESERVED_NAMES:
            raise Unmetered(node.name)
        if isinstance(node, nodes.Tuple | nodes.List | nodes.Dict) and _holds_variables(node):
            raise Unmetered("a literal that holds variables")


def _holds_variables(node: nodes.Literal) -> bool:
    """Return whether it is a value of the template's own making: such values may hold each other
    again and again."""
    if isinstance(node, nodes.Tuple) and node.ctx == "store":
        return False
    return any(not isinstance(n, nodes.Literal | nodes.Pair) for n in node.find_all(nodes.Node))


class AddCharges(NodeTransformer):
    """Adds a charge to each loop and macro, to ``~`` and to ``in``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        charge = _charge_call(node.body)
        if node.test is not None:
            node.test = nodes.And(_charge_call([]), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_charge_call(node.body), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, CONCAT, [], [], None, None, lineno=node.lineno)

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = nodes.Filter(node.expr, SEARCHED, [], [], None, None, lineno=node.lineno)
        return node


def _charge_call(body: list[nodes.Node]) -> nodes.Call:
    """Return a call that charges the text that the body writes literally: Jinja writes constants
    when it compiles."""
    literals = (nodes.TemplateData, nodes.Const)
    texts = (text.as_const() for node in body for text in node.find_all(literals))
    chars = sum(len(text) for text in texts if isinstance(text, str))
    function = nodes.EnvironmentAttribute("charge", lineno=1)
    return nodes.Call(function, [nodes.Const(chars)], [], None, None, lineno=1)
