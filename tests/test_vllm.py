"""Served runs by vLLM itself, which `bash tests/install.sh vllm` installs, 3.4 GB; else skipped.

It starts in half a minute to two on a CPU, and twice by ETO and six times by co-evolution.
"""

import json
import random
import shlex
import threading

import pytest
import torch
from conftest import ROOT, SMALL_RUN, plain_log_probs
from test_serve import TINY, encoder_of

import coevolve
import dpo
from common.files import read_jsonl
from lab.serve.engine import Engine, check
from lab.serve.run import Run
from lab.serve.server import Server
from lab.settings import METHODS, Settings

PYTHON = ROOT / ".venv-vllm/bin/python"
COMMAND = (  # one thread, and a gigabyte for keys and values
    "env OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 "
    f"VLLM_NO_USAGE_STATS=1 {shlex.quote(str(PYTHON))} -m vllm.entrypoints.openai.api_server "
    "--model {agent} --port {port} --dtype float32 --enforce-eager "
    "--logprobs-mode processed_logprobs --generation-config vllm")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM is not installed: bash tests/install.sh vllm, 3.4 GB")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    server = Server(COMMAND, TINY, tmp_path_factory.mktemp("vllm") / "log")
    server.start()
    yield server
    server.end()


def texts(encoder, count: int) -> list[list[int]]:
    """Of random tokens."""
    known = sorted({*range(len(encoder.tokenizer))} - {*encoder.sampler().never})
    return [random.Random(n).choices(known, k=20 + 30 * n) for n in range(count)]


def engine(server, temperature: float) -> Engine:
    encoder = encoder_of(TINY)
    return Engine(server, encoder, encoder.sampler(temperature), 24, ("Observation:",))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_trial_of_a_server(temperature, vllm):
    assert check(engine(vllm, temperature), 768, bf16=False) < 1e-4


def test_greedy_replies_are_those_of_the_program(vllm):
    asks = engine(vllm, 0.0)
    model = dpo.read_model(TINY).eval()
    for ids in texts(asks.encoder, 16):
        expected = dpo.replies(model, asks.encoder, asks.sampler, 24, asks.stops,
                               [(ids, random.Random(0))])
        assert [asks(ids, random.Random(0))] == expected


def test_a_seed_gives_a_reply_whatever_runs_beside_it(vllm):
    asks = engine(vllm, 1.0)
    model = dpo.read_model(TINY).eval()
    prompts = texts(asks.encoder, 16)
    alone = [asks(ids, random.Random(n)) for n, ids in enumerate(prompts)]
    beside = {}

    def ask(n):
        beside[n] = asks(prompts[n], random.Random(n))

    threads = [threading.Thread(target=ask, args=(n,)) for n in reversed(range(16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, (reply, log_probs) in enumerate(alone):
        assert beside[n][0] == reply and not {*reply} & {*asks.sampler.never}
        mask = [0] * len(prompts[n]) + [1] * len(reply)
        expected = plain_log_probs(model, prompts[n] + reply, mask, asks.sampler.never, 1.0)
        assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-4)


@pytest.mark.parametrize("method", ["eto", "coevolve"])
def test_a_run_from_end_to_end(method, careful_run, tmp_path):
    coevolve.main([*SMALL_RUN, "--method", method, "--out", str(tmp_path), "--serve", COMMAND],
                  Settings, Run, METHODS)
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    agents = {"eto": ["target"], "coevolve": ["target", "failure"]}[method]
    for agent in agents:
        for split in "test", "unseen":
            name = f"eval-0-{agent}-{split}.jsonl"
            assert read_jsonl(tmp_path / name) == read_jsonl(careful_run / name)
        encoder = encoder_of(TINY)
        model = dpo.read_model(tmp_path / f"sft-{agent}").eval()
        rows = read_jsonl(tmp_path / f"iter1/{agent}.jsonl")
        assert len(rows) == 12  # two episodes of six tasks
        for row in rows:
            expected = plain_log_probs(model, row["ids"], row["action_mask"],
                                       encoder.sampler().never, settings["temperature"])
            assert torch.allclose(torch.tensor(row["log_probs"]), expected, atol=1e-4)
    assert (tmp_path / "iter1/target-agent/model.safetensors").exists()
