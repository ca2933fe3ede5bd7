"""What eight GPUs would do, without one: their time and their memory."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Toy, make_model

from lab import tokens as dpo
from lab.engine import cache, log_softmax, ranks
from lab.harness.settings import SettingsError
from lab.program import start


def random_group(task, lengths, pairs):
    sequences = [dpo.Trajectory(ids=[k] * n, action_mask=[0, *[1] * (n - 1)])
                 for k, n in enumerate(lengths)]
    return dpo.Group(task, sequences, [dpo.Pair("k", 0, 1)] * pairs)


def lognormal(rng):
    """Tokens of a trajectory: 2,200 on average, as in WebShop with a 7B model."""
    return min(4096, max(600, int(rng.lognormvariate(7.6, 0.45))))


@pytest.mark.parametrize("trajectories, pairs, size, unit", [
    (3, 3, 32, "pairs"), (2, 1, 32, "pairs"), (1, 0, 48, "instructions")],
    ids=["target", "failure agent", "SFT"])
def test_most_of_the_ranks_time_works(trajectories, pairs, size, unit):
    """All ranks wait for the longest share of a pass. Every sequence is in one share."""
    rng, work, time = random.Random(0), 0, 0
    groups = [random_group(str(n), [lognormal(rng) for _ in range(trajectories)], pairs)
              for n in range(400)]
    for batch in dpo.batches(groups, size, unit, rng):
        seen = []
        for pack, shares in ranks.passes(batch, 8, 16_384):
            lengths = [len(s.ids) for g in pack for s in g.sequences]
            loads = [sum(lengths[n] for n in share) for share in shares]
            assert sorted(sum(shares, [])) == list(range(len(lengths))) and max(loads) <= 16_384
            seen += [g.task for g in pack]
            work, time = work + sum(loads), time + 8 * max(loads)
        assert sorted(seen) == sorted(g.task for g in batch)
    assert work / time > 0.9


@pytest.mark.parametrize("groups, ranks_, tokens, expected", [
    # A rank each; two trajectories would have 12 of a pass's 8 tokens.
    ([[6, 6], [6, 6]], 2, 12, [(2, [[0, 1], [2, 3]])]),
    ([[6, 6], [6, 6]], 2, 8, [(1, [[0], [1]]), (1, [[0], [1]])]),
    # On one rank the group of 9 would let the other idle.
    ([[5, 4], [2]], 2, 12, [(2, [[0], [1, 2]])]),
    # More than fits is a pass of its own; a rank without work has no sequence.
    ([[9, 9, 9]], 2, 8, [(1, [[0, 2], [1]])]),
    ([[9]], 2, 8, [(1, [[0], []])]),
    ([[3], [3], [3]], 1, 6, [(2, [[0, 1]]), (1, [[0]])])])
def test_sequences_are_dealt(groups, ranks_, tokens, expected):
    made = ranks.passes([random_group(str(n), lengths, 0) for n, lengths in enumerate(groups)],
                        ranks_, tokens)
    assert [(len(pack), shares) for pack, shares in made] == expected


def test_out_of_memory_is_one_line_and_the_run_goes_on_with_less(toy_run, monkeypatch):
    """Flags that change rounding only may change; --max-tokens, which the line names too, may not."""
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
                                     "total capacity of\n79.0 GiB")
    backward = dpo.backward
    monkeypatch.setattr(dpo, "backward", lambda *a: full() if a[3].divisor is dpo.count_pairs else
                        backward(*a))
    with pytest.raises(torch.OutOfMemoryError) as error:
        toy_run(Toy, "--tokens-per-forward", 200)
    line = start.one_line(error.value)
    assert "2.00 GiB" in line and "\n" not in line
    assert all(flag in line for flag in ("--tokens-per-forward", "--slots", "--max-tokens"))
    monkeypatch.setattr(dpo, "backward", backward)
    with pytest.raises(SettingsError, match="max_tokens"):
        toy_run(Toy, "--tokens-per-forward", 200, "--max-tokens", 128)
    run = toy_run(Toy, "--tokens-per-forward", 100, "--slots", 2)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert dict(event="changed", tokens_per_forward=100, slots=2) in events
    assert sum(e["event"] == "phase" and e["phase"] == "sft-target" for e in events) == 1
    assert (run / "result.json").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampler", [dpo.Sampler(), dpo.Sampler(0.7, (3, 9))])
@pytest.mark.parametrize("logits_of", [None, [0, 0, 1, 2, 4, 4, 4]])
def test_log_softmax_in_pieces_is_the_dense_one(dtype, sampler, logits_of, monkeypatch):
    """Log-probabilities, and gradients of weighted ones, to the bit; and by hand in float64."""
    torch.manual_seed(0)
    made = 3 * torch.randn(5 if logits_of else 7, 50, dtype=torch.float64)
    targets, weights = torch.tensor([1, 8, 2, 40, 49, 0, 1]), torch.linspace(-1, 2, 7)
    found = []
    for piece in (50, 120, 10_000):  # a row, two, all
        monkeypatch.setattr(log_softmax, "PIECE", piece)
        leaf = made.to(dtype).requires_grad_()
        log_probs = log_softmax.target_log_probs(leaf * 1, targets, logits_of, sampler)
        (log_probs * weights).sum().backward()
        found.append((log_probs.detach(), leaf.grad))
    for log_probs, gradient in found[:2]:
        assert torch.equal(log_probs, found[2][0])
        close = dict(rtol=0, atol=0) if dtype != torch.bfloat16 else {}  # of two targets of a row
        torch.testing.assert_close(gradient, found[2][1], **close)
    leaf = made.to(dtype).double().requires_grad_()
    rows = (leaf / sampler.temperature)[logits_of or range(7)]
    drawn = [i for i in range(50) if i not in sampler.suppress_tokens]
    by_hand = rows[range(7), targets] - rows[:, drawn].logsumexp(1)
    (by_hand * weights).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert (found[0][0] - by_hand).abs().max() < min(tolerance, 1e-5)  # fp32 inside
    assert (found[0][1] - leaf.grad).abs().max() < tolerance
    with pytest.raises(RuntimeError, match="modified by an inplace operation|second time"):
        monkeypatch.setattr(log_softmax, "PIECE", 50)
        log_probs = log_softmax.target_log_probs(leaf * 1, targets, logits_of, sampler).sum()
        log_probs.backward(retain_graph=True)
        log_probs.backward()  # the logits are gone


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """What lets tensors "on cuda" take part in autograd where torch was built without CUDA."""
    here, library = Path(__file__).parent, tmp_path_factory.mktemp("guard") / "guard.so"
    if torch.cuda.is_available() or not shutil.which("g++"):
        pytest.skip("a machine without GPUs and with g++ simulates them")
    root = Path(torch.__file__).parent
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", here / "guard.cpp",
                    "-o", library, f"-L{root}/lib", "-lc10", "-ltorch_cpu"], check=True)
    return dict(LD_PRELOAD=str(library), LD_LIBRARY_PATH=f"{root}/lib", OMP_NUM_THREADS="1", PYTHONPATH=".")


@pytest.mark.parametrize("model, share", [("llama2-7b", 0.2), ("qwen3-4b", 0.5)])
def test_a_rank_of_eight_takes_the_planned_memory_and_waits_seldom(guard, model, share):
    """Three layers at full width, two steps of two passes of 8,192 tokens each."""
    done = subprocess.run(
        [sys.executable, "tests/fake_gpu.py", model, "3", "8", "2048", str(share), "8192"],
        cwd=Path(__file__).parents[1], env=os.environ | guard, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mixed"] == {}
    assert found["planned"] == pytest.approx(found["peak"], rel=0.05)
    waits = found["waits"]  # loss and statistics of four passes; the gradient's norm of two steps
    assert waits["tolist"] == 4 and waits["item"] == 4 + 2 and waits["to the device"] <= 4 * 20


def documented(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size,
               enable_gqa, seqused_k, block_table):
    """What torch's documentation says of varlen_attn over pages, a sequence at a time."""
    assert window_size == (-1, 0) and cu_seq_k is None and key.is_contiguous()
    assert query.is_contiguous() and key.shape[1] % 256 == 0  # flash attention's pages
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, seqused_k, block_table))
    sizes, out = cu_seq_q.diff().tolist(), torch.empty_like(query)
    assert max_q == max(sizes) and max_k == int(seqused_k.max())
    for n, size in enumerate(sizes):
        first, used = int(cu_seq_q[n]), int(seqused_k[n])
        q = query[first:first + size].transpose(0, 1)                               # (H, n, d)
        k, v = (x[block_table[n].long()].flatten(0, 1)[:used].transpose(0, 1).repeat_interleave(
            q.shape[0] // x.shape[2], 0) for x in (key, value))                     # (H, used, d)
        seen = torch.ones(size, used, dtype=torch.bool).tril(used - size)
        scores = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
        out[first:first + size] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def test_flash_attention_over_the_cache_is_given_what_its_contract_wants(monkeypatch):
    """Pages, single tokens and a copied slot give the logits of the cache that CPUs use."""
    monkeypatch.setattr(cache, "varlen_attn", documented)
    model, rng = make_model(50), random.Random(0)
    ids = lambda n: [rng.randrange(50) for _ in range(n)]  # noqa: E731
    caches = [kind(model, 4, 300) for kind in (cache.SlotCache, cache.VarlenCache)]
    steps = [[(2, 0, ids(40)), (0, 0, ids(7))], [(0, 7, ids(1)), (1, 40, ids(1)), (2, 40, ids(230))],
             [(1, 41, ids(1)), (2, 270, ids(1)), (0, 8, ids(3)), (3, 0, ids(5))]]
    with torch.no_grad():
        for step in steps:
            ours, flash = (cache.next_token_logits(model, c, step) for c in caches)
            torch.testing.assert_close(flash, ours, atol=1e-5, rtol=0)
            for c in caches if step is steps[0] else ():
                c.copy(2, 1, 40)
    assert type(cache.slot_cache(model, 4, 300)) is cache.SlotCache  # a CPU
