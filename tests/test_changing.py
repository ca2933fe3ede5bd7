"""Each change of docs/changing.md applies to a copy of the program, and does what the page says."""

import importlib
import math
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import plain_log_probs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.files import read_json, write_jsonl
from common.files import read_jsonl as rows

ROOT = Path(__file__).parents[1]
FILES, FOLDERS = ("coevolve", "dpo", "envs", "evolve"), ("common", "worlds")
COMMON = "--env webshop --train-tasks 12 --eval-tasks 1 --eval-splits validation --sft-epochs 2 "
SMALL = COMMON + "--rollouts 2 --iterations 1 --dpo-epochs 1 --temperature 0.8 "
SAVED, LN2 = "model.safetensors", pytest.approx(math.log(2), abs=1e-6)


def changes(page):
    """title -> [(file, old text, new text)] of a page's diffs; dots go on with the title before."""
    found = {}
    for change in re.findall(r"^--- (.*?)(?=^---|^```)", (ROOT / page).read_text(), re.S | re.M):
        head, *lines = change.splitlines()
        file, title = head.split(": ")
        old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] in (" ", sign))
                    for sign in "-+")
        title = [*found][-1] if title.startswith("...") else title
        found.setdefault(title, []).append((file, old, new))
    return found


CHANGES = changes("docs/changing.md") | changes("docs/environments.md")


@contextmanager
def program(folder, *titles):
    """coevolve.py of a copy of the program with these changes, imported anew."""
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / f"{name}.py", folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=lambda *_: ["__pycache__"])
    (folder / "tiny").symlink_to(ROOT / "tiny")
    for file, old, new in (change for title in titles for change in CHANGES[title]):
        path = folder / file
        text = path.read_text() if old else ""
        assert text.count(old) == 1 or not old and not path.exists(), (file, old)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(old, new) if old else new)
        assert all(len(line) <= 100 for line in new.splitlines())

    def ours():
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in FILES + FOLDERS}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("coevolve")
    finally:
        sys.path.remove(str(folder))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def start(core, out, flags, until=None):
    """Runs the program, to the end of the phase that makes `until`; the run's folder."""
    class Enough(Exception):
        pass

    system = importlib.import_module("evolve") if "evolve" in flags else core

    class Run(system.Run):
        def record(self, output):
            super().record(output)
            if output == until:
                raise Enough

    with suppress(Enough):
        core.main([*flags.split(), "--out", str(out)], system.Settings, Run, system.METHODS)
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run of the program as it is, up to its last agent."""
    folder = tmp_path_factory.mktemp("changing")
    with program(folder / "program") as core:
        return start(core, folder / "runs/plain", SMALL, "iter1/target-agent")


def copying() -> str:
    """The page's command that copies a run's folder."""
    text = (ROOT / "docs/changing.md").read_text()
    command, = re.findall(r"^cp -r (?:.*\\\n)*.*$", text, re.M)
    return command


def test_a_copy_has_nothing_of_what_its_base_made_after_sft(tmp_path):
    stays = {"config.json", "phases.json", "experts.jsonl", "sft-target", "sft-target-step2",
             "eval-0-target-test.jsonl", "iter1/target.jsonl", "iter1/failure.jsonl"}
    goes = {"iter1/pairs-target.jsonl", "iter1/target-agent", "iter1/target-agent-step2", "iter2",
            "iter10", "eval-1-target-test.jsonl", "eval-10-target-test.jsonl", "metrics.jsonl",
            "tracking", "checkpoint", "playing", "reads", "run.html", "result.json"}
    for name in stays | goes:
        path = tmp_path / "runs/plain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix else path.mkdir()
    subprocess.run(["bash", "-c", copying()], check=True, cwd=tmp_path)
    out = tmp_path / "runs/ipo"
    assert {str(path.relative_to(out)) for path in out.rglob("*")} == stays | {"iter1"}


@pytest.fixture
def changed(plain, tmp_path):
    """changed(*titles, flags, until) -> the program, changed, and the folder of its run, which has
    begun as the page says; without: what is removed from it too."""
    with ExitStack() as stack:
        def run(*titles, flags="", until=None, without=(), small=SMALL):
            command = copying().replace("ipo", tmp_path.name)
            subprocess.run(["bash", "-c", command], check=True, cwd=plain.parents[1])
            out = plain.parent / tmp_path.name
            for file in ("config.json", *without):
                (out / file).unlink()
            core = stack.enter_context(program(tmp_path / "program", *titles))
            return core, start(core, out, small + flags, until)
        yield run


def pairs_of(name, *runs):
    return [rows(run / f"iter1/pairs-{name}.jsonl") for run in runs]


def steps(run, agent):
    return rows(run / f"iter1/{agent}-agent/train.jsonl")


def phases(run):
    return read_json(run / "phases.json")


def episodes_of(run, *names):
    """(task, agent, rollout) -> the episode, of these files of a run."""
    return {(e["task"], e["agent"], e["rollout"]): e
            for name in names for e in rows(run / f"{name}.jsonl")}


@torch.no_grad()
def nats(folder, episodes, temperature=1.0):
    """log p of each action token of each episode, by the model alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [plain_log_probs(model, e["ids"], e["action_mask"], (), temperature).double()
            for e in episodes]


