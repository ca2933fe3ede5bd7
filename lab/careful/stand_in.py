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
KNOWN = {"log_probs": ["85a319cdda5f6f6e", "b9f505b4dbc47bc1", "b976755cf006842b"],
         "answer": ["e4c02b085da83c46", "dfc4fc34a830e161"],
         "training": ["9dfad6f96d07d236"],
         "play_share": ["d0ef088b485f6059"]}
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
    """16 hexadecimal digits for what a function or a class does, however it is laid out and
    explained."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return hashlib.sha256(shape_of(tree).encode()).hexdigest()[:16]


def shape_of(part) -> str:
    """A tree of code as nested text, without docstrings: each part stands inside the one that it
    belongs to. Every Python gives the same, since fields that are empty, of which some versions
    have more than others, are left out."""
    if isinstance(part, list):
        return f"[{' '.join(map(shape_of, part))}]"
    if not isinstance(part, ast.AST):
        return ascii(part)
    words = [type(part).__name__]
    for name, value in ast.iter_fields(part):
        if name == "body" and has_docstring(part):
            value = value[1:]
        if value is not None and value != []:
            words.append(f"{name}={shape_of(value)}")
    return f"({' '.join(words)})"


def has_docstring(part: ast.AST) -> bool:
    """Whether the body of a part of a tree begins with a docstring."""
    holders = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(part, holders) and ast.get_docstring(part) is not None


def texts() -> dict[str, list[str]]:
    """A name in FOR -> the texts of what it stands for."""
    found = {}
    for name, functions in FOR.items():
        found[name] = [text_of(function) for function in functions]
    return found


@cache
def changed() -> tuple[str, ...]:
    """The names in FOR whose texts are others: lab's method of that name must not stand
    in for the core's any more."""
    return tuple(name for name, found in texts().items() if found != KNOWN.get(name))
