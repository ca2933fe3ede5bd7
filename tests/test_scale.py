"""What large machines would do, without one: checks before a load, ranks that die, the measuring."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, Qwen3Config, RwkvConfig

import coevolve
import evolve
from common import machine as machine_can
from lab.bench import bench, first_gpu
from lab.careful import machine
from lab.careful.run import Run
from lab.settings import METHODS

ROOT = Path(__file__).parent.parent
LLAMA2_7B = LlamaConfig(num_hidden_layers=32, hidden_size=4096, vocab_size=32000,
                        intermediate_size=11008, num_attention_heads=32)
H100 = 84.8e9  # bytes


@pytest.mark.parametrize("devices, cuda, hip, said", [
    ([], None, None, None),
    (["nvidia0"], None, None, "NVIDIA GPUs, and torch X was built without them"),
    (["nvidia0", "kfd"], None, "6.4", "NVIDIA GPUs, and torch X was built without them"),
    (["kfd"], "12.9", None, "AMD GPUs, and torch X was built without them"),
    (["nvidia0"], "12.9", None, "torch X cannot reach them; update their driver"),
    (["kfd"], None, "6.4", "torch X cannot reach them; update their driver")])
def test_a_torch_that_cannot_use_the_gpus_is_refused(tmp_path, monkeypatch, devices, cuda, hip, said):
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in dict(__version__="X", **{"version.cuda": cuda, "version.hip": hip}).items():
        monkeypatch.setattr(f"torch.{name}", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = machine.check_torch(tmp_path)
    assert (said in found if said else found is None)
    if said and "built without" in said:
        index = "pypi.org/simple" if "nvidia0" in devices else "download.pytorch.org/whl/rocm"
        assert f"{sys.executable} -m pip install" in found and index in found and "\n" not in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.check_torch(tmp_path) == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user wants the CPU
    assert machine.check_torch(tmp_path) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.check_torch(tmp_path) is None


@pytest.mark.parametrize("ranks, card, tokens, said", [
    (8, H100, 16_384, None),   # 107.8 / 8 = 13.5 GB, and a pass of 11 GB: simulated at 25.1
    (2, H100, 12_288, None),   # 53.9, simulated at 63.3
    (1, H100, 8192, r"on 1 x 85 GB: .*take 121 GB.*give 2 such cards"),  # 6.74e9 x 18
    (1, 12e9, 8192, "the copy that plays takes 13 GB on each; give larger cards"),
    (2, 65e9, 65_536, r"lower --tokens-per-forward to \d+$"),
    (6, 18e9, 1024, "give 7 such cards")])  # 0.92 x 18 - 0.7 GB hold a seventh of 107.8, no sixth
def test_a_model_that_no_card_holds_is_refused_with_what_would(ranks, card, tokens, said):
    found = machine.check_memory(LLAMA2_7B, ranks, card, tokens)
    assert found is None if said is None else re.search(said, found)
    if found and "lower" in found:  # that fits, and hardly more does
        fits = int(found.split()[-1])
        assert fits % 512 == 0 and machine.check_memory(LLAMA2_7B, ranks, card, fits) is None
        assert machine.check_memory(LLAMA2_7B, ranks, card, fits + 512)
    if found and "such" in found:
        enough = int(found.split("give ")[1].split()[0])
        assert machine.check_memory(LLAMA2_7B, enough, card, tokens) is None


def test_tied_embeddings_count_once():
    """Qwen3-4B has 4.02e9 parameters, 0.39e9 of them in the embedding that is also the head."""
    sizes = dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                 num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    for tied, said in (True, "4.02 B"), (False, "4.41 B"):
        assert machine.check_memory(Qwen3Config(**sizes, tie_word_embeddings=tied), 1, 9e9,
                                    1024).startswith(said)


def test_both_sections_compare_the_same_work(capsys):
    bench.main(["--quick"], {"core": bench.RUNS["core"]})
    said = capsys.readouterr().out
    for what in "train step, 1/7 in common", "train step, 1/2 in common", "rollout":
        assert any(line.startswith(what) and "core" in line and "ratio" in line
                   for line in said.splitlines())


def test_the_gpu_script_runs_its_path_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first_gpu.main(["--small"])
    rows = dict(map(json.loads, (tmp_path / "first_gpu.jsonl").read_text().splitlines()))
    assert len(rows) == 13 and not any("failed" in what for what in rows)
    padded, generated, fp32 = (float(rows[f"{name} against single texts in bf16, nats a token: rms, "
                                          "largest"].split(",")[0])
                               for name in ("a padded pass", "generate", "fp32"))
    assert padded < fp32 and 0 < generated < fp32 < 0.1  # no further off than bf16 itself
    assert rows["trial: passes alone, replies alone, with a cache"] == [False, False, True]
    for what in ("training, cuDNN's attention off", "decoding, 4 slots, static cache"):
        assert float(rows[f"{what}, tokens/s"].replace(",", "")) > 0


DYING = """
import os, signal, sys, time
import lab.__main__, lab.careful.watch
from lab.careful.run import Run
lab.careful.watch.BEAT, lab.careful.watch.LIMIT = 0.5, 20
def play(run, *what, **how):
    if os.environ["LAUNCHER"] == "1":
        (run.folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(900)  # as one that plays its share
Run.play = play
lab.__main__.main(sys.argv[1:])
"""


def test_the_death_of_a_process_ends_those_of_another_launcher(tmp_path):
    """Two launchers, as of two machines; a process of the second dies while that of the first, which
    has the launchers' store, plays."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, launchers = tmp_path / "dying.py", []
    script.write_text(DYING)
    flags = "--env webshop --method sft --train-tasks 4 --eval-tasks 4 --sft-epochs 1".split()
    for launcher in "01":
        launchers.append(subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node",
             "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", script, *flags,
             "--out", tmp_path / "run"], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env={
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "", "LAUNCHER": launcher}))
        with socket.socket() as store:
            while store.connect_ex(("127.0.0.1", port)):
                time.sleep(0.2)
    said = [launcher.communicate(timeout=600)[1] for launcher in launchers]
    assert all(launcher.returncode for launcher in launchers), said
    assert time.time() - (tmp_path / "run/died").stat().st_mtime < 180  # not torch's 300 s
    assert (tmp_path / "run/sft-target").exists()  # both had trained together
    assert "gives no sign of life" in said[0] and "SIGKILL" in said[1], said


