"""Episodes that a server replies to: many at once, each of which goes on by itself."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import torch

import envs
from dpo import Trajectory
from lab.serve.engine import Engine, check
from lab.serve.server import Server

SLOTS = 256  # episodes side by side on a rank, as many as vLLM runs by default [ours]


def play(make_env: Callable[[], envs.World], encoder, trajectories: list[Trajectory],
         answer: Callable, slots: int, max_tokens: int) -> Iterator[Trajectory]:
    """`envs.play` without its rounds: no episode waits for another one's reply.

    Args:
        make_env: Makes an environment; each of the threads has one.
        encoder: Makes token ids of what the environment says.
        trajectories: What the episodes begin.
        answer: (ids so far, random numbers) -> what the agent samples, asked from many threads.
        slots: How many episodes are played side by side.
        max_tokens: Of a trajectory.

    Yields:
        Each trajectory, when its episode has ended.

    Raises:
        EnvError: An environment broke for good. What `answer` raises is passed on.
    """
    threads, worlds = ThreadPoolExecutor(slots), SimpleQueue()
    for _ in range(min(slots, len(trajectories))):
        worlds.put(make_env())
    try:
        episodes = [threads.submit(play_one, worlds, encoder, t, answer, max_tokens)
                    for t in trajectories]
        for episode in as_completed(episodes):
            yield episode.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # nobody waits for one that hangs
        while not worlds.empty():
            worlds.get().close()
        for _ in range(slots):
            worlds.put(None)  # for those that wait for the world of an episode that failed


def play_one(worlds: SimpleQueue, encoder, t: Trajectory, answer: Callable,
             max_tokens: int) -> Trajectory:
    """An episode from its beginning to its end, in a world that is free."""
    env, reply = worlds.get(), None
    if env is None:  # the play is over
        return t
    episode = envs.episode_again(env, encoder, t, max_tokens)
    while True:
        try:
            asked, rng = episode.send(reply)
        except StopIteration:
            worlds.put(env)
            return t
        reply = answer(asked.ids, rng)


class Servers:
    """A rank's server, one at a time. It stays until another agent plays or the rank trains, which
    needs the memory."""

    def __init__(self, run):
        self.run, self.server = run, None

    def of(self, agent: Path) -> Server:
        """The server with this agent, running or not started yet."""
        if self.server is None or self.server.agent != agent:
            self.end()
            run = self.run
            log = run.folder / f"server-{run.accelerator.process_index}.log"
            gpu = run.accelerator.device.type == "cuda"
            card = run.accelerator.local_process_index if gpu else None
            self.server = Server(run.settings.serve, agent, log, card)
        return self.server

    def end(self) -> None:
        if self.server:
            self.server.end()

    def engine(self, server: Server, temperature: float) -> Engine:
        """What asks the server for replies as the run's episodes need them."""
        run = self.run
        return Engine(server, run.encoder, run.encoder.sampler(temperature),
                      run.settings.max_new_tokens, run.env.stops)

    def play(self, begun: list[Trajectory], engine: Engine, make_env) -> Iterator[Trajectory]:
        """Plays episodes by the server, which is started where there are any.

        Args:
            begun: What the episodes begin.
            engine: Asks the server, which may not be started yet.
            make_env: Makes an environment that knows the episodes' tasks.

        Yields:
            Each trajectory, when its episode has ended.
        """
        if not begun:
            return
        run = self.run
        try:
            self.start(engine)
            yield from play(make_env, run.encoder, begun, engine, run.slots,
                            run.settings.max_tokens)
        except BaseException:
            self.end()
            raise

    def start(self, engine: Engine) -> None:
        """Starts the server, unless it runs, and compares its first replies."""
        run, server, temperature = self.run, engine.server, engine.sampler.temperature
        # What trained is garbage by now; from here on its memory is the server's.
        gc.collect()
        torch.cuda.empty_cache()
        server.start()
        # All ranks run the same command, and one model in a machine's memory is enough.
        if run.accelerator.is_local_main_process and temperature not in server.checked:
            check(engine, run.settings.max_tokens, run.bf16)
            server.checked.add(temperature)