def test_every_change_has_a_test_and_the_readmes_are_of_the_guide():
    assert all(f'"{title}"' in Path(__file__).read_text() for title in CHANGES)
    assert all(CHANGES[title] == parts for title, parts in changes("README.md").items())


def test_ipo(plain, changed):
    _, run = changed("IPO", flags="--lambda-dpo 0.005", until="iter1/target-agent")
    first, of_dpo = (steps(folder, "failure")[0] for folder in (run, plain))
    assert first["loss"] == pytest.approx(1 / (4 * 0.1 ** 2)) and of_dpo["loss"] == LN2
    assert first["norm"] / of_dpo["norm"] == pytest.approx(2 / 0.1 ** 2, rel=1e-4)
    # lambda_dpo is beta^2 / 2: the target, which also has an SFT term, starts with DPO's gradient.
    first, of_dpo = (steps(folder, "target")[0] for folder in (run, plain))
    assert first["norm"] == pytest.approx(of_dpo["norm"], rel=1e-4)
    assert first["loss"] < of_dpo["loss"] - 0.1


def test_simpo(changed):
    _, run = changed("SimPO", until="iter1/failure-agent", flags="--reference none --log-prob mean "
                     "--beta 2 --beta-later 2 --gamma 1 --cut-turns -1 --dpo-batch 1000")
    episodes, losses = episodes_of(run, "iter1/target", "iter1/failure"), []
    mean = dict(zip(episodes, (x.mean() for x in nats(run / "sft-failure", episodes.values()))))
    for row in pairs_of("failure", run)[0]:
        w, l = (mean[row["task"], row[side]["agent"], row[side]["rollout"]]
                for side in ("chosen", "rejected"))
        losses.append(math.log(1 + math.exp(1 - 2 * (w - l))))
    first = steps(run, "failure")[0]["loss"]
    assert first == pytest.approx(sum(losses) / len(losses), rel=1e-5) and abs(first - 0.693) > 0.1


def test_kto(changed):
    core, run = changed("KTO", flags="--method eto --dpo-batch 5 --dpo-epochs 2")
    made = steps(run, "target")
    # 12 instructions, 5 a step: 3 steps an epoch; each trajectory counts once in it.
    assert len(made) == 6 and made[0]["loss"] == pytest.approx(0.5)
    rewards = [e["reward"] for e in episodes_of(run, "experts", "iter1/target").values()
               if e["ended"] != "context"]
    counts = [sum(step["kinds"].get(kind, {}).get("count", 0) for step in made[:3])
              for kind in ("desirable", "undesirable")]
    assert counts == [sum(x > 0.7 for x in rewards), sum(x <= 0.7 for x in rewards)]
    assert min(counts) > 5

    groups = [core.Group([core.Trajectory(ids=[0, 0], action_mask=[0, 1], reward=reward)
                          for reward in (1.0, 0.2)], reference=[-2.0, -3.0])]
    policy, s = torch.tensor([-1.5, -2.9]), SimpleNamespace(beta=2.0, expert_min_reward=0.7)
    # log-ratios 0.5 and 0.1, so that z0 is 0.3: 1 - sigma(2 x 0.2) + 1 - sigma(-2 x (0.1 - 0.3))
    groups[0].z0 = core.dpo.log_ratios(policy, groups).mean()
    loss, _ = core.dpo.kto_loss(policy, groups, s)
    assert groups[0].z0.item() == pytest.approx(0.3)
    assert loss.item() == pytest.approx(2 / (1 + math.exp(0.4)))


