"""Runs the episodes of rollouts in parallel, and restarts an episode if its environment fails."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from envs import EnvError, Environment, episode

# The waiting times before the retries of a failed episode, in seconds. The last time is long,
# because an environment server may need time to restart.
WAITS = [0.5, 5.0, 25.0]


def play_episodes(
    make_env: Callable[[], Environment],
    encoder,
    trajectories: list,
    generate: Callable,
    slots: int,
    max_tokens: int,
    ended: Callable = lambda t: None,
) -> None:
    """Runs one episode for each trajectory, and stores the episode in the trajectory object.

    Episodes run in rounds. In each round, the agent generates a batch of replies, one for each
    running episode. Then each environment executes the reply of its episode, in parallel threads.

    Raises EnvError if an environment still fails after all retries.

    Args:
        trajectories: The trajectories to fill. Each has a task and a random seed.
        generate: A function that generates the agent's replies. It is called as
            generate([(trajectory, rng)]) and returns [(ids, log_probs)]. `rng` is the random number
            generator of the episode. If the list contains None instead of a reply, the episode
            ends.
        slots: The maximum number of episodes that run in parallel.
        max_tokens: The context length of the agent, in tokens.
        ended: A callback that is called with each trajectory when its episode ends.
    """
    free = []      # environments that can be reused for a new episode
    waiting = trajectories[::-1]  # trajectories whose episodes have not started
    running = []   # (environment, trajectory, episode), where the episode is a Python generator
    requests = []  # (trajectory, rng) of each running episode, the next input of `generate`
    threads = ThreadPoolExecutor(slots)
    try:
        while waiting or running:
            # 1. Generate the agent's reply in each running episode.
            replies = generate(requests) if requests else []

            # 2. Create new episodes in the free slots.
            while waiting and len(running) < slots:
                env = free.pop() if free else make_env()
                t = waiting.pop()
                running.append((env, t, episode_with_retries(env, encoder, t, max_tokens)))
                replies.append(None)  # the first value sent to a Python generator must be None

            # 3. Execute each reply in the environment of its episode, and start the new episodes.
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
        # If an error occurred, an environment may hang, so do not wait for the threads.
        threads.shutdown(wait=False, cancel_futures=True)
        for env in free:
            env.close()


def advance(steps, reply):
    """Sends a reply to an episode, and returns the next request, or None if the episode ended."""
    try:
        return steps.send(reply)
    except StopIteration:
        return None


def episode_with_retries(env: Environment, encoder, t, max_tokens: int):
    """Runs `envs.episode`, and restarts it from the first turn if the environment fails.

    A restarted episode has the same random seed, so the turns before the failure are repeated with
    the same results.
    """
    for wait in [*WAITS, None]:
        try:
            return (yield from episode(env, encoder, t, max_tokens))
        except EnvError:
            env.close()
            if wait is None:
                raise
            time.sleep(wait)