LLAMA2_13B = LlamaConfig(num_hidden_layers=40, hidden_size=5120, vocab_size=32000,
                         intermediate_size=13824, num_attention_heads=40)
QWEN3 = dict(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True)
QWEN3_4B = Qwen3Config(num_hidden_layers=36, hidden_size=2560, intermediate_size=9728,
                       num_attention_heads=32, **QWEN3)
QWEN3_06B = Qwen3Config(num_hidden_layers=28, hidden_size=1024, intermediate_size=3072,
                        num_attention_heads=16, **QWEN3)


@pytest.mark.parametrize("config, parameters, card, tokens, training_ranks, slots", [
    # By hand: keys and values of 32 layers, 2 x 32 x 4096 x 2 bytes a token; the inside of a layer,
    # 2 x (6 x 4096 + 3 x 11008); of 0.92 of a card 13.5 GB of weights are taken.
    (LLAMA2_7B, 6.738e9, H100, 4096, 0, int((0.92 * H100 - 2 * 6.738e9) / (
        (2 * 32 * 4096 * 2 + 2 * (6 * 4096 + 3 * 11008)) * 4096))),
    (LLAMA2_7B, 6.738e9, H100, 4352, 0, 23), (LLAMA2_7B, 6.738e9, H100, 4352, 8, 17),
    (LLAMA2_7B, 6.738e9, 15e9, 4352, 0, 1), (LLAMA2_13B, 13.02e9, H100, 4352, 0, 12),
    (QWEN3_4B, 4.022e9, H100, 4352, 0, 67), (QWEN3_4B, 4.022e9, 24e9, 4352, 0, 13),
    (QWEN3_06B, 0.596e9, 8 * H100, 4352, 0, 128)])
def test_slots_fill_what_is_free(config, parameters, card, tokens, training_ranks, slots):
    assert machine_can.slots_that_fit(config, int(parameters), card, tokens,
                                      training_ranks) == slots
    # Rows that are all as long as the longest can be fit beside the weights.
    text = config.get_text_config()
    heads = text.num_key_value_heads or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    filled = 2 * parameters + slots * tokens * 4 * text.num_hidden_layers * heads * size
    assert slots == 1 or filled < 0.92 * card