def test_infonca(changed):
    _, run = changed("InfoNCA", flags="--method eto --dpo-batch 5 --dpo-epochs 2")
    made = steps(run, "target")
    counts = Counter(task for (task, *_), e in episodes_of(run, "experts", "iter1/target").items()
                     if e["ended"] != "context")
    # 12 tasks in 3 batches an epoch; that of a batch is the mean of ln K over its tasks.
    logs = {round(math.log(n), 4) for n in counts.values()}
    assert len(made) == 6 and min(logs) - 1e-3 <= made[0]["loss"] <= max(logs) + 1e-3
    assert len(logs) > 1 or made[0]["loss"] == pytest.approx(logs.pop(), abs=1e-3)
    assert made[-1]["loss"] < made[2]["loss"]


def test_weights_by_hardness(changed):
    _, run = changed("expert pairs weigh more, the harder their negative is",
                     flags="--method eto --pair-weights instruction",
                     until="iter1/pairs-target.jsonl")
    of_task, unequal = defaultdict(list), 0
    for row in pairs_of("target", run)[0]:
        of_task[row["task"]].append(row)
    for pairs in of_task.values():
        assert sum(row["weight"] for row in pairs) == pytest.approx(1)
        assert [row["sft_weight"] for row in pairs] == [1 / len(pairs)] * len(pairs)
        assert len({round(row["weight"] / (0.5 + row["rejected"]["reward"]), 9)
                    for row in pairs}) == 1
        unequal += len({row["weight"] for row in pairs}) > 1
    assert unequal >= 3


def test_a_filter(plain, changed):
    _, run = changed("the failure agent learns from pairs whose better failure is hard",
                     until="iter1/pairs-failure.jsonl")
    before, after = pairs_of("failure", plain, run)
    assert after == [row for row in before if row["chosen"]["reward"] >= 0.6]
    assert 5 < len(after) < len(before) - 5
    assert phases(run)["iter1/pairs-failure.jsonl"]["pairs"] == {"failure>failure": len(after)}


def test_a_reversed_failure_agent(plain, changed):
    core, run = changed("a reversed failure agent", until="iter1/failure-agent",
                        flags="--cut-turns -1 --dpo-lr 1e-4 --failure-epochs 2")
    before, after = pairs_of("failure", plain, run)
    assert after == [row | dict(chosen=row["rejected"], rejected=row["chosen"]) for row in before]
    assert all(row["chosen"]["reward"] < row["rejected"]["reward"] for row in after)
    assert steps(run, "failure")[0]["loss"] == LN2
    assert steps(run, "failure")[-1]["kinds"]["failure>failure"]["margin"] > 0.05

    episodes = [core.Trajectory(**e) for e in episodes_of(
        run, "experts", "iter1/target", "iter1/failure").values()]
    encoder = core.dpo.Encoder(AutoTokenizer.from_pretrained(ROOT / "tiny"))
    for cut_turns, ends, same in ((-1, "count", True), (-1, "leave out", False)):
        s = SimpleNamespace(cut_turns=cut_turns, rejected_ends=ends)
        tokens = [sum(g.trajectories[p.chosen].action_count + g.trajectories[p.rejected].action_count
                      for g in core.preference_groups(pairs, [], episodes, s, encoder)
                      for p in g.pairs) for pairs in (before, after)]
        assert (tokens[0] == tokens[1]) == same


