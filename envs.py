"""Acting: environments, text in, text out; and the episode, in which an agent meets one.

An environment is a folder of `worlds/`. `worlds.World` says what one is, `worlds/webshop/shop.py`
is the one to read first. Whoever answers, a model, an endpoint or a person, plays `episode`; there
are no tensors here.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.settings import Refused  # noqa: F401
from worlds import ENVIRONMENTS, EnvError, World, environment, make  # noqa: F401
from worlds.expert_files import experts  # noqa: F401

# Seconds before an episode whose environment broke is played again; a server's restart takes some.
WAITS = [0.5, 5.0, 25.0]


def episode(env: World, encoder, t, max_tokens: int):
    """Lets an agent play the task t.task; what happens is written into trajectory t.

    A generator, which yields where it is the agent's turn.

    Args:
        env: The environment.
        encoder: A `dpo.Encoder`.
        t: A `dpo.Trajectory` with task and seed, which gets the rest.
        max_tokens: Where the context of the agent is full.

    Yields:
        t as far as it has come, and the episode's own random numbers. It is sent what the agent
        sampled, which is token ids and the log-probability of each; or None where the agent can
        read no further.
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
        written, missing, reply = encoder.close(ids, env.stops)
        if len(t.ids) + len(written) + len(missing) >= max_tokens:
            break  # a reply that fills the context is taken back

        # ... and what it wrote is trained on, but no end of turn that it did not write.
        t.extend(written, is_action=True)
        t.extend(missing, is_action=False)
        t.log_probs += log_probs[:len(written)]
        t.messages.append(dict(role="assistant", content=reply))

        step = env.step(reply)
        t.reward = step.reward
        t.raw_reward = step.raw
        t.steps += 1
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
    t.steps = 0
    t.ended = ""


def open_as(t, encoder, shown: list[dict], trained: list[dict]) -> None:
    """Replaces the ids of a trajectory's opening. By ETO's protocol an agent that plays is shown
    examples, and is trained without them."""
    if shown == trained:
        return
    size = len(encoder.start(shown))
    start = encoder.start(trained)
    t.ids[:size] = start
    t.action_mask[:size] = [0] * len(start)


def episode_again(env: World, encoder, t, max_tokens: int):
    """`episode`, played again from its start where its environment breaks. Worlds and random
    numbers repeat, so that it is the same one. EnvError: it broke once more after all WAITS."""
    for wait in [*WAITS, None]:
        try:
            return (yield from episode(env, encoder, t, max_tokens))
        except EnvError:
            env.close()
            if wait is None:
                raise
            time.sleep(wait)


def play(make_env: Callable[[], World], encoder, trajectories: list, answer: Callable, slots: int,
         max_tokens: int, ended: Callable = lambda t: None) -> None:
    """Plays what the trajectories begin, some side by side, in rounds: the agent answers all
    episodes that wait for it, then all environments take a step.

    Args:
        make_env: Makes an environment.
        encoder: A `dpo.Encoder`.
        trajectories: Those of `episode`.
        answer: answer([(t, random numbers)]) -> what each of these episodes is sent.
        slots: How many episodes are played side by side.
        max_tokens: Where the context of the agent is full.
        ended: ended(t) is called when an episode ends.

    Raises:
        EnvError: An environment broke for good.
    """
    free = []     # environments in which nobody plays
    waiting = trajectories[::-1]
    playing = []  # (environment, trajectory, episode)
    asked = []    # what these episodes ask, (trajectory, random numbers)
    threads = ThreadPoolExecutor(slots)
    try:
        while waiting or playing:
            sent = answer(asked) if asked else []
            while waiting and len(playing) < slots:
                env = free.pop() if free else make_env()
                t = waiting.pop()
                playing.append((env, t, episode_again(env, encoder, t, max_tokens)))
                sent.append(None)  # which begins an episode

            episodes = [running for _, _, running in playing]
            asks = list(threads.map(go_on, episodes, sent))
            going_on = []
            for (env, t, running), ask in zip(playing, asks):
                if ask is None:
                    free.append(env)
                    ended(t)
                else:
                    going_on.append((env, t, running))
            playing = going_on
            asked = [ask for ask in asks if ask is not None]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # the error comes first
        for env in free:
            env.close()


def go_on(running, sent):
    """Sends an episode what the agent sampled. What it asks next; None: it is over."""
    try:
        return running.send(sent)
    except StopIteration:
        return None