def test_in_fp32_an_episode_takes_twice_the_room_and_so_do_weights():
    """By hand: keys and values of 32 layers, and the inside of one, with 4 bytes a number."""
    each = 4 * (2 * 32 * 4096 + 6 * 4096 + 3 * 11008) * 4096
    slots = int((0.92 * H100 - 4 * 6.738e9) / each)
    assert machine_can.slots_that_fit(LLAMA2_7B, 6_738_000_000, H100, 4096, 0, False) == slots == 9


def test_pi_ref_beside_a_policy_needs_room():
    """Llama-2-7B takes 107.8 GB in fp32 without it and 134.8 with it."""
    why = machine.check_memory(LLAMA2_7B, 2, 65e9, 8192, beside=True)
    assert re.search(r"moments and pi_ref take 67 GB on each.*give 3 such cards", why)
    assert machine.check_memory(LLAMA2_7B, 3, 65e9, 8192, beside=True) is None


@pytest.mark.parametrize("config", [MambaConfig(), RwkvConfig()])
def test_a_model_without_heads_needs_room_for_weights_and_the_inside_of_a_layer(config):
    card = 4_000_000 + 10 * 100 * 2 * (6 * config.hidden_size + 3 * config.intermediate_size)
    assert machine_can.slots_that_fit(config, 2_000_000, card / 0.92 + 1, 100) == 10
    assert machine_can.fits_in_fp32(config, 10, 44, 4096)
    assert not machine_can.fits_in_fp32(config, 10, 43, 4096)


def test_what_a_run_writes_is_known_from_the_config(tmp_path, monkeypatch):
    """Llama-2-7B, both agents, K = 3: 8 agents of 27 GB, and in lab two states of 81 GB. What the
    folder holds already counts. No weights are looked at, so that a hub name will do."""
    run = Run.__new__(Run)
    kept = dict(coevolve=8, eto=4, sft=1, positive=8, grpo=12, evolve=12, rft=2, dart=2, ppo=4,
                evaluate=0, chat=0)
    assert kept.keys() == METHODS.keys()
    for method, agents in kept.items():
        run.settings = SimpleNamespace(method=method, iterations=3, warm_start="sft",
                                       grpo_steps=55, evolve_every=5)
        assert run.agents_kept() == agents, method
    run.settings.method, run.parameters, run.folder = "coevolve", 6_738_000_000, tmp_path
    run.recorded = {}
    monkeypatch.setattr(coevolve.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100e9))
    with pytest.raises(coevolve.envs.Refused, match=r"100.0 GB are free.*writes 377.3 GB.*8 agents"):
        coevolve.check_disk(run)
    with pytest.raises(coevolve.envs.Refused, match=r"writes 215.6 GB"):
        run.keeps_states = False
        coevolve.check_disk(run)
    run.recorded = {"experts.jsonl": {}, "sft-target": {}}
    for name in ("sft-target", "sft-target-step2"):  # of these only what is recorded stays
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "model.safetensors", "wb") as file:
            file.truncate(60_000_000_000)  # of zeros, which take no room
    with pytest.raises(coevolve.envs.Refused, match=r"writes 155.6 GB"):
        coevolve.check_disk(run)
    with open(tmp_path / "sft-target/model.safetensors", "wb") as file:
        file.truncate(120_000_000_000)
    coevolve.check_disk(run)


def test_moments_that_stay_beside_agents_need_room(tmp_path, monkeypatch):
    """Qwen3-4B: 12 agents of segments, with two moments of each weight, fp32."""
    run = evolve.Run.__new__(evolve.Run)
    run.settings = SimpleNamespace(method="grpo", warm_start="none", grpo_steps=60, evolve_every=5)
    run.parameters, run.folder, run.recorded = 4_022_000_000, tmp_path, {"iter1/target-agent": {}}
    monkeypatch.setattr(coevolve.shutil, "disk_usage", lambda folder: SimpleNamespace(free=500e9))
    with pytest.raises(coevolve.envs.Refused, match=r"writes 579.2 GB.*12 agents"):
        coevolve.check_disk(run)
    (tmp_path / "iter1/target-agent").mkdir(parents=True)
    for name, size in ("model.safetensors", 40e9), ("moments.pt", 60e9):
        with open(tmp_path / "iter1/target-agent" / name, "wb") as file:
            file.truncate(int(size))
    coevolve.check_disk(run)