def test_two_failure_agents(changed):
    _, run = changed("two failure agents", flags="--lambda-dpo 0.5",
                     until="iter1/pairs-target.jsonl")
    assert [steps(run, name)[0]["loss"] for name in ("failure", "failure2")] == [LN2, LN2]
    one, two = (load_file(run / f"sft-{name}" / SAVED) for name in ("failure", "failure2"))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    experts, expected, sums = episodes_of(run, "experts"), Counter(), Counter()
    for e in episodes_of(run, *(f"iter1/{n}" for n in ("target", "failure", "failure2"))).values():
        reward = experts[e["task"], "expert", 0]["reward"]
        if e["ended"] != "context" and e["reward"] != reward:
            better = e["reward"] > reward
            expected[f"{e['agent']}>expert" if better else f"expert>{e['agent']}"] += 1
    pairs = phases(run)["iter1/pairs-target.jsonl"]["pairs"]
    assert {kind: n for kind, n in pairs.items() if "expert" in kind} == expected
    for row in pairs_of("target", run)[0]:
        sums[row["task"]] += row["weight"] * (row["kind"] != "failure>failure")
    assert expected["expert>failure2"] > 5 and {round(x, 9) for x in sums.values()} <= {0.0, 1.0}
    assert "eval-0-failure2-validation.jsonl" in phases(run)


def test_a_higher_temperature(plain, changed):
    _, run = changed("the failure agent explores at a higher temperature",
                     until="iter1/failure.jsonl",
                     without=["iter1/target.jsonl", "iter1/failure.jsonl"])
    assert rows(plain / "iter1/target.jsonl") == rows(run / "iter1/target.jsonl")
    episodes = rows(run / "iter1/failure.jsonl")[:6]
    sampled = sum(x for e in episodes for x in e["log_probs"])
    for temperature, right in ((1.1, True), (0.8, False)):
        own = sum(x.sum().item() for x in nats(run / "sft-failure", episodes, temperature))
        # Control tokens, which are never sampled, have a little of the model's own mass.
        assert (abs(own / sampled - 1) < 0.01) == right


@pytest.mark.parametrize("titles, flags, best", [
    (["the harder half of the tasks trains"], "", False),
    (["the harder half of the tasks trains", "a curriculum, in place of the harder half"],
     "--iterations 2", True)])
def test_which_instructions_train(plain, changed, titles, flags, best):
    core, run = changed(*titles, flags=flags, until="iter1/pairs-failure.jsonl")
    experts, rewards = rows(run / "experts.jsonl"), Counter()
    episodes = episodes_of(run, "iter1/target", "iter1/failure").values()
    for e in episodes:
        rewards[e["task"]] += e["reward"] * (e["ended"] != "context")
    order = sorted((e["task"] for e in experts), key=lambda task: rewards[task])
    half = order[6:] if best else order[:6]
    before, after = ([row["task"] for row in rows_] for rows_ in pairs_of("failure", plain, run))
    assert Counter(after) == Counter(task for task in before if task in half)
    assert 5 < len(after) < len(before) - 5
    if best:  # in the last iteration all train
        played = {name: run / f"{name}-2.jsonl" for name in ("target", "failure")}
        for name, file in played.items():
            write_jsonl(file, [e | dict(iteration=2) for e in episodes if e["agent"] == name])
        last = SimpleNamespace(settings=core.Settings(iterations=2), main=True, name="",
                               env=SimpleNamespace(success=1.0))
        core.make_pairs(last, run / "last.jsonl", run / "experts.jsonl", played, [],
                        trains="failure", role="D_fail")
        assert Counter(row["task"] for row in rows(run / "last.jsonl")) == Counter(before)


def test_more_sft(tmp_path):
    with program(tmp_path / "program", "more SFT") as core:
        run = start(core, tmp_path / "run", COMMON + "--method more-sft --sft-lr 1e-3")
    experts = rows(run / "experts.jsonl")
    # Eq. (5), per action token, as the first step of each phase finds it, and after the last
    losses = [-torch.cat([*nats(folder, experts)]).mean().item()
              for folder in (ROOT / "tiny", run / "sft-target", run / "iter1/target-agent")]
    assert [phases(run)[agent]["first_loss"] for agent in ("sft-target", "iter1/target-agent")] == (
        pytest.approx(losses[:2], abs=1e-5))
    assert losses[2] < losses[1] < losses[0] - 0.1
    assert [name for name in phases(run) if "eval" in name][0] == "eval-1-target-validation.jsonl"


