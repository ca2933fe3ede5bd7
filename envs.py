"""Environments, text in, text out; and the episode, in which an agent meets one. No tensors here.

An environment is a folder of `worlds/`: `worlds.World` says what one is, `worlds/webshop/shop.py`
is the one to read first. Whoever answers, a model, an endpoint or a person, plays `episode`.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from worlds import ENVIRONMENTS, EnvError, Refused, World, environment, opening  # noqa: F401
from worlds.published import experts, make  # noqa: F401

# Seconds before an episode whose environment broke is played again; a server's restart takes some.
WAITS = (0.5, 5.0, 25.0)


def episode(env: World, encoder, t, max_tokens: int):
    """The agent meets the environment: one play of the task t.task, written into trajectory t.

    A generator. It yields where it is the agent's turn: t as far as it has come, and the episode's
    own random numbers. It is sent what the agent sampled, token ids and the log-probability of
    each, or None where the agent can read no further."""
    t.messages, t.ids, t.action_mask, t.log_probs = [], [], [], []
    t.reward, t.steps, t.ended = 0.0, 0, ""
    rng, page = random.Random(t.seed), env.reset(t.task)
    said = opening(env, page, playing=True)
    shown = read = encoder.start(said)
    while len(t.ids) + len(read) < max_tokens:  # else no reply would fit after it
        t.messages += said
        t.extend(read, acts=0)                  # what the agent reads only conditions ...
        sampled = yield t, rng
        if sampled is None:
            break
        written, end, text = encoder.close(sampled[0], env.stops)
        if len(t.ids) + len(written) + len(end) >= max_tokens:
            break                               # a reply that fills the context is taken back
        t.extend(written, acts=1)               # ... what it wrote is trained on,
        t.extend(end, acts=0)                   # but no end of turn that it did not write
        t.log_probs += sampled[1][:len(written)]
        t.messages.append(dict(role="assistant", content=text))

        step = env.step(text)
        t.reward, t.raw_reward, t.steps = step.reward, step.raw, t.steps + 1
        if step.done or t.steps == env.max_steps:
            t.ended = "done" if step.done else "budget"
            break
        said = [dict(role="user", content=step.observation)]
        read = encoder.observation(step.observation)
    t.ended = t.ended or "context"
    if env.theirs:  # ETO shows an agent examples, and trains it without them
        start = encoder.start(opening(env, page))
        t.ids[:len(shown)], t.action_mask[:len(shown)] = start, [0] * len(start)


def episode_again(env: World, encoder, t, max_tokens: int):
    """`episode`, played again from its start where its environment breaks: worlds and random
    numbers repeat, so that it is the same one. EnvError where it breaks once more after WAITS."""
    for wait in (*WAITS, None):
        try:
            return (yield from episode(env, encoder, t, max_tokens))
        except EnvError:
            env.close()
            if wait is None:
                raise
            time.sleep(wait)


def play(make_env: Callable[[], World], encoder, trajectories: list, answer: Callable, slots: int,
         max_tokens: int, ended: Callable = lambda t: None) -> None:
    """Plays what the trajectories begin, `slots` side by side. In each round the agent answers all
    that wait, answer([(t, rng)]) -> what each is sent, then all environments take a step.
    ended(t) is called when an episode ends. EnvError where one broke for good."""
    def go_on(running, reply):
        try:
            return running.send(reply)
        except StopIteration:
            return None  # the episode is over

    free, waiting, playing, asked = [], trajectories[::-1], [], []
    threads = ThreadPoolExecutor(slots)
    try:
        while waiting or playing:
            replies = answer(asked) if asked else []
            while waiting and len(playing) < slots:
                env, t = free.pop() if free else make_env(), waiting.pop()
                playing.append((env, t, episode_again(env, encoder, t, max_tokens)))
                replies.append(None)  # which begins an episode
            asks = list(threads.map(go_on, [running for *_, running in playing], replies))
            for (env, t, _), ask in zip(playing, asks):
                if ask is None:
                    free.append(env)
                    ended(t)
            playing = [one for one, ask in zip(playing, asks) if ask is not None]
            asked = [ask for ask in asks if ask is not None]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # nobody waits for one that hangs
        for env in free:
            env.close()
