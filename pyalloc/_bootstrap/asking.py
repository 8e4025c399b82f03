"""Whether a program asks any() of a mask to take by it what is chosen: `if inside.any(): y[inside] = f(x[inside])`.

A mask that nobody knows chooses everything, and so there is something then.  The source of the line tells: any other
any() is a check, which passes, or a loop's, which ends.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_TAKING = {"masked_select", "nonzero", "where", "argwhere"}
_LEAVING = (ast.Return, ast.Continue, ast.Break)


def takes_if_any() -> bool:
    """Does the program's line that runs now ask so, and take by what it asks of if there is any?"""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_between(frame.f_globals.get("__name__") or ""):
        frame = frame.f_back
    return frame is not None and _takes(frame.f_code, frame.f_lineno)


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "functorch") or module.startswith(
        f"{__package__}."
    )


@functools.lru_cache(maxsize=4096)
def _takes(code: CodeType, line: int) -> bool:
    return any(
        _is_taken_by(mask, done)
        for test, done in _branches(_tree(code.co_filename), line)
        if not any(isinstance(each, ast.Raise) for each in _within(done))
        for mask in _asked_of(test)
    )


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _branches(tree: ast.AST, line: int) -> Iterator[tuple[ast.expr, list[ast.AST]]]:
    """What is tested at that line, and what is done where it holds; after `if not ...: return` all that follows is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and _is_at(node.test, line):
            yield node.test, [node.body]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(node, name, None)
            statements: list[ast.AST] = found if isinstance(found, list) else []
            for i, each in enumerate(statements):
                if not (isinstance(each, ast.If) and _is_at(each.test, line)):
                    continue
                if not (isinstance(each.test, ast.UnaryOp) and isinstance(each.test.op, ast.Not)):
                    yield each.test, list(each.body)
                elif isinstance(each.body[-1], _LEAVING):
                    yield each.test, [*each.orelse, *statements[i + 1 :]]
                else:
                    yield each.test, list(each.orelse)


def _is_at(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _within(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    for each in nodes:
        yield from ast.walk(each)


def _asked_of(test: ast.expr) -> Iterator[str]:
    """The masks of m.any() and torch.any(m)."""
    for node in ast.walk(test):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "any":
            of = node.func.value
            is_function = isinstance(of, ast.Name) and of.id == "torch" and node.args
            yield ast.dump(node.args[0] if is_function else of)


def _is_taken_by(mask: str, nodes: list[ast.AST]) -> bool:
    for node in _within(nodes):
        taking: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Load, ast.Store)):
            taking = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            taking = node if node.func.attr in _TAKING else None
        if taking is not None and any(ast.dump(each) == mask for each in ast.walk(taking)):
            return True
    return False
