"""Every method and every ablation as a whole run: a random model in an environment of one reply."""

import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from types import ModuleType

import pytest
import torch
from conftest import Toy, events, make_tokenizer
from safetensors.torch import load_file
from test_changing import ROOT, blocks, changes

from lab import loop as coevolve
from lab import play_env as envs
from lab import tokens as dpo
from lab.baselines import ppo, rft
from lab.harness.files import read_jsonl
from lab.harness.settings import Settings, SettingsError
from lab.training.models import load_model
from lab.training.pairs import preference_groups

TASKS = 6


class OneReply(envs.World):
    """Pays (sum of the reply's letters modulo 5) / 4: a random reply succeeds one time in five."""

    name, max_steps, test_splits = "one", 1, ("test",)
    splits = {split: {str(i): f"{split}-{i}" for i in range(TASKS)}
              for split in ("train", "validation", "test")}
    best = 4  # of (letters modulo 5); what agents write is capped here

    def start(self, what):
        return f"say something, {what}"

    def step(self, reply):
        worth = sum(map(ord, reply)) % 5 if reply != "c" else 4  # "c" is the expert's
        return envs.Step("thanks", min(worth, self.best if reply != "c" else 4) / 4, True)

    def expert(self):
        return lambda observation: "c"


SMALL = dict(iterations=1, train_tasks=TASKS, max_tokens=400, max_new_tokens=5, slots=8, rollouts=2,
             sft_epochs=1, sft_lr=1e-4, dpo_epochs=2, dpo_batch=4, dpo_lr=1e-4, dpo_lr_later=1e-4,
             temperature=1.5)