def test_step_level_pairs(changed):
    """A rollout begins with the expert's first replies; a pair is trained on what follows them."""
    core, run = changed("step-level pairs", until="iter1/target-agent",
                        without=("iter1/target.jsonl", "iter1/failure.jsonl"))
    experts = {e["task"]: e for e in rows(run / "experts.jsonl")}
    played = episodes_of(run, "iter1/target", "iter1/failure")
    begun = 0
    for (task, _, rollout), e in played.items():
        expert = experts[task]
        shared = min(rollout, expert["steps"] - 1)
        begun += shared
        size = 2 * shared + 1  # turns up to the one that the agent answers first
        assert len(e["prefix"]) == shared and e["messages"][:size] == expert["messages"][:size]
        assert len(e["log_probs"]) == sum(e["action_mask"])
    assert begun >= 12  # of twelve tasks' second rollouts, of two agents

    encoder = core.dpo.Encoder(AutoTokenizer.from_pretrained(ROOT / "tiny"))
    others = [core.Trajectory(**e) for e in played.values()]
    groups = core.preference_groups(rows(run / "iter1/pairs-target.jsonl"),
                                    [core.Trajectory(**e) for e in experts.values()], others,
                                    core.Settings(max_new_tokens=1, cut_turns=-1), encoder)
    compared = Counter()
    for pair, a, b in ((p, g.trajectories[p.chosen], g.trajectories[p.rejected])
                       for g in groups for p in g.pairs):
        first = [t.action_mask.index(1) for t in (a, b)]
        shared = len(b.prefix) if a.agent == "expert" else min(len(a.prefix), len(b.prefix))
        compared[pair.kind, shared] += 1
        assert first[0] == first[1] and a.ids[:first[0]] == b.ids[:first[0]]
        ends = [encoder.reply_ends(t)[:shared] for t in (a, b)]
        assert ends[0] == ends[1] and (not shared or ends[0][-1] < first[0])
        whole = (played.get((t.task, t.agent, t.rollout), experts[t.task]) for t in (a, b))
        for t, e in zip((a, b), whole):  # all that follows is trained on as before
            assert t.action_mask[first[0]:] == e["action_mask"][first[0]:]
    assert compared["expert>target", 0] and compared["expert>target", 1]
    assert steps(run, "target")


def test_self_generated_experts(changed):
    core, run = changed("self-generated experts", flags="--expert-min-reward -1",
                        until="iter1/target-agent")
    best = {}
    for e in rows(run / "iter1/target.jsonl") + rows(run / "experts.jsonl"):
        if e["task"] not in best or e["reward"] > best[e["task"]]["reward"]:
            best[e["task"]] = e
    own = {task for task, e in best.items() if e["agent"] == "target"}
    used = {e["task"]: e for e in rows(run / "iter1/experts.jsonl")}
    assert used == {task: e | dict(agent="expert") for task, e in best.items()}
    assert 0 < len(own) < len(best) and phases(run)["iter1/experts.jsonl"]["own"] == len(own)

    chosen = [(row["task"], row["chosen"]) for row in rows(run / "iter1/pairs-target.jsonl")
              if row["kind"].startswith("expert")]
    assert chosen
    for task, side in chosen:
        named = {key: used[task][key] for key in ("agent", "iteration", "rollout", "reward")}
        assert side == named
    assert steps(run, "target")[0]["loss"] > 0


