"""Does a program call any() on a mask in order to index with it?  `if inside.any(): y[inside] = f(x[inside])`.

An unknown mask chooses everything, so any() has to be True there.  The source of the line tells: any other any() is a
check, which passes (so does `assert mask.any()`), or a loop's condition, and the loop ends.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

_TAKING = {"masked_select", "nonzero", "where", "argwhere"}
_LEAVING = (ast.Return, ast.Continue, ast.Break)


def takes_if_any() -> bool:
    """Does the program's current line test any() and then index with that mask, or require that any() is True?"""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_between(frame.f_globals.get("__name__") or ""):
        frame = frame.f_back
    return frame is not None and _takes(frame.f_code.co_filename, frame.f_lineno)


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "functorch") or module.startswith(
        f"{__package__}."
    )


@functools.lru_cache(maxsize=4096)
def _takes(file: str, line: int) -> bool:
    tree = _tree(file)
    return _is_asked_for(tree, line) or any(
        _is_taken_by(mask, done) for test, done in _branches(tree, line) for mask in _asked_of(test)
    )


def _is_asked_for(tree: ast.AST, line: int) -> bool:
    """Is any() required: `assert mask.any()`, `if not mask.any(): raise`?"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            test = node.test
        elif (
            isinstance(node, ast.If) and _is_not(node.test) and isinstance(node.body[-1], ast.Raise)
        ):
            test = node.test.operand
        else:
            continue
        is_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        parts = test.values if isinstance(test, ast.BoolOp) and is_all else [test]
        if _is_at(test, line) and any(map(_is_any, parts)):
            return True
    return False


def _is_any(test: ast.expr) -> bool:
    """Is it x.any() or x.any().item()?"""
    while isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        if test.func.attr == "any":
            return True
        test = test.func.value
    return False


def _is_not(test: ast.expr) -> TypeGuard[ast.UnaryOp]:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


@functools.lru_cache(maxsize=4)  # megabytes each
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply
        return ast.Module([], [])


def _branches(tree: ast.AST, line: int) -> Iterator[tuple[ast.expr, list[ast.AST]]]:
    """The tests at that line, each with the code that runs if it holds: after `if not ...: return` all that follows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and _is_at(node.test, line):
            yield node.test, [node.body]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(node, name, None)
            statements: list[ast.AST] = found if isinstance(found, list) else []
            for i, each in enumerate(statements):
                if not (isinstance(each, ast.If) and _is_at(each.test, line)):
                    continue
                if _is_not(each.test):
                    is_over = isinstance(each.body[-1], _LEAVING)
                    yield each.test, [*each.orelse, *(statements[i + 1 :] if is_over else [])]
                elif not any(isinstance(part, ast.Raise) for part in _within(each.body)):
                    yield each.test, list(each.body)


def _is_at(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
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
