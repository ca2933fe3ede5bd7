"""Each change of docs/changing.md applies to a copy of the program, and does what the page says."""

import importlib
import json
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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT, CORE = Path(__file__).parents[1], ("coevolve", "dpo", "envs", "evolve", "worlds")
COMMON = "--env webshop --train-tasks 12 --eval-tasks 1 --sft-epochs 2".split()
SMALL = [*COMMON, *"--rollouts 2 --iterations 1 --dpo-epochs 1 --temperature 0.8".split()]
LN2 = pytest.approx(math.log(2), abs=1e-6)


def changes(page):
    """title -> [(file, old text, new text)] of a page's diffs; dots go on with the title before."""
    found = {}
    for block in re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.S):
        for change in block.split("--- ")[1:]:
            head, *lines = change.splitlines()
            file, title = head.split(": ")
            old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] in (" ", sign))
                        for sign in "-+")
            title = [*found][-1] if title.startswith("...") else title
            found.setdefault(title, []).append((file, old, new))
    return found


CHANGES = changes("docs/changing.md")


@contextmanager
def program(folder, *titles):
    """coevolve.py of a copy of the program with these changes, imported anew."""
    folder.mkdir()
    for name in "coevolve", "dpo", "envs", "evolve":
        if (ROOT / f"{name}.py").exists():
            shutil.copy(ROOT / f"{name}.py", folder)
    shutil.copytree(ROOT / "worlds", folder / "worlds", ignore=lambda *_: ["__pycache__"])
    (folder / "tiny").symlink_to(ROOT / "tiny")
    for file, old, new in (change for title in titles for change in CHANGES[title]):
        path = folder / file
        text = path.read_text() if old else ""
        assert text.count(old) == 1 or not old and not path.exists(), (file, old)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(old, new) if old else new)
        assert max(map(len, new.splitlines())) <= 100

    def ours():
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in CORE}

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


class Enough(Exception):
    pass


def start(core, out, flags, until=None):
    """Runs the program, to the end of the phase that makes `until`; the run's folder."""
    class Run(core.Run):
        def record(self, output):
            super().record(output)
            if output == until:
                raise Enough

    with suppress(Enough):
        core.main([*flags, "--out", str(out)], run=Run)
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run of the program as it is."""
    folder = tmp_path_factory.mktemp("changing")
    with program(folder / "program") as core:
        return start(core, folder / "runs/plain", SMALL)


@pytest.fixture
def changed(plain, tmp_path):
    """changed(titles, flags, until) -> the program, changed, and the folder of its run, which has
    begun as the page says; without: the names of what is removed from it too."""
    with ExitStack() as stack:
        def run(*titles, flags=(), until=None, without=()):
            command, = re.findall(r"^cp -r .*$", (ROOT / "docs/changing.md").read_text(), re.M)
            command = command.replace("ipo", tmp_path.name)
            subprocess.run(["bash", "-c", command], check=True, cwd=plain.parents[1])
            out = plain.parent / tmp_path.name
            for file in ("config.json", *without):
                (out / file).unlink()
            core = stack.enter_context(program(tmp_path / "program", *titles))
            return core, start(core, out, [*SMALL, *flags], until)
        yield run


def rows(file):
    return [json.loads(line) for line in file.open()]


def steps(run, agent):
    return rows(run / f"iter1/{agent}-agent/train.jsonl")


def phases(run):
    return json.loads((run / "phases.json").read_text())


def nats(folder, episodes, temperature=1.0):
    """log p of each action token of each episode, by the model alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for e in episodes:
            ids, acts = torch.tensor(e["ids"]), torch.tensor(e["action_mask"][1:]).bool()
            log_p = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            yield log_p.gather(1, ids[1:, None])[acts, 0].double()


def found(run, *names):
    """(task, agent, rollout) -> the episode, of these files of a run."""
    return {(e["task"], e["agent"], e["rollout"]): e for n in names for e in rows(run / n)}


def test_every_change_has_a_test_and_the_readmes_are_of_the_guide():
    text = Path(__file__).read_text()
    assert all(f'"{title}"' in text for title in CHANGES)
    assert all(CHANGES[title] == parts for title, parts in changes("README.md").items())


# -------------------------------------------------------------------------------------- losses


def test_ipo(plain, changed):
    _, run = changed("IPO", flags=["--lambda-dpo", "0.005"])
    first, of_dpo = (steps(folder, "failure")[0] for folder in (run, plain))
    assert first["loss"] == pytest.approx(1 / (4 * 0.1 ** 2)) and of_dpo["loss"] == LN2
    assert first["norm"] / of_dpo["norm"] == pytest.approx(2 / 0.1 ** 2, rel=1e-4)
    # lambda_dpo is beta^2 / 2: the target, which also has an SFT term, starts with DPO's gradient.
    first, of_dpo = (steps(folder, "target")[0] for folder in (run, plain))
    assert first["norm"] == pytest.approx(of_dpo["norm"], rel=1e-4)
    assert first["loss"] < of_dpo["loss"] - 0.1


