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


def calls_of(code: str) -> list[str]:
    """Returns the name "APP.API" of each API call in the code, or [] if the code is not valid
    Python."""
    tree = tree_of(code)
    return calls_in(tree) if tree else []


def calls_in(tree: ast.AST) -> list[str]:
    """Returns the name "APP.API" of each API call in a syntax tree, in the order of the source
    code."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match = re.fullmatch(r"apis\.(\w+\.\w+)", ast.unparse(node.func))
            if match:
                names.append((node.lineno, node.col_offset, match[1]))
    return [name for _, _, name in sorted(names)]
