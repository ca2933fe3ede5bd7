"""Playing: many episodes side by side, each of which is played again if its environment fails.

`Run.play` calls `play`; so does whoever lets an endpoint or a person answer.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from envs import EnvError, Environment, episode

# Seconds before an episode whose environment broke is played again; a server's restart takes some.
WAITS = [0.5, 5.0, 25.0]


def play(
    make_env: Callable[[], Environment],
    encoder,
    trajectories: list,
    answer: Callable,
    slots: int,
    max_tokens: int,
    ended: Callable = lambda t: None,
) -> None:
    """Plays what the trajectories begin, some side by side, in rounds: the agent answers all
    episodes that wait for it, then all environments take a step.

    Args:
        make_env: Makes an environment.
        encoder: An `engine.chat.Encoder`.
        trajectories: Those of `envs.episode`.
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


def episode_again(env: Environment, encoder, t, max_tokens: int):
    """`episode`, played again from its start where its environment breaks. Environments and random
    numbers repeat, so that it is the same one. EnvError: it broke once more after all WAITS."""
    for wait in [*WAITS, None]:
        try:
            return (yield from episode(env, encoder, t, max_tokens))
        except EnvError:
            env.close()
            if wait is None:
                raise
            time.sleep(wait)