@pytest.fixture
def peft(tmp_path, monkeypatch):
    """The package, in a folder of this test's."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries", "1", "--quiet"]
    target = ["--target", str(tmp_path / "packages"), "peft>=0.17,<0.22"]
    if subprocess.run([*pip, *target], timeout=300).returncode:
        pytest.skip("pip does not find peft")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_lora(peft, changed, tmp_path):
    core, run = changed("LoRA", flags="--dpo-lr 1e-2", until="iter1/failure-agent")
    assert steps(run, "failure")[0]["loss"] == LN2
    before, after = (
        load_file(run / name / SAVED) for name in ("sft-failure", "iter1/failure-agent"))
    assert before.keys() == after.keys()
    for name in before:
        sizes = torch.linalg.svdvals(torch.atleast_2d(after[name] - before[name]).double())
        if re.search("[qv]_proj", name):  # moved by a matrix of rank 8
            assert sizes[7] > 1e-4 and sizes[8] < 1e-4 * sizes[0]
        else:
            assert not sizes.any()

    # A model that trains, with adapters that do something, is the model that is saved.
    model = core.dpo.prepare(core.dpo.read_model(run / "sft-failure"), recompute=False)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in adapters) == 2 * 2 * 2 * 8 * 128  # layers; q, v; A, B
    for p in adapters:
        p.data.normal_(std=0.1)
    episode = rows(run / "iter1/target.jsonl")[0]
    live = core.dpo.token_log_probs(model, [core.Trajectory(**episode)])
    encoder = core.dpo.Encoder(AutoTokenizer.from_pretrained(ROOT / "tiny"))
    core.dpo.save(SimpleNamespace(is_main_process=True), model, encoder, tmp_path / "saved")
    (saved,), (base,) = (nats(f, [episode]) for f in (tmp_path / "saved", run / "sft-failure"))
    assert (saved - live).abs().max() < 1e-3 < 0.1 < (saved - base).abs().max()


def test_grpo_and_a_fourth_signal(changed):
    _, run = changed(
        "GRPO without the standard deviation", "GRPO without clipping", "a fourth signal",
        small=COMMON, until="iter1/explored.jsonl", flags="--method evolve --start-from train "
        "--start-tasks 12 --step-tasks 12 --step-rollouts 4 --grpo-steps 2 --evolve-every 1 "
        "--evaluate-every 2 --picks 2")
    evolve = sys.modules["evolve"]
    assert evolve.advantages([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]
    # Of a token twice as probable as when it was sampled: the loss is -2 A, not -1.28 A.
    token = torch.tensor([-1.0])
    group = evolve.Visit([evolve.Trajectory(ids=[0, 0], action_mask=[0, 1])], advantages=[0.75],
                            old=token - math.log(2), ref=token, drawn=token)
    s = SimpleNamespace(clip_low=0.2, clip_high=0.28, grpo_kl=0.1, importance_cap=0.0)
    loss, sums = evolve.grpo_loss(token, [group], s)
    assert loss.item() == pytest.approx(-1.5) and sums["action"]["clipped"] == 1

    best, signals = Counter(), rows(run / "iter1/signals.jsonl")
    for e in rows(run / "iter1/target-agent/episodes.jsonl"):
        best[e["task"]] = max(best[e["task"]], e["reward"])
    hard = {row["task"]: row["best"] for row in signals if row["signal"] == "hard"}
    assert hard == {task: x for task, x in best.items() if 0.6 <= x < 1}
    picked = Counter(row["signal"] for row in signals if row["picked"])
    assert picked["hard"] == 2 and max(picked.values()) == 2 and len(picked) > 1
    explored = Counter(e["signal"] for e in rows(run / "iter1/explored.jsonl"))
    assert explored == {signal: 6 * n for signal, n in picked.items()}


def test_an_environment_of_ones_own(tmp_path, capsys):
    with program(tmp_path / "program", "an environment") as core:
        run = start(core, tmp_path / "run", "--env echo --words 3 --rollouts 2 --iterations 1 "
                    "--train-tasks 12 --eval-tasks 12 --sft-epochs 4")
    solved = Counter()
    for name, phase in phases(run).items():
        if phase["work"] in ("explore", "evaluate"):
            for e in rows(run / name):
                (_, *asked), said = (m["content"].split() for m in e["messages"])
                right = sum(a == b for a, b in zip(asked, said))
                assert len(asked) == 3 and e["reward"] == pytest.approx(right / 3)
                solved[name, right] += 1
            assert phase["success"] == (solved[name, 2] + solved[name, 3]) / phase["episodes"]
    assert any(right == 2 for _, right in solved)  # success, from 0.6 on, without all of it
    # Where all failures of an instruction are alike, the failure agent has nothing to learn from.
    assert ".jsonl: no pairs, since {'not both failures': " in capsys.readouterr().out
