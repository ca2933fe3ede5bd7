"""What lab does in place of the core's own methods, and whether it still may.

A fork changes the core: a vote in `Run.answer`, another optimiser in `Run.training`. What lab puts
in the place of such a method knows nothing of that. So lab knows the core's methods by their text,
and where one is another it stands back.
"""

import ast
import hashlib
import inspect
import textwrap
from functools import cache

import coevolve
import dpo

# A method of lab's run -> what it stands in for.
FOR = {"log_probs": (coevolve.Run.log_probs, dpo.log_probs_in_passes, dpo.token_log_probs),
       "answer": (coevolve.Run.answer, dpo.replies),
       "training": (coevolve.Run.training,),
       "play_share": (coevolve.Run.play_share,)}
# Those texts as they were when lab's were last compared with them; a test prints new ones.
KNOWN = {"log_probs": ["e774f77cd0311a80", "f2dd47f22514c0e5", "e612385fddcbc22e"],
         "answer": ["a46ac6dca8da2339", "10e6c04d9f57ac82"],
         "training": ["fee1a9706ca088bf"],
         "play_share": ["cfa01a25080feb34"]}
# What lab does beside the core's method of that name, which it calls.
EXTENDED = {"__init__", "open", "make", "record", "agents_kept", "load", "replica", "fit"}


def hidden(kind: type) -> list[str]:
    """The methods of the core's run that never act in a class that extends it, since a class of
    this project's between has a method of that name for something else."""
    found = []
    for part in kind.__mro__[:kind.__mro__.index(coevolve.Run)]:
        if part.__module__.split(".")[0] in ("lab", "evolve"):
            names = vars(part).keys() & vars(coevolve.Run).keys() - EXTENDED - FOR.keys()
            found += [name for name in names if inspect.isfunction(vars(part)[name])]
    return sorted(set(found))


def text_of(function) -> str:
    """16 hexadecimal digits for what a function does, however it is laid out and explained."""
    words = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
        words.append(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if isinstance(value, (str, int, float)):
                words.append(f"{name}={value!r}")
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def texts() -> dict[str, list[str]]:
    """A method of lab's run -> the texts of what it stands in for."""
    return {name: [text_of(function) for function in functions] for name, functions in FOR.items()}


@cache
def changed() -> tuple[str, ...]:
    """The methods of lab's run that must not stand in for the core's any more."""
    return tuple(name for name, found in texts().items() if found != KNOWN.get(name))
