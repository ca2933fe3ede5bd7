"""The served run: another program samples, and nothing else about an episode changes."""

import gc
import json
import os
import random
import shlex
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers
from conftest import ROOT, SMALL_RUN, Toy, ended, fork, plain_log_probs, wait_until
from small_server import Service

import coevolve
import dpo
import envs
from common.files import read_jsonl
from common.settings import Refused, parse
from lab.serve import rollouts
from lab.serve.engine import Engine, check
from lab.serve.run import Run
from lab.serve.server import Server, ServerError, environment
from lab.settings import METHODS, Settings

SMALL = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests/small_server.py'))}"
TINY = coevolve.MODELS["tiny"]


def command(log, *more) -> str:
    """Of the small server, which writes each request into `log`."""
    return f"{SMALL} {{agent}} --port {{port}} --log {shlex.quote(str(log))} {' '.join(more)}"


def careful(*flags) -> None:
    coevolve.main([str(flag) for flag in (*SMALL_RUN, *flags)], Settings, Run, METHODS)


def encoder_of(folder) -> dpo.Encoder:
    rows = dpo.read_config(folder).vocab_size
    return dpo.Encoder(dpo.read(transformers.AutoTokenizer, folder), rows)


def started(log: Path) -> list[dict]:
    """What each server wrote when it was started."""
    return [row for row in read_jsonl(log) if "pid" in row]


def gone(row: dict) -> bool:
    """Whether a server and the process that it started have ended."""
    for name in "pid", "child":
        try:
            if psutil.Process(row[name]).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            pass
    return True


# ---------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def served_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    careful("--method", "eto", "--out", folder / "run", "--serve", command(folder / "log"))
    return folder


def test_greedy_episodes_are_those_of_replies(served_run, careful_run):
    """Both runs fine-tune the same target, of the same seed."""
    for name in "eval-0-target-test.jsonl", "eval-0-target-unseen.jsonl":
        assert read_jsonl(served_run / "run" / name) == read_jsonl(careful_run / name)


def test_sampled_episodes_are_those_of_replies_with_the_seeds_that_were_sent(served_run):
    run = served_run / "run"
    model = dpo.read_model(run / "sft-target").eval()
    settings = json.loads((run / "config.json").read_text())["settings"]
    encoder = encoder_of(TINY)
    sampler = encoder.sampler(settings["temperature"])
    rows = read_jsonl(run / "iter1/target.jsonl")

    def answer(asked):
        return [dpo.replies(model, encoder, sampler, settings["max_new_tokens"], (), [
            (t.ids, random.Random(rng.getrandbits(32)))])[0] for t, rng in asked]

    begun = [dpo.Trajectory(*(row[name] for name in (
        "task", "agent", "iteration", "rollout", "seed"))) for row in rows]
    envs.play(lambda: envs.make("webshop", "short"), encoder, begun, answer, 8,
              settings["max_tokens"])
    for row, t in zip(rows, begun):
        assert (row["ids"], row["action_mask"], row["messages"], row["reward"], row["ended"]) == (
            t.ids, t.action_mask, t.messages, t.reward, t.ended)
        expected = plain_log_probs(model, t.ids, t.action_mask, sampler.never, sampler.temperature)
        assert torch.allclose(torch.tensor(row["log_probs"]), expected, atol=1e-4)


def test_a_server_plays_until_its_agent_changes_and_ends_before_training(served_run):
    rows = started(served_run / "log")
    assert [Path(row["agent"]).name for row in rows] == ["sft-target", "target-agent"]
    assert gone(rows[0])
    wait_until(lambda: gone(rows[1]))  # the run was the test's, whose process goes on