def test_simpo(changed):
    flags = "--reference none --log-prob mean --beta 2 --beta-later 2 --gamma 1 --cut-turns -1"
    core, run = changed("SimPO", flags=[*flags.split(), "--dpo-batch", "1000"],
                        until="iter1/failure-agent")
    group = core.Group([core.Trajectory(ids=[0] * (n + 1), action_mask=[0] + [1] * n)
                        for n in (3, 2)], [core.Pair("kind", 0, 1, weight=0.5)])
    s = SimpleNamespace(beta=2.0, gamma=1.0, lambda_dpo=1.0, lambda_sft=1.0, log_prob="mean",
                        sft_term="sum")
    loss, _ = core.dpo.preference_loss(torch.tensor([-1.0, -2.0, -3.0, -4.0, -2.0]), [group], s)
    # means -2 and -3, so that the margin is 2 (-2 + 3) = 2, and 2 - gamma = 1
    assert loss.item() == pytest.approx(0.5 * math.log(1 + math.exp(-1)))

    episodes = found(run, "iter1/target.jsonl", "iter1/failure.jsonl")
    mean = dict(zip(episodes, (x.mean() for x in nats(run / "sft-failure", episodes.values()))))
    losses = []
    for row in rows(run / "iter1/pairs-failure.jsonl"):
        w, l = (mean[row["task"], row[side]["agent"], row[side]["rollout"]]
                for side in ("chosen", "rejected"))
        losses.append(torch.log1p(torch.exp(1 - 2 * (w - l))).item())
    first, = steps(run, "failure")
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert abs(first["loss"] - math.log(2)) > 0.1


def test_kto(changed):
    core, run = changed("KTO", flags="--method eto --dpo-batch 5 --dpo-epochs 2".split())
    made = steps(run, "target")
    # 12 instructions, 5 a step: 3 steps an epoch; each trajectory counts once in it.
    assert len(made) == 6 and made[0]["loss"] == pytest.approx(0.5)
    episodes = found(run, "experts.jsonl", "iter1/target.jsonl").values()
    episodes = [e for e in episodes if e["ended"] != "context"]
    counts = [sum(step["kinds"].get(kind, {}).get("count", 0) for step in made[:3])
              for kind in ("desirable", "undesirable")]
    desirable = sum(e["reward"] > 0.7 for e in episodes)
    assert counts == [desirable, len(episodes) - desirable] and min(counts) > 5

    groups = [core.Group([core.Trajectory(ids=[0, 0], action_mask=[0, 1], reward=reward)
                          for reward in (1.0, 0.2)], reference=[-2.0, -3.0])]
    policy, s = torch.tensor([-1.5, -2.9]), SimpleNamespace(beta=2.0, expert_min_reward=0.7)
    # log-ratios 0.5 and 0.1, so that z0 is 0.3: 1 - sigma(2 x 0.2) + 1 - sigma(-2 x (0.1 - 0.3))
    z0 = core.dpo.reference_point(groups, lambda sequences: policy)
    assert z0.item() == pytest.approx(0.3)
    loss, _ = core.dpo.kto_loss(policy, groups, z0, s)
    assert loss.item() == pytest.approx(2 / (1 + math.exp(0.4)))
    # A policy that left both behind has no negative reference point.
    assert core.dpo.reference_point(groups, lambda sequences: policy - 9) == 0


# ------------------------------------------------------------------- pairs, agents, their order


def test_weights_by_hardness(changed):
    title = "expert pairs weigh more, the harder their negative is"
    _, run = changed(title, flags=["--method", "eto"], until="iter1/pairs-target.jsonl")
    of_task = defaultdict(list)
    for row in rows(run / "iter1/pairs-target.jsonl"):
        of_task[row["task"]].append(row)
    unequal = 0
    for pairs in of_task.values():
        assert sum(row["weight"] for row in pairs) == pytest.approx(1)
        assert [row["sft_weight"] for row in pairs] == [1 / len(pairs)] * len(pairs)
        shares = {round(row["weight"] / (0.5 + row["rejected"]["reward"]), 9) for row in pairs}
        assert len(shares) == 1
        unequal += len({row["weight"] for row in pairs}) > 1
    assert unequal >= 3


