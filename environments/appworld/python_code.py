"""Finds the Python code in a reply, and parses it."""

import ast
import re


def code_of(reply: str) -> str | None:
    """Returns the code in the first ```python block of a reply, or None if there is no such block.

    The closing ``` may be missing.
    """
    match = re.search(r"```python\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    return match[1].strip() if match else None


def codes(replies: list[str]) -> list[str]:
    """Returns the code block of each reply. Replies without a code block are skipped."""
    blocks = map(code_of, replies)
    return [code for code in blocks if code]


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def tree_of(code: str) -> ast.AST | None:
    """Returns the syntax tree of the code.

    Returns None if the code cannot be parsed, or if its tree cannot be converted back to code.
    """
    try:
        tree = ast.parse(code)
        ast.unparse(tree)
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def calls_of(code: str) -> set[str]:
    """Returns the names "APP.API" of all API calls in the code, or an empty set if the code is not
    valid Python."""
    names = set()
    tree = tree_of(code)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call):
            match = re.fullmatch(r"apis\.(\w+\.\w+)", ast.unparse(node.func))
            if match:
                names.add(match[1])
    return names