def test_a_server_that_dies_ends_the_run_in_one_line_which_goes_on(careful_run, tmp_path):
    """One at a time, so that episodes have ended before."""
    def evaluate(name, *more):
        coevolve.main(["--env", "webshop", "--method", "evaluate", "--eval-tasks", "4", "--view",
                       "short", "--max-tokens", "768", "--max-new-tokens", "32", "--slots", "1",
                       "--model", str(careful_run / "sft-target"), "--out", str(tmp_path / "run"),
                       "--serve", command(tmp_path / name, *more)], Settings, Run, METHODS)

    with pytest.raises(SystemExit, match="--serve: the server ended with status 137"):
        evaluate("first", "--fault", "die", "--after", "28")
    kept, = (tmp_path / "run/playing").iterdir()
    before = len(read_jsonl(kept))
    assert 0 < before < 4
    evaluate("second")
    rows = read_jsonl(tmp_path / "run/eval-0-target-test.jsonl")
    turns = sum(row["steps"] for row in rows[before:]) + sum(
        row["steps"] for row in read_jsonl(tmp_path / "run/eval-0-target-unseen.jsonl"))
    trial = 16
    assert len(read_jsonl(tmp_path / "second")) == 1 + trial + turns
    for row, expected in zip(rows, read_jsonl(careful_run / "eval-0-target-test.jsonl")):
        row["seed"] = expected["seed"]  # which nothing is drawn by
        assert row == expected


def test_another_kind_of_sampling_is_no_way_to_go_on(served_run):
    with pytest.raises(SystemExit, match="begun with --serve .* go on likewise"):
        careful("--method", "eto", "--out", served_run / "run")
    careful("--method", "eto", "--out", served_run / "run", "--serve",
            command(served_run / "log", "--after 5"))  # another command is welcome
    assert len(started(served_run / "log")) == 2  # and nothing was played again


# ------------------------------------------------------------------------------- wrong answers


@pytest.fixture
def running(serve, tmp_path):
    """running(fault) -> (a small server in this process, what it answers)."""
    def start(fault="", agent=TINY):
        service = Service(str(agent), fault)
        server = serve(lambda handler, body: (handler.path, body), lambda path, body: (
            *map(lambda x: x if isinstance(x, int) else json.dumps(x), service(path, body)), {}))
        served = Server(server.url, agent, tmp_path / "log")
        served.start()
        return served, service

    return start


def engine(server, temperature=0.7, tokens=8):
    encoder = encoder_of(TINY)
    return Engine(server, encoder, encoder.sampler(temperature), tokens, ())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_right_server_is_near_the_training_forward(temperature, running):
    assert check(engine(running()[0], temperature), 768, bf16=False) < 1e-4


@pytest.mark.parametrize("fault, said", [
    ("raw", "samples from another distribution"), ("nan", "a log-probability of nan"),
    ("short", "1 log-probabilities for 2 tokens"), ("forbidden", "which is never to be drawn"),
    ("bos", "read other token ids"), ("plain", "without token ids or log-probabilities")])
def test_a_server_that_answers_wrongly_is_refused(fault, said, running):
    server, _ = running(fault)
    with pytest.raises(ServerError, match=said):
        check(engine(server), 768, bf16=False)
    if fault == "raw":  # which is far beyond what bf16 makes
        with pytest.raises(ServerError, match=said):
            check(engine(server), 768, bf16=True)


def test_a_server_with_another_agent_is_refused(running, careful_run):
    server, _ = running(agent=careful_run / "sft-target")
    server.agent = TINY
    with pytest.raises(ServerError, match="samples from another distribution"):
        check(engine(server), 768, bf16=False)


def test_a_server_that_reads_less_than_an_episode_is_refused(running):
    with pytest.raises(ServerError, match="reads 2,048 tokens.*--max-model-len 4096"):
        check(engine(running()[0]), 4096, bf16=False)


def test_what_a_server_refuses_is_one_line(running):
    server, _ = running()
    asks = engine(server)
    server.longest = 9999
    with pytest.raises(ServerError, match="status 400: .*maximum context length is 2048"):
        asks([5] * 2048, random.Random(0))
    server.name = "other"
    with pytest.raises(ServerError, match="status 404"):
        asks([5], random.Random(0))


def test_a_reply_near_the_end_of_what_the_server_reads_is_shorter(running):
    server, _ = running()
    ids, log_probs = engine(server)([5] * 2045, random.Random(0))
    assert len(ids) == len(log_probs) <= 3


