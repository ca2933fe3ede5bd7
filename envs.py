"""Acting: the episode, in which an agent and an environment meet. Text in, text out.

An environment is a folder of `worlds/`. `worlds.World` says what one is, and with which turns, the
prompt in the first of them, an episode opens; `worlds/webshop/shop.py` is the one to read first.
Whoever answers, a model, an endpoint or a person, plays `episode`; there are no tensors here.
`engine.playing` plays many of them side by side.
"""

import random

from worlds import World


def episode(env: World, encoder, t, max_tokens: int):
    """Lets an agent play the task t.task, and fills the trajectory t.

    A generator, which yields where it is the agent's turn.

    Args:
        env: The environment.
        encoder: An `engine.chat.Encoder`.
        t: A `dpo.Trajectory` with task and seed, which gets the rest.
        max_tokens: Where the context of the agent is full.

    Yields:
        t as far as it has come, and the episode's own random numbers. Send back what the agent
        sampled, (ids, the log-probability of each); or None where it can read no further, which an
        endpoint alone says.
    """
    begin(t)
    rng = random.Random(t.seed)
    page = env.reset(t.task)
    opening = env.opening(page, playing=True)
    told = opening
    read = encoder.start(opening)
    while len(t.ids) + len(read) < max_tokens:  # else no reply would fit after it
        # What the agent reads only conditions ...
        t.messages += told
        t.extend(read, is_action=False)
        sampled = yield t, rng
        if sampled is None:
            break
        ids, log_probs = sampled
        # What it wrote up to a text that stops it, and the end of turn, where it wrote none.
        written, missing, reply = encoder.close(ids, env.stops)
        if len(t.ids) + len(written) + len(missing) >= max_tokens:
            break  # a reply that fills the context is taken back; nobody trains on the episode

        # ... and what it wrote is trained on, but no end of turn that it did not write.
        t.extend(written, is_action=True)
        t.extend(missing, is_action=False)
        t.log_probs += log_probs[:len(written)]
        t.messages.append(dict(role="assistant", content=reply))

        step = env.step(reply)
        t.reward = step.reward
        t.raw_reward = step.raw
        t.steps += 1
        t.idle += step.idle
        if step.done:
            t.ended = "done"
            break
        if t.steps == env.max_steps:
            t.ended = "budget"
            break
        told = [dict(role="user", content=step.observation)]
        read = encoder.observation(step.observation)
    t.ended = t.ended or "context"

    open_as(t, encoder, opening, env.opening(page))


def begin(t) -> None:
    """Empties a trajectory of an episode that may have been played in part."""
    t.messages = []
    t.ids = []
    t.action_mask = []
    t.log_probs = []
    t.reward = 0.0
    t.raw_reward = None
    t.steps = 0
    t.idle = 0
    t.ended = ""


def open_as(t, encoder, shown: list[dict], trained: list[dict]) -> None:
    """Replaces the ids of a trajectory's opening. By ETO's protocol an agent that plays is shown
    examples, which its messages keep, and is trained without them."""
    if shown == trained:
        return
    size = len(encoder.start(shown))
    start = encoder.start(trained)
    t.ids[:size] = start
    t.action_mask[:size] = [0] * len(start)