@pytest.fixture
def run(begin):
    """run(method, **settings) -> the finished run."""
    def start(method, out="run", **changed):
        r = begin(OneReply, out, **dict(SMALL, method=method) | changed)
        coevolve.coevolve(r)
        return r

    return start


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(a, b):
    a, b = weights(a), weights(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def pairs(run, agent, i=1):
    return run.folder.read_jsonl(f"iter{i}/pairs-{agent}.jsonl")


def test_a_checkpoint_is_evaluated_as_in_the_run_that_made_it(run):
    first = run("eto", sft_lr=1e-2)
    again = run("evaluate", "again", model=str(first.folder.path / "iter1/target-agent"))
    kept = ("task", "ids", "reward", "steps", "ended")
    rows, expected = (([[row[key] for key in kept] for row in r.folder.read_jsonl(name)]) for r, name in (
        (again, "eval-0-target-test.jsonl"), (first, "eval-1-target-test.jsonl")))
    assert rows == expected and len(rows) == TASKS
    assert not [p.name for p in again.folder.path.iterdir() if p.is_dir()]


def test_sft_stops_after_its_evaluation_and_says_if_other_code_goes_on(run, monkeypatch, capsys):
    folder = run("sft").folder.path
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["sft-target"]
    assert [e["iteration"] for e in events(folder, "evaluation")] == [0]
    capsys.readouterr()
    run("sft")
    assert "by other code" not in capsys.readouterr().out
    monkeypatch.setattr("lab.harness.files.code_hash", lambda: "edited")
    run("sft")
    assert "by other code: its finished phases stay as they are" in capsys.readouterr().out


def test_join_by_hand():
    def row(task, reward, *replies, agent="target"):
        turns = [{"role": "assistant", "content": text} for text in replies]
        return dpo.Trajectory(task, agent, reward=reward, messages=[{"role": "user"}, *turns])

    experts = [row("a", 1.0, "x", "y", agent="expert"), row("b", 1.0, "x", agent="expert")]
    new, dropped = row("a", 1.0, "x"), Counter()
    found = rft.join(experts, {
        "a": [row("a", 0.9, "z"), row("a", 1.0, "x", "Thought: I know it.\nAction: y"), new,
              row("a", 1.0, "Thought: why not?\nAction:  x")],
        "b": [row("b", 1.0, "x")]}, dropped)
    assert found == [*experts, new]
    assert dropped == {"failure": 1, "known already": 3}


def test_rft_adds_each_success_once(run):
    r = run("rft", samples=6)
    sampled = r.folder.read_jsonl("iter1/target.jsonl")
    assert Counter(e["task"] for e in sampled) == {f"one-train-{i}": 6 for i in range(TASKS)}
    new = {(e["task"], e["messages"][1]["content"]) for e in sampled if e["reward"] == 1}
    new -= {(f"one-train-{i}", "c") for i in range(TASKS)}
    joined = r.folder.read_jsonl("iter1/experts.jsonl")
    assert new and len(joined) == TASKS + len(new)
    assert {(e["task"], e["messages"][1]["content"]) for e in joined[TASKS:]} == new
    assert [e["iteration"] for e in events(r, "evaluation")] == [0, 1]


def test_rft_starts_from_the_base_again(run, monkeypatch):
    """Where no sample succeeds, the second SFT is the first one (one batch: order is nothing)."""
    monkeypatch.setattr(OneReply, "best", 3)
    r = run("rft")
    a, b = weights(r.folder.path / "sft-target"), weights(r.folder.path / "iter1/target-agent")
    assert all(torch.allclose(a[name], b[name], atol=1e-7) for name in a)


@pytest.mark.parametrize("successes, extra", [(0, 10), (1, 8), (4, 2), (5, 0)])
def test_dart_gives_what_the_paper_gives(successes, extra):
    assert rft.dart_rollouts(successes, n=5, budget=10) == extra
    assert rft.dart_rollouts(0, n=0, budget=10) == 10  # no episode was finished


def test_dart_samples_more_where_the_first_samples_failed(run):
    r = run("dart", samples=4, dart_budget=8)
    first, more = (r.folder.read_jsonl(f"iter1/{name}.jsonl") for name in ("target", "target-more"))
    failures, extra = Counter(), Counter(e["task"] for e in more)
    for e in first:
        failures[e["task"]] += e["reward"] < 1
    assert len(set(failures.values())) > 1  # or the test would say little
    assert all(extra[task] == 2 * n for task, n in failures.items())
    assert min(e["rollout"] for e in more) == 4
    assert len({(e["task"], e["seed"]) for e in first + more}) == len(first + more)
    new = {(e["task"], e["messages"][1]["content"]) for e in first + more if e["reward"] == 1}
    new -= {(f"one-train-{i}", "c") for i in range(TASKS)}
    joined = r.folder.read_jsonl("iter1/experts.jsonl")[TASKS:]
    assert {(e["task"], e["messages"][1]["content"]) for e in joined} == new
    assert len(joined) == len(new) == events(r, "joined")[0]["successes"]
    assert any(e["rollout"] >= 4 for e in joined)  # of the second sampling


def test_ppo_starts_at_the_sft_policy_and_moves(run):
    r = run("ppo", iterations=2, ppo_rollouts=4, ppo_lr=1e-2)
    kl = [e["kl"] for e in events(r, "ppo")]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[1] > 0.01
    assert [e["episodes"] for e in events(r, "ppo")] == [4 * TASKS] * 2
    # The first step's ratios are 1 and its divergences 0: its loss is - sum of A over tokens.
    rows, total, tokens = r.folder.read_jsonl("iter1/target.jsonl"), 0.0, 0
    for e in rows:
        others = [o["reward"] for o in rows if o["task"] == e["task"] and o is not e]
        total += sum(e["action_mask"]) * (e["reward"] - sum(others) / 3)
        tokens += sum(e["action_mask"])
    loss = events(r, "train", phase="iter1/target-agent")[0]["loss"]
    assert loss == pytest.approx(-total / tokens, abs=1e-6)
    assert [e["iteration"] for e in events(r, "evaluation")] == [0, 1, 2]


def test_the_positive_agent_learns_like_eto_and_the_target_as_beside_a_failure_agent(run):
    r = run("positive")
    assert {p["kind"] for p in pairs(r, "positive")} == {"expert>positive"}
    assert {p["kind"] for p in pairs(r, "target")} == {"expert>target", "expert>positive",
                                                      "failure>failure"}
    assert all(p["sft_weight"] > 0 for p in pairs(r, "positive"))
    assert not list(r.folder.path.rglob("*failure*"))
    assert not equal(r.folder.path / "sft-positive", r.folder.path / "iter1/positive-agent")


def test_a_frozen_failure_agent_stays_as_it_is(run):
    r = run("coevolve", d_fail="none", iterations=2)
    assert equal(r.folder.path / "sft-failure", r.folder.path / "iter2/failure-agent")
    assert not equal(r.folder.path / "sft-target", r.folder.path / "iter2/target-agent")
    assert "failure>failure" in {p["kind"] for p in pairs(r, "target", 2)}


@pytest.mark.parametrize("batch, equal_agents", [(TASKS, True), (TASKS // 2, False)])
def test_two_agents_whose_experts_fit_one_batch_are_said_to_be_equal(run, batch, equal_agents):
    """Their seeds shuffle batches, and there is one: they differ by the order of sums alone."""
    r = run("coevolve", sft_batch=batch, sft_epochs=2)
    found = [weights(r.folder.path / f"sft-{agent}") for agent in ("target", "failure")]
    apart = max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])
    assert (apart < 1e-6) == equal_agents
    assert [e["experts"] for e in events(r, "equal agents")] == [TASKS] * equal_agents


def test_a_failure_agent_of_another_run(run, small_model, tmp_path):
    first = run("coevolve", out="first", iterations=2, seed=1, env="intercodesql")  # and elsewhere
    r = run("coevolve", failure_from=str(first.folder.path))
    assert equal(first.folder.path / "iter2/failure-agent", r.folder.path / "sft-failure")
    assert not equal(r.folder.path / "sft-failure", r.folder.path / "iter1/failure-agent")
    with pytest.raises(SettingsError, match="no iter<i>/failure-agent"):
        run("coevolve", out="second", failure_from=str(small_model))
    other = make_tokenizer("chatml pad=eos")
    other.save_pretrained(first.folder.path / "iter2/failure-agent")
    with pytest.raises(SettingsError, match="its tokenizer is not that of --model"):
        run("coevolve", out="third", failure_from=str(first.folder.path))
    assert not (r.folder.path.parent / "third/sft-target").exists()  # said before anything is trained


def test_the_failure_agent_explores_again_before_d_tgt(run):
    r = run("coevolve", explore_again=True, iterations=2, d_fail="buffer")
    done = [name for name in r.folder.phases if name.startswith("iter1")]
    order = ["iter1/pairs-failure.jsonl", "iter1/failure-agent", "iter1/failure-more.jsonl",
             "iter1/pairs-target.jsonl", "iter1/target-agent"]
    assert [name for name in done if name in order] == order
    rollouts = defaultdict(set)
    for agent in ("target", "failure"):
        for p in pairs(r, agent):
            for side in (p["chosen"], p["rejected"]):
                rollouts[agent, side["agent"]].add(side["rollout"])
    assert rollouts["target", "failure"] <= {2, 3} and rollouts["failure", "failure"] <= {0, 1}
    assert rollouts["target", "target"] <= {0, 1}
    assert {p["chosen"]["iteration"] for p in pairs(r, "failure", 2)} == {1, 2}  # the buffer


def test_steps_and_passes_are_settings_and_the_learning_rate_may_fall_along_a_cosine(run):
    r = run("coevolve", dpo_schedule="cosine", dpo_warmup=0.0, dpo_steps=11, failure_epochs=3)
    lr = [e["lr"] for e in events(r, "train", phase="iter1/target-agent")]
    assert lr == pytest.approx([1e-4 * (1 + math.cos(math.pi * k / 11)) / 2 for k in range(11)])
    epochs = [e["epoch"] for e in events(r, "train", phase="iter1/failure-agent")]
    assert set(epochs) == {1, 2, 3} and len(epochs) != 11


def test_an_epoch_is_gone_through_before_the_next():
    groups = [dpo.Group(str(i), [], [dpo.Pair("kind", 0, 1)]) for i in range(5)]
    s = Settings(dpo_batch=2)
    epochs = lambda steps: [[[g.task for g in b] for b in epoch] for epoch in
                            coevolve.preference_epochs(groups, s, random.Random(0), 2,
                                                       steps)]
    assert [len(e) for e in epochs(0)] == [3, 3] and [len(e) for e in epochs(7)] == [3, 3, 1]
    assert all(sorted(sum(e, [])) == list("01234") for e in epochs(7)[:2])


def test_beta_learning_rate_and_weights_reach_the_loss_in_each_iteration(run, monkeypatch):
    seen = []
    loss = dpo.preference_loss

    def recorded(model, groups, **settings):
        if not seen or seen[-1] != settings:
            seen.append(settings)
        return loss(model, groups, **settings)

    monkeypatch.setattr(dpo, "preference_loss", recorded)
    r = run("coevolve", iterations=2, beta=0.1, beta_later=0.5, dpo_lr=3e-5, dpo_lr_later=1e-5,
            lambda_dpo=0.7, lambda_sft=0.3, log_prob="mean", sft_term="mean", dpo_warmup=0.0)
    common = dict(lambda_sft=0.3, log_prob="mean", sft_term="mean")
    assert seen == [dict(beta=beta, lambda_dpo=weight, **common)
                    for beta in (0.1, 0.5) for weight in (1.0, 0.7)]  # the failure agent's is 1
    for i, lr in ((1, 3e-5), (2, 1e-5)):
        assert {e["lr"] for e in events(r, "train", phase=f"iter{i}/target-agent")} == {lr}


def test_ppos_settings_reach_its_objective_and_its_batches(run, monkeypatch):
    seen, loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *a, **k: seen.append(k) or loss(*a, **k))
    r = run("ppo", ppo_clip=0.3, ppo_kl=0.01, ppo_epochs=3, ppo_batch=2)
    suppressed = tuple(r.trainer.encoder().pieces.suppress_tokens)  # no rows pad the embedding
    assert suppressed and seen and all(
        k == dict(sampler=dpo.Sampler(1.5, suppressed), clip=0.3, kl=0.01) for k in seen)
    steps = events(r, "train", phase="iter1/target-agent")
    assert {e["epoch"] for e in steps} == {1, 2, 3} and len(steps) == 3 * math.ceil(TASKS / 2)


def test_ppo_without_two_rollouts_to_compare_leaves_the_agent_as_it_is(run, capsys):
    sft = run("sft")
    length = max(len(e["ids"]) for e in sft.folder.read_jsonl("experts.jsonl"))
    r = run("ppo", out="ppo", max_tokens=length, max_new_tokens=3)  # all fill the context
    assert {e["ended"] for e in r.folder.read_jsonl("iter1/target.jsonl")} == {"context"}
    assert "no two rollouts" in capsys.readouterr().out
    assert equal(r.folder.path / "sft-target", r.folder.path / "iter1/target-agent")


@pytest.mark.parametrize("changed, divisor, instructions", [
    ({}, "count_pairs", False), (dict(normalise="weights"), "sum_weights", False),
    (dict(batch_unit="instructions", dpo_batch=2), "count_pairs", True)])
def test_what_a_batch_counts_and_is_divided_by(run, monkeypatch, changed, divisor, instructions):
    seen, fit = [], dpo.fit
    monkeypatch.setattr(dpo, "fit", lambda a, m, epochs, objective, *more: seen.append(
        (epochs, objective.divisor)) or fit(a, m, epochs, objective, *more))
    run("coevolve", **changed)
    epochs, normaliser = seen[-1]  # the target's
    batch = max((b for epoch in epochs for b in epoch), key=len)
    expected = dict(count_pairs=sum(len(g.pairs) for g in batch),
                    sum_weights=sum(p.weight for g in batch for p in g.pairs))[divisor]
    assert normaliser(batch) == pytest.approx(expected)
    sizes = [len(b) for b in epochs[0][:-1]]
    assert sizes == [2] * len(sizes) if instructions else any(
        sum(len(g.pairs) for g in b) >= 4 > len(b) for b in epochs[0][:-1])


@pytest.fixture
def three_turns(monkeypatch):
    """The expert takes one turn, the agents all three."""
    def step(self, reply):
        self.turns = getattr(self, "turns", 0) + 1
        return envs.Step("go on", float(reply == "c"), reply == "c" or self.turns % 3 == 0)

    monkeypatch.setattr(OneReply, "max_steps", 3)
    monkeypatch.setattr(OneReply, "step", step)


@pytest.mark.parametrize("turns, kept", [(-1, 3), (0, 1), (1, 2)])
def test_a_rejected_trajectory_ends_so_many_turns_after_the_experts(run, three_turns, turns, kept):
    r = run("eto", cut_turns=turns, rollouts=1, slots=1)
    groups = preference_groups(r, "target", 1)
    turns_of = lambda mask: sum(b > a for a, b in zip([0, *mask], mask))
    rejected = [turns_of(g.sequences[p.rejected].action_mask) for g in groups for p in g.pairs]
    assert rejected and max(rejected) == kept
    assert {turns_of(g.sequences[p.chosen].action_mask) for g in groups for p in g.pairs} == {1}


def test_the_ends_of_rejected_trajectories_count_or_not(run, three_turns):
    """The ends of two turns of one reply each and the third reply are left out."""
    for cut in (5, 1):  # two turns are left of it: neither ended the episode
        whole, left = (preference_groups(run("eto", f"{cut}{ends}", rejected_ends=ends,
                                                      cut_turns=cut, rollouts=1), "target", 1)
                       for ends in ("count", "leave out"))
        compared = 0
        for a, b in zip(whole, left, strict=True):
            for p, q in zip(a.pairs, b.pairs, strict=True):
                assert a.sequences[p.chosen] == b.sequences[q.chosen]
                mine, full = b.sequences[q.rejected], a.sequences[p.rejected]
                replies = [[*group] for acts, group in itertools.groupby(
                    range(len(full.ids)), key=lambda k: full.action_mask[k]) if acts]
                kept = {k for reply in replies[:2] for k in reply[:-1]}
                assert len(replies) == min(cut + 1, 3) and mine.ids == full.ids
                if kept:
                    assert {k for k, acts in enumerate(mine.action_mask) if acts} == kept
                    compared += 1
        assert compared


@pytest.mark.parametrize("too_long, pairs_made", [("drop", False), ("cut", True)])
def test_trajectories_that_filled_the_context_make_pairs_or_not(run, monkeypatch, capsys, too_long,
                                                                pairs_made):
    """After one whole turn there is no room for a second. A phase of which most end so says it."""
    monkeypatch.setattr(OneReply, "max_steps", 9)
    monkeypatch.setattr(OneReply, "step", lambda self, reply: envs.Step(
        "thanks " * (reply != "c") * 30, float(reply == "c"), reply == "c"))
    r = run("eto", too_long=too_long, max_tokens=100, rollouts=1)
    ended = Counter(e["ended"] for e in r.folder.read_jsonl("iter1/target.jsonl"))
    assert ended["context"] > 0 and bool(pairs(r, "target")) == pairs_made
    dropped = events(r, "pairs", trains="target")[0]["dropped"]
    assert dropped.get("too long", 0) == (0 if pairs_made else ended["context"])
    for e in events(r, "phase"):  # a phase of which most end so says it
        if "episodes" in e and e["phase"] != "experts.jsonl":
            full = [t["ended"] for t in r.folder.read_jsonl(e["phase"])].count("context")
            assert [found["episodes"] for found in events(r, "full", phase=e["phase"])] == (
                [full] if full > e["episodes"] / 2 else [])
    printed = capsys.readouterr().out
    assert "episodes filled --max-tokens 100" in printed


@pytest.mark.parametrize("reference, zero", [("phase", True), ("sft", False)])
def test_the_reference_is_the_agent_entering_the_phase_or_the_sft_agent(run, reference, zero):
    r = run("eto", iterations=2, reference=reference)
    first = events(r, "train", phase="iter2/target-agent", step=1)[0]["kinds"]["expert>target"]
    assert (abs(first["margin"]) < 1e-5) == zero


def test_the_forking_guides_changes_apply_and_change_a_run(run, monkeypatch):
    ablations = list(changes(blocks("docs/changing.md")[0]))
    assert len(ablations) == 5

    def written(r):
        return list(r.folder.phases), {path.relative_to(r.folder.path): path.read_bytes()
                                for path in r.folder.path.rglob("*.*") if path.name != "metrics.jsonl"
                                and path.suffix in (".jsonl", ".safetensors")}

    before = written(run("coevolve", out="as it is"))
    for n, (name, old, new) in enumerate(ablations):
        source = (ROOT / name).read_text()
        assert source.count(old) == 1, old
        changed = ModuleType("changed")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "changed", changed)
            exec(compile(source.replace(old, new), name, "exec"), changed.__dict__)
            if name == "lab/tokens.py":
                patch.setattr(dpo, "dpo_loss", changed.dpo_loss)
            else:
                patch.setattr(coevolve, "coevolve", changed.coevolve)
            assert written(run("coevolve", out=f"change {n}")) != before, new


