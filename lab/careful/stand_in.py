"""What lab does in place of the core's own methods, and whether it still may.

A fork changes the core: a vote in `Run.answer`, another optimiser in `Run.training`. What lab puts
in the place of such a method knows nothing of that. So lab knows the core's methods by their text,
and where one is another it stands back.
"""

import hashlib
import inspect
from functools import cache

import coevolve
import dpo

# A method of lab's run -> what it stands in for.
FOR = {"log_probs": (coevolve.Run.log_probs, dpo.log_probs_in_passes, dpo.token_log_probs),
       "answer": (coevolve.Run.answer, dpo.replies),
       "training": (coevolve.Run.training,),
       "play_share": (coevolve.Run.play_share,)}
# Those texts as they were when lab's were last compared with them; a test prints new ones.
KNOWN = {"log_probs": ["a678a0e66e6d99c8", "56f17b4ad97ed99b", "7253b86f5bfa4a0a"],
         "answer": ["a5a2e35d987c38a5", "fee42a63f6f038a3"],
         "training": ["8802d76f94e12bc6"],
         "play_share": ["80f0568b974839e8"]}


def text_of(function) -> str:
    """16 hexadecimal digits for what a function does: its lines without comments."""
    lines = []
    for line in inspect.getsource(function).splitlines():
        words = line.strip()
        if words and not words.startswith("#"):
            lines.append(words)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def texts() -> dict[str, list[str]]:
    """A method of lab's run -> the texts of what it stands in for."""
    return {name: [text_of(function) for function in functions] for name, functions in FOR.items()}


@cache
def changed() -> tuple[str, ...]:
    """The methods of lab's run that must not stand in for the core's any more."""
    return tuple(name for name, found in texts().items() if found != KNOWN.get(name))
