"""The episodes of a phase: by a model on all ranks or at an endpoint, and which can train."""

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer

from lab import play_env as envs
from lab.engine.cache import slot_bytes, slots_that_fit
from lab.engine.prepacked import prepack
from lab.engine.sharding import hand_out
from lab.harness import files
from lab.harness.settings import Settings
from lab.playing.endpoint import USAGE, Endpoint
from lab.playing.kept import CHUNK, Kept
from lab.playing.rollout import Sampling, rollout
from lab.tokens import Encoder, Trajectory


def play(run, folder: Path, trajectories: list[Trajectory],
         temperature: float) -> list[Trajectory]:
    """Plays what `trajectories` begin, in order, with the model in a folder, which is in memory
    only meanwhile, in bf16 where the machine computes in it."""
    bf16 = run.accelerator.mixed_precision == "bf16"
    model = run.trainer.read(folder, torch.bfloat16 if bf16 else torch.float32)
    hand_out(model, run.accelerator.device)  # one rank reads the weights
    prepack(model)
    encoder = Encoder(AutoTokenizer.from_pretrained(folder))
    return play_with(run, model, encoder, trajectories, temperature)


def play_with(run, model, encoder: Encoder, trajectories: list[Trajectory],
              temperature: float) -> list[Trajectory]:
    """The same with a model that is whole on each rank, which plays its share; all get all. Lost
    episodes are left out and logged; EnvError where they are too many."""
    processes = run.accelerator.num_processes
    share = trajectories[run.accelerator.process_index::processes]
    order = {(t.task, t.rollout): n for n, t in enumerate(trajectories)}
    with run.log.bar(run.folder.running, len(share), "episode") as progress:
        played = play_share(run, model, encoder, share, temperature, progress, len(trajectories))
    played = sorted(gather_object(played), key=lambda t: order[t.task, t.rollout])
    kept = without_lost(run, played)
    log_full(run, sum(t.ended == "context" for t in played), len(played))
    return kept


def play_at_endpoint(run, endpoint: Endpoint, trajectories: list[Trajectory],
                     play_one) -> tuple[list[Trajectory], dict]:
    """The same, `slots` at a time from one process, and what the answered requests took: by
    play_one(env, t, ask) with ask(messages) -> (reply, usage). `trajectories` then holds also what
    an earlier process has paid for. An episode that is refused for good is lost.
    """
    inputs = [run.folder.inputs()]

    def play_missing():
        kept = Kept(run.folder.path / "playing/endpoint.jsonl", inputs)
        trajectories[:] = kept.fill(trajectories)
        missing = [t for t in trajectories if not t.ended]
        lost, lock, idle = envs.LostEpisodes(len(missing)), threading.Lock(), queue.SimpleQueue()
        slots = min(run.settings.slots, len(missing)) or 1
        for _ in range(slots):
            idle.put(run.tasks.make_env())

        def play(t):
            def ask(messages):
                reply, used = endpoint(messages)
                took = {name: used[name] for name in USAGE}
                kept.spend(took)
                t.usage |= {name: t.usage[name] + n for name, n in took.items()}
                t.cut_replies += used["cut_replies"]
                return reply, used

            t.usage, env = dict.fromkeys(USAGE, 0), idle.get()
            try:
                play_one(env, t, ask)
                kept.add(t)
                with lock:
                    lost.answered()
                    progress.update()
            except envs.EnvError as error:
                t.ended = "lost"
                with lock:
                    lost.add(error)
            finally:
                idle.put(env)

        threads = ThreadPoolExecutor(slots)
        with run.log.bar(run.folder.running, len(trajectories), "episode") as progress:
            progress.update(len(trajectories) - len(missing))
            try:
                for played in as_completed([threads.submit(play, t) for t in missing]):
                    played.result()
            finally:  # after an error no other episode begins, and none is waited for
                threads.shutdown(wait=False, cancel_futures=True)
        while not idle.empty():
            idle.get().close()
        return trajectories, {name: sum(used[name] for used in kept.spent) for name in USAGE}

    played, spent = run.folder.on_main(play_missing)
    return without_lost(run, played), spent


def without_lost(run, played: list[Trajectory]) -> list[Trajectory]:
    """The episodes whose environment did not break; the others are logged."""
    phase, lost = run.folder.running, [t.task for t in played if t.ended == "lost"]
    run.log.dropped(phase, envs.LOST, lost)
    if envs.too_many(len(lost), len(played)):
        raise envs.EnvError(f"{phase}: {len(lost)} of {len(played)} episodes were lost")
    if lost:
        run.log.say(f"{phase}: {len(played) - len(lost)} of {len(played)} episodes; "
                    f"{envs.LOST} on {', '.join(lost)}")
    return [t for t in played if t.ended != "lost"]


def log_full(run, full: int, played: int) -> None:
    """Says so where most of the episodes played filled the context."""
    if 2 * full > played:
        run.log("full", phase=run.folder.running, episodes=full, of=played)
        run.log.say(f"{run.folder.running}: {full} of {played} episodes filled --max-tokens "
                    f"{run.settings.max_tokens} before they were over; raise --max-tokens")


def play_share(run, model, encoder: Encoder, share: list[Trajectory],
               temperature: float, progress, of: int) -> list[Trajectory]:
    """`rollout` with as many slots and threads as pay. of: episodes of the phase on all ranks."""
    s, slots, threads = run.settings, run.settings.slots, torch.get_num_threads()
    if model.device.type == "cuda":  # episodes that do not fit beside the model wait
        torch.cuda.empty_cache()  # what training has freed, torch would keep for itself
        free = torch.cuda.mem_get_info(model.device)[0]
        slot = s.max_tokens * slot_bytes(model.config, model.dtype.itemsize)
        slots = max(1, min(slots, slots_that_fit(free, slot)))
    chunk = CHUNK * slots if model.device.type == "cpu" else 0
    kept = Kept(run.folder.path / f"playing/rank-{run.accelerator.process_index}.jsonl",
                [run.folder.inputs(), files.code_hash(), run.accelerator.num_processes, chunk])
    share = kept.fill(share, chunk or 1, run.tasks.make_env)
    if before := sum(bool(t.ended) for t in share):
        progress.update(before)
        run.log.say(f"{run.folder.running} goes on after {before} of {len(share)} episodes")

    def ended(t):
        kept.add(t)
        progress.update()

    if model.device.type == "cpu" and model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # several would only wait for each other: 1.6 s against 3.6 s
    sampling = Sampling(temperature, s.max_tokens, s.max_new_tokens, s.tokens_per_forward, slots,
                        envs.STOPS[s.options.protocol], chunk)
    rollout(model, encoder, run.tasks.make_env, share, sampling, of=of, ended=ended)
    torch.set_num_threads(threads)
    return share


def usable_rollouts(run, names: list[str], dropped: Counter) -> dict[str, list[Trajectory]]:
    """task -> the trajectories of these files that can train; counts in `dropped` the others."""
    found = {}
    for t in (t for name in names for t in run.folder.trajectories(name)):
        if reason := unusable(t, run.settings):
            dropped[reason] += 1
        else:
            found.setdefault(t.task, []).append(t)
    return found


def unusable(t: Trajectory, s: Settings) -> str | None:
    """Why nobody can train on an episode; None if one can."""
    if t.ended == "context" and s.too_long == "drop":
        return "too long"
    return None if any(t.action_mask) else "no whole turn"