def test_a_seed_gives_a_reply_whatever_runs_beside_it(running):
    asks = engine(running()[0], temperature=2.0)
    texts = [[7 + n, 9, 11] for n in range(6)]
    alone = [asks(text, random.Random(n)) for n, text in enumerate(texts)]
    beside = [None] * 6
    threads = [threading.Thread(target=lambda n=n: beside.__setitem__(
        n, asks(texts[n], random.Random(n)))) for n in reversed(range(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == alone and len({tuple(ids) for ids, _ in alone}) > 1


# -------------------------------------------------------------------------------- its lifetime


def words(tmp_path, *more) -> Server:
    """A server without a model."""
    return Server(command(tmp_path / "log", *more), "no-model", tmp_path / "said")


def test_a_server_that_does_not_start_is_one_line(tmp_path):
    with pytest.raises(ServerError, match="ended with status 1: no room on the card"):
        words(tmp_path, "--fault", "start").start()
    with pytest.raises(ServerError, match="No such file or directory: 'no-such-program'"):
        Server("no-such-program {agent} {port}", "a", tmp_path / "other").start()
    with pytest.raises(ServerError, match="no server answers there"):
        Server("http://127.0.0.1:9/v1", "a", tmp_path / "other").start()


def test_the_end_of_a_server_is_that_of_all_it_started(tmp_path):
    server = words(tmp_path)
    server.start()
    row, = started(tmp_path / "log")
    assert not gone(row)
    server.end()
    assert gone(row)


@pytest.mark.parametrize("way", ["os._exit", "SIGKILL", "SIGTERM", "an error", "the keeper"])
def test_no_server_outlives_its_run(way, tmp_path):
    def work():
        server = words(tmp_path)
        server.start()
        print(server.process.pid, flush=True)
        if way == "os._exit":
            os._exit(3)
        if way == "an error":
            raise ValueError
        signal.pause()

    process = fork(work, tmp_path / "printed")
    wait_until(lambda: (tmp_path / "printed").exists() and (tmp_path / "printed").read_text())
    row, = started(tmp_path / "log")
    if way == "the keeper":
        os.kill(int((tmp_path / "printed").read_text()), signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(row["pid"]))
        psutil.Process(row["child"]).kill()  # nobody knows of it any more
        os.kill(process, signal.SIGKILL)
    elif way.startswith("SIG"):
        os.kill(process, getattr(signal, way))
    ended(process)
    wait_until(lambda: gone(row))


def test_a_server_gets_the_machine_and_nothing_of_the_run(tmp_path, monkeypatch):
    for name, value in dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_PORT="1",
                            OMP_NUM_THREADS="1", PYTORCH_CUDA_ALLOC_CONF="a", PYTHONPATH="/x",
                            CUDA_VISIBLE_DEVICES="4,5", HF_HOME="/home/models").items():
        monkeypatch.setenv(name, value)
    found = environment(1)
    assert not any(name.startswith(("RANK", "WORLD", "LOCAL_RANK", "MASTER", "OMP", "PYTORCH",
                                    "PYTHONPATH")) for name in found)
    assert found["CUDA_VISIBLE_DEVICES"] == "5" and found["HF_HOME"] == "/home/models"
    assert environment(None)["CUDA_VISIBLE_DEVICES"] == "4,5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment(1)["CUDA_VISIBLE_DEVICES"] == "1"
    server = words(tmp_path)
    server.start()
    server.end()
    row, = started(tmp_path / "log")
    assert "RANK" not in row["environment"] and row["environment"]["HF_HOME"] == "/home/models"


def test_what_trained_is_gone_before_a_server_starts(monkeypatch):
    class Model:
        pass

    model = Model()
    model.itself = model  # as sharded ones hold themselves
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        server = SimpleNamespace(start=lambda: found.append(alive()), checked={0.0})
        found, run = [], SimpleNamespace(
            accelerator=SimpleNamespace(is_local_main_process=True))
        rollouts.Servers(run).start(SimpleNamespace(server=server, sampler=dpo.Sampler(0.0)))
    finally:
        gc.enable()
    assert found == [None]


# ---------------------------------------------------------------------------- without rounds


def test_no_episode_waits_for_another_ones_reply(agent):
    """The first episode's first reply comes when all others have ended."""
    _, encoder = agent
    others, lock = [], threading.Lock()
    rest = threading.Event()

    def answer(ids, rng):
        if ids == first:
            assert rest.wait(60)
        return [encoder.end_of_turn], [0.0]

    begun = [dpo.Trajectory(f"toy-train-{n}", "target", seed=n) for n in range(8)]
    env = Toy()
    first = encoder.start(env.opening(env.reset("toy-train-0"), playing=True))
    for t in rollouts.play(Toy, encoder, begun, answer, 3, 256):
        with lock:
            others.append(t.task)
        if len(others) == 7:
            rest.set()
    assert others[-1] == "toy-train-0" and len(others) == 8
    assert all(t.ended == "done" and t.steps == 2 for t in begun)


def test_a_connection_that_closes_as_a_request_goes_out_is_no_end(agent, serve):
    """As a server does with those that were idle; a second time in a row it is an error."""
    encoder = agent[1]

    def answer(prompt):
        choice = dict(prompt_token_ids=prompt, token_ids=[encoder.end_of_turn],
                      logprobs=dict(token_logprobs=[-1.0]))
        return 200, json.dumps(dict(choices=[choice])), None

    server = serve(lambda handler, body: [json.loads(body)["prompt"]], answer, "HTTP/1.1")
    running = SimpleNamespace(url=server.url, name="small", longest=64, check_alive=lambda wait: None)
    engine = Engine(running, encoder, encoder.sampler(), 8, ())
    server.faults = [None]
    assert engine([5, 6], random.Random(0)) == ([encoder.end_of_turn], [-1.0])
    server.faults = [None, None]
    with pytest.raises(ServerError, match="Connection"):
        engine([5, 6], random.Random(0))
    assert server.seen == [[[5, 6]]] * 4


def test_an_error_of_the_server_ends_the_play(agent):
    def answer(ids, rng):
        raise ServerError("gone")

    begun = [dpo.Trajectory(f"toy-train-{n}", "target") for n in range(8)]
    with pytest.raises(ServerError, match="gone"):
        list(rollouts.play(Toy, agent[1], begun, answer, 3, 256))


def test_after_an_error_no_thread_waits_for_a_world(agent, monkeypatch):
    """The first episode fails at once, the second when the play is over; the third waits for the
    world of one of them. A thread that waited for ever would keep the program from ending."""
    over, pools, calls = threading.Event(), [], []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **how):
            wait_until(self._work_queue.empty)  # the third has begun
            super().shutdown(**how)
            pools.append(self)

    def answer(ids, rng):
        calls.append(ids)
        if len(calls) > 1:
            over.wait(60)
        raise ServerError("gone")

    monkeypatch.setattr(rollouts, "ThreadPoolExecutor", Pool)
    begun = [dpo.Trajectory(f"toy-train-{n}", "target") for n in range(3)]
    with pytest.raises(ServerError, match="gone"):
        list(rollouts.play(Toy, agent[1], begun, answer, 2, 256))
    over.set()
    for thread in pools[0]._threads:
        thread.join(10)
        assert not thread.is_alive()


# ---------------------------------------------------------------------------------- the setting


@pytest.mark.parametrize("flags, said", [
    ("--method grpo --serve 'x {agent} {port}'", "--method grpo plays no agent in a folder"),
    ("--method coevolve --serve http://127.0.0.1:8000/v1", "this method makes others"),
    ("--method evaluate --serve 'vllm serve {agent}'", "needs {agent} and {port}"),
    ("--method evaluate --serve \"x {agent} {port} 'y\"", "a quote for each quote"),
    ("--method evaluate --serve http://user:secret@host/v1", "is no address")])
def test_a_setting_that_cannot_serve_is_refused(flags, said):
    if said.startswith("a quote"):
        words = ["--method", "evaluate", "--serve", "x {agent} {port} 'y"]
    else:
        words = shlex.split(flags)
    with pytest.raises(Refused, match=said):
        parse(["--env", "webshop", *words], Settings, METHODS, envs.environment)