class Uneven(Toy):
    """Rewards by how long the replies are, so that many failures differ."""

    def reward(self):
        return 1.0 if self.replies == ["the word"] * 2 else len("".join(self.replies)) % 9 / 10


def log_probs(run, folder, sides):
    model = load_model(run / folder).eval()
    with torch.no_grad():
        return dpo.action_log_probs(model, sides).tolist()


@pytest.mark.parametrize("flags, last", [
    (["--log-prob", "mean"], "iter1/{}-agent"),
    (["--reference", "sft", "--iterations", 2, "--beta-later", 0.3], "iter2/{}-agent")])
def test_margins_are_those_of_the_checkpoints(toy_run, flags, last):
    run = toy_run(Uneven, "--cut-turns", -1, *flags)
    logged = {(e["phase"], e["when"]): e["pairs"] for e in read_jsonl(run / "metrics.jsonl")
              if e["event"] == "margins"}
    i, seen = int(last[4]), 0
    beta = 0.3 if i == 2 else 0.1
    for agent in ("target", "failure"):
        by_task = {}
        for pair in read_jsonl(run / f"iter{i}/pairs-{agent}.jsonl"):
            by_task.setdefault(pair["task"], []).append(pair)
        for task, pairs in by_task.items():
            before, after = (logged[last.format(agent), when][task] for when in ("before", "after"))
            assert len(before) == len(after) == len(pairs)
            for pair, *moved in zip(pairs, before, after):
                sides = [next(dpo.Trajectory(**row) for row in read_jsonl(run / side["file"])
                              if (row["task"], row["rollout"]) == (task, side["rollout"]))
                         for side in (pair["chosen"], pair["rejected"])]
                entered = f"iter{i - 1}/{agent}-agent" if i > 1 else f"sft-{agent}"
                reference = log_probs(run, f"sft-{agent}", sides)
                for folder, found in zip((entered, last.format(agent)), moved):
                    policy = log_probs(run, folder, sides)
                    assert found[:2] == pytest.approx(policy, abs=2e-3)
                    length = [s.action_tokens if "mean" in flags else 1 for s in sides]
                    chosen, rejected = ((p - r) / n for p, r, n in zip(policy, reference, length))
                    assert found[2] == pytest.approx(beta * (chosen - rejected), abs=3e-4)
                seen += 1
    assert seen > 4