def test_a_filter(plain, changed):
    title = "the failure agent learns from pairs whose better failure is hard"
    _, run = changed(title, until="iter1/pairs-failure.jsonl")
    before, after = (rows(folder / "iter1/pairs-failure.jsonl") for folder in (plain, run))
    assert after == [row for row in before if row["chosen"]["reward"] >= 0.6]
    assert 5 < len(after) < len(before) - 5
    assert phases(run)["iter1/pairs-failure.jsonl"]["pairs"] == {"failure>failure": len(after)}


def test_a_reversed_failure_agent(plain, changed):
    core, run = changed("a reversed failure agent", until="iter1/failure-agent",
                        flags="--cut-turns -1 --dpo-lr 1e-4 --failure-epochs 2".split())
    before, after = (rows(folder / "iter1/pairs-failure.jsonl") for folder in (plain, run))
    assert after == [row | dict(chosen=row["rejected"], rejected=row["chosen"]) for row in before]
    assert all(row["chosen"]["reward"] < row["rejected"]["reward"] for row in after)
    assert steps(run, "failure")[0]["loss"] == LN2
    assert steps(run, "failure")[-1]["kinds"]["failure>failure"]["margin"] > 0.05

    def tokens(pairs, **how):
        """Those of all pairs' chosen and rejected trajectories."""
        s = SimpleNamespace(**dict(rejected_ends="count", cut_turns=-1) | how)
        episodes = [core.Trajectory(**e) for name in ("experts", "iter1/target", "iter1/failure")
                    for e in rows(run / f"{name}.jsonl")]
        return sum(group.sequences[k].action_tokens for group in core.preference_groups(
            pairs, episodes, s) for p in group.pairs for k in (p.chosen, p.rejected))

    assert tokens(before) == tokens(after)
    assert tokens(before, cut_turns=0) != tokens(after, cut_turns=0)
    assert tokens(before, rejected_ends="leave out") != tokens(after, rejected_ends="leave out")


def test_two_failure_agents(changed):
    _, run = changed("two failure agents", flags=["--lambda-dpo", "0.5"])
    assert [steps(run, name)[0]["loss"] for name in ("failure", "failure2")] == [LN2, LN2]
    one, two = (load_file(run / f"sft-{n}/model.safetensors") for n in ("failure", "failure2"))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    experts = found(run, "experts.jsonl")
    pairs, expected = phases(run)["iter1/pairs-target.jsonl"]["pairs"], Counter()
    for name in "target", "failure", "failure2":
        for e in rows(run / f"iter1/{name}.jsonl"):
            expected[f"expert>{name}"] += (
                e["ended"] != "context" and e["reward"] != experts[e["task"], "expert", 0]["reward"])
    assert {kind: n for kind, n in pairs.items() if kind.startswith("expert")} == expected
    assert expected["expert>failure2"] > 5
    weights = Counter()
    for row in rows(run / "iter1/pairs-target.jsonl"):
        weights[row["task"]] += row["weight"] * (row["kind"] != "failure>failure")
    assert {round(weight, 9) for weight in weights.values()} <= {0.0, 1.0}
    assert "eval-1-failure2-test.jsonl" in phases(run)


def test_a_higher_temperature(plain, changed):
    title = "the failure agent explores at a higher temperature"
    _, run = changed(title, until="iter1/failure.jsonl",
                     without=["iter1/target.jsonl", "iter1/failure.jsonl"])
    files = [plain / "iter1/target.jsonl", run / "iter1/target.jsonl"]
    assert files[0].read_bytes() == files[1].read_bytes()
    episodes = [e for e in rows(run / "iter1/failure.jsonl")][:6]
    for temperature, right in ((1.1, True), (0.8, False)):
        own = torch.cat([*nats(run / "sft-failure", episodes, temperature)])
        sampled = torch.tensor([x for e in episodes for x in e["log_probs"]]).double()
        # Control tokens, which are never sampled, have a little of the model's own mass.
        assert ((own.sum() - sampled.sum()).abs() < 0.01 * own.sum().abs()) == right


def test_the_target_first(plain, changed):
    _, run = changed("the target trains first")
    for folder, first in ((plain, "failure"), (run, "target")):
        agents = [name for name in phases(folder) if name.endswith("-agent")]
        assert agents[0] == f"iter1/{first}-agent" and len(agents) == 2
    for name in agents:
        assert steps(plain, name[6:-6]) == steps(run, name[6:-6])
        one, other = (load_file(folder / name / "model.safetensors") for folder in (plain, run))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_exploring_again(changed):
    _, run = changed("the failure agent explores again before the target trains",
                     flags=["--dpo-lr", "1e-3"], until="iter1/pairs-target.jsonl")
    first, again = (found(run, f"iter1/{n}.jsonl") for n in ("failure", "failure-again"))
    assert sum(first[key]["ids"] != again[key]["ids"] for key in first) > 6
    of_pairs = {(row["task"], row[side]["agent"], row[side]["rollout"]): row[side]["reward"]
                for row in rows(run / "iter1/pairs-target.jsonl")
                for side in ("chosen", "rejected") if row[side]["agent"] == "failure"}
    assert all(again[key]["reward"] == reward for key, reward in of_pairs.items())
    assert any(first[key]["reward"] != reward for key, reward in of_pairs.items())


