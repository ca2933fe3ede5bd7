"""In-context models: an OpenAI-compatible chat endpoint plays the episodes; nothing is trained.

    export OPENAI_API_KEY=...
    bash run.sh webshop --model https://api.openai.com/v1 --model-name gpt-4 --examples 1

Every finished episode is appended to chat.jsonl in the run's folder, so that a run which was
stopped pays for none twice, and every answered request to chat-requests.jsonl, so that those of a
broken episode count as well.
"""

import json
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import envs
from dpo import Trajectory
from harness.endpoint import USAGE, ContextFull, Endpoint
from harness.play import before_stops
from harness.settings import SettingsError
from program.run import Run
from program.tasks import check_openings, marks

REQUESTS = "chat-requests.jsonl"


def play(run: Run, trajectories: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """Plays the episodes, `slots` at a time, from one process; all get them, and what they took."""
    played = run.folder.on_main(lambda: play_all(run, trajectories))
    asked = run.folder.on_main(lambda: requests(run))
    return played, cost(played, run.settings, asked)


def play_all(run: Run, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The episodes in the order given, those that an earlier process paid for among them."""
    s, endpoint = run.settings, Endpoint(run.settings)
    kept, lock, idle = run.folder.path / "chat.jsonl", threading.Lock(), queue.SimpleQueue()
    for file in (kept, run.folder.path / REQUESTS):  # a line that was cut off was not finished
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    paid = {t.task: t for t in run.folder.trajectories(kept.name)} if kept.exists() else {}
    missing = [t for t in trajectories if t.task not in paid]
    ours = s.options.protocol == "ours"  # ETO's has its examples in the opening
    shown = examples(run) if missing and ours and s.examples else []

    def append(file, row):
        with lock, open(file, "a") as f:
            f.write(json.dumps(row) + "\n")

    def work(t: Trajectory) -> None:
        try:
            env = idle.get_nowait()
        except queue.Empty:
            env = run.tasks.make_env()

        def ask(messages):
            reply, used = endpoint(messages)
            append(run.folder.path / REQUESTS, dict(phase=run.folder.running, task=t.task, **{
                name: used[name] for name in USAGE}))
            return reply, used

        try:
            play_episode(t, env, ask, shown, s.max_tokens, envs.STOPS[s.options.protocol])
        finally:
            idle.put(env)
        append(kept, t.record())
        paid[t.task] = t
        progress.update()

    with run.log.bar(run.folder.running, len(trajectories), "episode") as progress:
        progress.update(len(trajectories) - len(missing))
        threads = ThreadPoolExecutor(s.slots)
        try:
            for _ in threads.map(work, missing):
                pass
        finally:
            threads.shutdown(cancel_futures=True)
            while not idle.empty():
                idle.get().close()
    return [paid[t.task] for t in trajectories]


def play_episode(t: Trajectory, env, endpoint, shown: list[dict], max_tokens: int,
                 stops=envs.STOPS["ours"]) -> None:
    """One episode after the conversations `shown`; it and its replies end as in `rollout`."""
    t.usage = dict.fromkeys(USAGE, 0)
    t.messages = envs.opening(env, env.reset(t.task), playing=True)
    while not t.ended:
        first, *rest = t.messages
        try:
            reply, used = endpoint([*shown, without_prompt(first, env) if shown else first, *rest])
        except ContextFull:
            t.ended = "context"
            break
        t.usage = {name: t.usage[name] + used[name] for name in USAGE}
        t.cut_replies += used["cut_replies"]
        reply = before_stops(reply, stops).strip()
        t.messages.append({"role": "assistant", "content": reply})
        step = env.step(reply)
        t.reward, t.raw_reward, t.steps = step.reward, step.raw, t.steps + 1
        if step.done or t.steps == env.max_steps:
            t.ended = "done" if step.done else "budget"
        elif used["prompt_tokens"] + used["completion_tokens"] >= max_tokens:
            t.ended = "context"
        else:
            t.messages.append({"role": "user", "content": step.observation})


def without_prompt(message: dict, env) -> dict:
    return {**message, "content": message["content"].removeprefix(env.prompt).strip()}


def examples(run: Run) -> list[dict]:
    """The conversations of `examples` successful experts, drawn by the seed, one after another.

    None is of a task that is evaluated. The environment's rules open the first of them only.
    """
    s, env, found = run.settings, run.tasks.make_env(), []
    rng = run.rng("examples")
    evaluated = {mark for split in run.tasks.splits for task in run.tasks.of_split(split)
                 for mark in marks(env, task)}
    if s.experts:
        experts = envs.read_experts(s.experts, env)
        experts = rng.sample(experts, len(experts))
    else:
        tasks = env.tasks("train")
        experts = ((task, *envs.converse(env, env.reset(task), env.expert()))
                   for task in rng.sample(tasks, len(tasks)))
    for task, messages, reward in experts:
        if reward >= envs.SUCCESS and not marks(env, task) & evaluated:
            if s.experts:
                check_openings(run, [(task, messages, reward)])
            found.append(messages)
        if len(found) == s.examples:
            break
    env.close()
    if len(found) < s.examples:
        raise SettingsError(f"--examples {s.examples}: only {len(found)} experts succeed on tasks "
                            "that are not evaluated; give fewer")
    return [without_prompt(m, env) if n and m is messages[0] else m
            for n, messages in enumerate(found) for m in messages]


def requests(run: Run) -> list[dict]:
    """What the answered requests of the running phase took, also those of episodes that broke."""
    if not (run.folder.path / REQUESTS).exists():
        return []
    return [row for row in run.folder.read_jsonl(REQUESTS) if row["phase"] == run.folder.running]


def cost(played: list[Trajectory], s, asked: list[dict] = ()) -> dict:
    """Sums of USAGE over the requests `asked`, or where they are not known over the episodes.

    With dollars, where prices are given and all tokens known.
    """
    known = {row["task"] for row in asked}
    rows = [*asked, *(t.usage for t in played if t.task not in known)]
    total = {name: sum(row[name] for row in rows) for name in USAGE}
    if (s.price_in or s.price_out) and not total["unreported"]:
        total["dollars"] = round((total["prompt_tokens"] * s.price_in
                                  + total["completion_tokens"] * s.price_out) / 1e6, 6)
    return total
