"""Episodes of whoever answers in text: an endpoint that is evaluated or explores, a script."""

from collections.abc import Callable

from lab import play_env as envs
from lab.tokens import Trajectory


class ContextFull(Exception):
    """The conversation is longer than who answers can read."""


def play(env, t: Trajectory, answer: Callable[[list[dict]], str],
         stops: tuple[str, ...] = envs.STOPS["ours"]) -> str:
    """Plays t.task to its end by answer(messages) -> reply; what the last reply led to. An episode
    that fills the context (`answer` raises ContextFull) ends at its last whole turn."""
    def reply(messages):
        return before_stops(answer(messages), stops).strip()

    t.messages, told = envs.opening(env, env.reset(t.task), playing=True), ""
    try:
        for step in envs.turns(env, t.messages, reply):
            take(t, step, env.max_steps)
            told = step.observation
    except ContextFull:
        t.ended = "context"
        if t.steps:
            t.messages.pop()  # nobody answered it
    return told


def take(t: Trajectory, step: envs.Step, most: int) -> None:
    """The episode after a reply that led to `step`; it has `most` turns."""
    t.reward, t.raw_reward, t.steps = step.reward, step.raw, t.steps + 1
    if step.done or t.steps == most:
        t.ended = "done" if step.done else "budget"


def before_stops(reply: str, stops) -> str:
    """The reply up to where one of the texts begins."""
    return reply[:min((reply.index(stop) for stop in stops if stop in reply), default=len(reply))]
