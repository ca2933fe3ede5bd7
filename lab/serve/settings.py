"""The setting of a run whose episodes a server replies to."""

import shlex
from dataclasses import dataclass
from typing import Optional

from common.settings import Free, Stated
from lab.serve.server import is_address
from worlds import is_web_address

# Methods whose episodes are not a saved agent's: GRPO plays weights that are in no folder, and an
# endpoint has its own.
NOT_SERVED = ("grpo", "evolve", "chat")


@dataclass(frozen=True)
class Serve(Stated):
    """Who samples"""
    # Command that starts an inference server, which then replies in place of the program: "vllm
    # serve {agent} --port {port} --logprobs-mode processed_logprobs"; or for --method evaluate the
    # URL of one that runs
    serve: Free[Optional[str]] = None

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        found = super().conflicts(s)
        if not s.serve:
            return found
        flags, address = f"--serve {s.serve}", is_address(s.serve)
        return [*found,
                (s.method in NOT_SERVED, flags,
                 f"--method {s.method} plays no agent in a folder; leave it out"),
                (address and s.method != "evaluate", flags,
                 "a running server has one agent, and this method makes others; give a command"),
                (address and not is_web_address(s.serve), flags, "is no address of a server"),
                (not address and not is_command(s.serve), flags,
                 "a command needs {agent} and {port}, and a quote for each quote")]


def is_command(serve: str) -> bool:
    try:
        words = " ".join(shlex.split(serve))
    except ValueError:
        return False
    return "{agent}" in words and "{port}" in words