@pytest.mark.parametrize("titles, flags, best", [
    (["the harder half of the instructions trains"], [], False),
    (["the harder half of the instructions trains", "a curriculum, in place of the harder half"],
     ["--iterations", "2"], True)])
def test_which_instructions_train(plain, changed, titles, flags, best):
    core, run = changed(*titles, flags=flags, until="iter1/pairs-failure.jsonl")
    experts, rewards = rows(run / "experts.jsonl"), Counter()
    episodes = found(run, "iter1/target.jsonl", "iter1/failure.jsonl").values()
    for e in episodes:
        rewards[e["task"]] += e["reward"] * (e["ended"] != "context")
    order = sorted((e["task"] for e in experts), key=lambda task: rewards[task])
    half = {*order[6:]} if best else {*order[:6]}
    before, after = ([row["task"] for row in rows(folder / "iter1/pairs-failure.jsonl")]
                     for folder in (plain, run))
    assert Counter(after) == Counter(task for task in before if task in half)
    assert 5 < len(after) < len(before) - 5
    if best:  # in the last iteration all train
        experts = [core.Trajectory(**e) for e in experts]
        played = {"target": core.by_task([core.Trajectory(**e | dict(iteration=2))
                                          for e in episodes], Counter())}
        some = core.instructions(experts, played, SimpleNamespace(iterations=2))
        assert [e.task for e in some] == sorted(
            (e.task for e in experts), key=order.index) and len(some) == 12


def test_more_sft(tmp_path):
    with program(tmp_path / "forked", "more SFT") as core:
        run = start(core, tmp_path / "run", [*COMMON, "--method", "more-sft", "--sft-lr", "1e-3"])
    made, experts = phases(run), rows(run / "experts.jsonl")

    def loss(folder):  # Eq. (5), per action token
        return -torch.cat([*nats(folder, experts)]).mean().item()

    for agent, begun in (("sft-target", ROOT / "tiny"), ("iter1/target-agent", run / "sft-target")):
        assert made[agent]["first_loss"] == pytest.approx(loss(begun), abs=1e-5)
    assert loss(run / "iter1/target-agent") < loss(run / "sft-target") < loss(ROOT / "tiny")
    assert "eval-1-target-test.jsonl" in made and "eval-0-target-test.jsonl" not in made


# ------------------------------------------------------------------------- models, environments


def test_lora(plain, changed):
    _, run = changed("LoRA", flags=["--dpo-lr", "1e-2"], until="iter1/failure-agent")
    assert steps(run, "failure")[0]["loss"] == LN2
    assert steps(run, "failure")[-1]["loss"] < 0.69
    before, after = (load_file(run / name / "model.safetensors")
                     for name in ("sft-failure", "iter1/failure-agent"))
    assert before.keys() == after.keys()
    for name in before:
        moved = (after[name] - before[name]).double()
        if re.search("[qv]_proj", name):
            sizes = torch.linalg.svdvals(moved)
            assert sizes[7] > 1e-4 and sizes[8] < 1e-4 * sizes[0]  # the rank is 8
        else:
            assert not moved.any()
    # What was trained is what was saved: the last step's model, and so its margins, moved on.
    episode = rows(run / "iter1/target.jsonl")[:1]
    assert all(torch.isfinite(x).all() for x in nats(run / "iter1/failure-agent", episode))


def test_an_environment_of_ones_own(tmp_path, capsys):
    flags = "--env echo --rollouts 2 --iterations 1 --train-tasks 12 --eval-tasks 12 --sft-epochs 4"
    with program(tmp_path / "program", "an environment") as core:
        run = start(core, tmp_path / "run", [*flags.split(), "--words", "3"])
    for name, phase in phases(run).items():
        if phase["work"] not in ("explore", "evaluate"):
            continue
        rewards = []
        for e in rows(run / name):
            text, reply = (m["content"].split() for m in e["messages"])
            assert len(text) == 4
            rewards.append(sum(a == b for a, b in zip(text[1:], reply)) / 3)
            assert e["reward"] == pytest.approx(rewards[-1])
        assert phase["success"] == pytest.approx(sum(x >= 0.6 for x in rewards) / len(rewards))
    print(capsys.readouterr().out)
