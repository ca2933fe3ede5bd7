"""Rollouts: runs many episodes in parallel, and repeats an episode if its environment fails.

`Run.play` calls `play` with a model as the agent, and `lab/chat/evaluate.py` calls it with an API
endpoint.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from envs import EnvError, Environment, episode

# Seconds to wait before each retry after an environment failed. A server takes time to restart.
WAITS = [0.5, 5.0, 25.0]


def play(
    make_env: Callable[[], Environment],
    encoder,
    trajectories: list,
    generate: Callable,
    slots: int,
    max_tokens: int,
    ended: Callable = lambda t: None,
) -> None:
    """Runs an episode for each trajectory, and records it there.

    In each round, the agent replies to all episodes that wait for it, and then all environments
    execute their replies.

    Args:
        make_env: A function that creates an environment.
        encoder: An `engine.chat.Encoder`.
        trajectories: The trajectories, each with a task and a seed.
        generate: The agent, a function [(trajectory, rng)] -> [(ids, log_probs)], where `rng` is
            the random number generator of the episode. A reply of None ends its episode.
        slots: The maximum number of episodes that run in parallel.
        max_tokens: The context length of the agent.
        ended: A function that is called with each trajectory when its episode ends.

    Raises:
        EnvError: An environment still fails after all retries.
    """
    free = []      # environments without an episode
    waiting = trajectories[::-1]
    running = []   # (environment, trajectory, episode)
    requests = []  # (trajectory, rng) of each running episode
    threads = ThreadPoolExecutor(slots)
    try:
        while waiting or running:
            # 1. The agent replies to all running episodes.
            replies = generate(requests) if requests else []

            # 2. New episodes fill the free slots.
            while waiting and len(running) < slots:
                env = free.pop() if free else make_env()
                t = waiting.pop()
                running.append((env, t, episode_with_retries(env, encoder, t, max_tokens)))
                replies.append(None)  # starts the episode, which is a generator

            # 3. All environments take a step.
            episodes = [steps for _, _, steps in running]
            results = list(threads.map(advance, episodes, replies))
            unfinished = []
            for (env, t, steps), request in zip(running, results):
                if request is None:
                    free.append(env)
                    ended(t)
                else:
                    unfinished.append((env, t, steps))
            running = unfinished
            requests = [request for request in results if request is not None]
    finally:
        # After an error, do not wait for environments that may hang.
        threads.shutdown(wait=False, cancel_futures=True)
        for env in free:
            env.close()


def advance(steps, reply):
    """Sends a reply to an episode, and returns its next request, or None if the episode ended."""
    try:
        return steps.send(reply)
    except StopIteration:
        return None


def episode_with_retries(env: Environment, encoder, t, max_tokens: int):
    """Runs `envs.episode`, and restarts the episode from its first turn if its environment fails.

    A restarted episode is the same one, since the environment and the random numbers repeat.

    Raises:
        EnvError: The environment still fails after all WAITS.
    """
    for wait in [*WAITS, None]:
        try:
            return (yield from episode(env, encoder, t, max_tokens))
        except EnvError:
            env.close()
            if wait is None:
                raise
            time.sleep(wait)
