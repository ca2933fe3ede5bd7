"""Each change of docs/changing.md applies to a copy of the program, with the documented effect.

A changed program is compared with the unchanged one under the same flags.
"""

import importlib
import math
import re
import shutil
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conftest import ROOT, program
from safetensors.torch import load_file

from common.files import read_json
from common.files import read_jsonl as rows
from lab.page import page, report

FILES, FOLDERS = ("coevolve", "dpo", "envs", "evolve", "grpo"), ("common", "engine", "environments")
# Each agent takes one step in an iteration, without truncation.
SMALL = ("--env webshop --train-tasks 8 --eval-tasks 1 --eval-splits validation --rollouts 2 "
         "--temperature 0.8 --iterations 1 --sft-epochs 1 --sft-batch 4 --dpo-epochs 1 "
         "--dpo-batch 1000 --cut-turns -1").split()
LN2 = math.log(2)


def changes(page):
    """Returns title -> [(file, old text, new text)] of a page's diffs. Dots continue a title."""
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


def forget():
    """Unloads the modules of the program, and returns them."""
    names = [name for name in sys.modules if name.split(".")[0] in FILES + FOLDERS]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """changed(title) -> the module coevolve of a copy of the program with this change."""
    before = forget()

    def start(title):
        folder = tmp_path / title.replace(" ", "-")
        left_out = shutil.ignore_patterns(".*", "__pycache__", "docs", "lab", "runs", "tests")
        shutil.copytree(ROOT, folder, ignore=left_out)
        for file, old, new in CHANGES.get(title, []):
            path = folder / file
            text = path.read_text() if path.exists() else ""
            assert text.count(old) == 1, (file, old)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace(old, new))
            assert all(len(line) <= 100 for line in new.splitlines())
        forget()
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("coevolve")

    yield start
    forget()
    sys.modules.update(before)


def train(core, flags, until=None):
    """Runs a program until the phase of the output `until` has ended."""
    class Enough(Exception):
        pass

    class Run(core.Run):
        def once(self, output, *inputs, **parameters):
            value = super().once(output, *inputs, **parameters)
            if output == until:
                raise Enough
            return value

    with suppress(Enough):
        program(*flags, run_class=Run)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run of the unchanged program."""
    out = tmp_path_factory.mktemp("changing") / "base"
    program(*SMALL, "--out", out)
    return out


@pytest.fixture
def fork(base, changed, tmp_path):
    """fork(title, OUTPUT, flags) -> the folders of two runs that branch from `base` at OUTPUT with
    the same flags, of the unchanged and of the changed program. Without flags, the first is base.
    They end after OUTPUT, or after the output `until`."""
    def start(title, output, flags="", until=None):
        folders = [base]
        for name in ["unchanged", title] if flags else [title]:
            folders.append(tmp_path / f"run-{name.replace(' ', '-')}")
            train(changed(name), ["--env", "webshop", "--branch", f"{base}@{output}", "--out",
                                  folders[-1], *flags.split()], until or output)
        return folders[-2:]
    return start


def phases(run):
    return read_json(run / "phases.json")


def steps(run, agent):
    return rows(run / f"iter1/{agent}-agent/train.jsonl")


def margins(run, agent, i=1):
    return rows(run / f"iter{i}/{agent}-agent/margins.jsonl")


def weights(run, agent):
    return load_file(run / agent / "model.safetensors")


def test_names_and_outputs_of_the_page_exist_and_each_change_has_a_test(base):
    assert all(f'"{title}"' in Path(__file__).read_text() for title in CHANGES)
    text = (ROOT / "docs/changing.md").read_text()
    index = re.findall(r"^\| (?!what)(?:.*) \| (.*) \|(.*)\|$", text, re.M)
    assert len(index) > 15
    for where, output in index:
        of_loop = ""
        for file, names in re.findall(r"`(\S+\.py)`: ((?:`\w+`(?:, )?)+)", where):
            of_loop = (ROOT / file).read_text()
            for name in re.findall(r"\w+", names):
                assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", of_loop, re.M), name
        for name in re.findall(r"`(.*)`", output):
            assert name in phases(base) or name.replace("iter1", "iter{i}") in of_loop, name


def test_ipo(fork):
    control, run = fork("IPO", "iter1/failure-agent", "--dpo-epochs 2")
    (first, second), (of_dpo, _) = (steps(each, "failure") for each in (run, control))
    assert first["norm"] == pytest.approx(of_dpo["norm"], rel=1e-4)
    assert (first["loss"], of_dpo["loss"]) == pytest.approx((1 / 8, LN2), rel=1e-5)
    losses = [(row["last"][2] - 0.5) ** 2 / 2 for row in margins(run, "failure")]
    assert second["loss"] == pytest.approx(fmean(losses), rel=1e-5)


def test_cdpo(fork):
    folders = fork("cDPO", "iter1/failure-agent")
    [of_dpo], [first] = (steps(folder, "failure") for folder in folders)
    assert first["loss"] == first["dpo"] == pytest.approx(LN2) and first["sft"] == 0
    assert first["norm"] / of_dpo["norm"] == pytest.approx(0.8, rel=1e-4)


def test_simpo(fork):
    flags = "--reference none --log-prob-reduction mean --beta 2 --lambda-sft 0"
    folders = fork("SimPO", "iter1/failure-agent", flags)
    for folder, gamma in zip(folders, (0, 1)):
        losses = [math.log(1 + math.exp(gamma - row["first"][2])) for row in margins(folder, "failure")]
        assert steps(folder, "failure")[0]["loss"] == pytest.approx(fmean(losses), rel=1e-5)


def test_infonca(fork):
    _, run = fork("InfoNCA", "iter1/target-agent", "--method eto")
    played = rows(run / "experts.jsonl") + rows(run / "iter1/target.jsonl")
    counts = Counter(e["task"] for e in played if e["ended"] != "context_limit")
    mean = fmean(math.log(n) for n in counts.values())
    assert steps(run, "target")[0]["loss"] == pytest.approx(mean, abs=1e-5)

    # Two rewards differ by 0.1: softmax of (1, 0). Log-ratios 0.5 and 0.1, beta 2.
    dpo = importlib.import_module("dpo")
    group = dpo.Group()
    for reward, reference in (1.0, -2.0), (0.9, -3.0):
        t = group.add(dpo.Trajectory(ids=[0, 0], action_mask=[0, 1], reward=reward))
        t.ref_log_prob = reference
    losses, _ = dpo.infonca_loss(torch.tensor([-1.5, -2.9]), [group], beta=2.0)
    p, log_q = 1 / (1 + math.exp(-1)), -math.log(1 + math.exp(-0.8))
    assert losses["loss"].item() == pytest.approx(-p * log_q - (1 - p) * (log_q - 0.8))


def test_a_rate_per_agent(fork):
    folders = fork("a rate per agent", "iter1/failure-agent", until="iter1/target-agent")
    for agent, factor in ("failure", 2), ("target", 1):
        before, after = (steps(folder, agent)[0]["lr"] for folder in folders)
        assert after == factor * before


def test_another_optimiser(fork):
    """One step of SGD moves the weights by the rate times the clipped gradient."""
    _, run = fork("another optimiser", "iter1/failure-agent", "--dpo-lr 0.01")
    before, after = weights(run, "sft-failure"), weights(run, "iter1/failure-agent")
    moved = torch.cat([(after[name].double() - before[name].double()).flatten() for name in before])
    clipped = min(1, steps(run, "failure")[0]["norm"])
    assert moved.norm().item() == pytest.approx(0.01 * clipped, rel=1e-3)


def test_a_moving_average_as_the_reference(fork):
    flags = "--reference sft --iterations 2"
    control, run = fork("a moving average as the reference", "iter1/failure-agent", flags,
                        until="iter2/target-agent")
    old, new = weights(run, "sft-target"), weights(run, "iter1/target-agent")
    for name, weight in weights(run, "iter1/reference").items():
        torch.testing.assert_close(weight, 0.9 * old[name] + 0.1 * new[name])
    # pi_ref has moved a tenth of the way to the policy, so the first margins are nine tenths.
    averaged, of_sft = (sum(abs(row["first"][2]) for row in margins(folder, "target", 2))
                        for folder in (run, control))
    assert averaged == pytest.approx(0.9 * of_sft, rel=0.02)


def test_lora(fork):
    pytest.importorskip("peft")
    _, run = fork("LoRA", "iter1/failure-agent", "--dpo-lr 1e-4 --dpo-epochs 2")
    first, last = steps(run, "failure")
    assert first["loss"] == pytest.approx(LN2) and last["loss"] < LN2
    before, after = weights(run, "sft-failure"), weights(run, "iter1/failure-agent")
    assert before.keys() == after.keys()
    trained = [name for name, weight in before.items() if (after[name] != weight).any()]
    assert len(trained) > 5 and not any("norm" in name or "embed" in name for name in trained)
    for name in trained:
        s = torch.linalg.svdvals(after[name] - before[name])
        assert s[8] < 1e-2 * s[0]  # of rank 8, but for the rounding of the merged weights


def sides(row):
    return row["task"], row["kind"], *(tuple(row[side].values()) for side in ("chosen", "rejected"))


def learned_from(run, agent="failure"):
    return sorted(sides(row) for row in margins(run, agent))


@pytest.mark.parametrize("title, more, keeps", [
    ("the failure agent learns from pairs whose better failure is hard", "",
     lambda row: row["chosen"]["reward"] >= 0.6),
    ("a new setting", "--min-gap 0.3",
     lambda row: row["chosen"]["reward"] - row["rejected"]["reward"] >= 0.3)])
def test_a_filter_between_two_phases(base, changed, tmp_path, title, more, keeps):
    run = tmp_path / "run"
    train(changed(title), ["--branch", f"{base}@iter1/failure-agent", "--out", run, *more.split()],
          until="iter1/failure-agent")
    before = rows(base / "iter1/pairs-failure.jsonl")
    assert rows(run / "iter1/pairs-failure.jsonl") == before
    kept = [sides(row) for row in before if keeps(row)]
    assert learned_from(run) == sorted(kept) and 5 < len(kept) < len(before) - 5
    assert read_json(run / "config.json")["settings"].get("min_gap") == (0.3 if more else None)


def test_a_reversed_failure_agent(fork):
    control, run = fork("a reversed failure agent", "iter1/failure-agent",
                        "--cut-turns -1 --rejected-ends count")
    reversed_pairs = [(task, kind, b, a) for task, kind, a, b in learned_from(control)]
    assert learned_from(run) == sorted(reversed_pairs)


def test_weights_by_hardness(fork):
    output = "iter1/pairs-target.jsonl"
    _, run = fork("expert pairs weigh more, the harder their negative is", output)
    of_task = defaultdict(list)
    for row in rows(run / output):
        chosen, weight = row["chosen"], row["weight"]
        imitated = chosen["agent"] == "expert" or chosen["reward"] == 1
        assert row["sft_weight"] == imitated * weight
        if "expert" in row["kind"]:
            of_task[row["task"]].append((weight, 0.5 + row["rejected"]["reward"]))
    for same_task in of_task.values():
        found, parts = zip(*same_task)
        assert found == pytest.approx([part / sum(parts) for part in parts])
    assert sum(len({*same_task}) > 1 for same_task in of_task.values()) >= 3


def test_a_curriculum(fork):
    """In the first of two iterations, half of the tasks and one more are trained on."""
    _, run = fork("a curriculum", "iter1/target-agent", "--iterations 2")
    nearest = defaultdict(float)  # task -> the best reward of a rejected trajectory
    for row in rows(run / "iter1/pairs-target.jsonl"):
        nearest[row["task"]] = max(nearest[row["task"]], row["rejected"]["reward"])
    trained = {row["task"] for row in margins(run, "target")}
    assert len(trained) == 1 + len(nearest) // 2
    left = [nearest[task] for task in {*nearest} - trained]
    assert min(nearest[task] for task in trained) >= max(left) and len({*nearest.values()}) > 2


def test_two_failure_agents(fork):
    _, run = fork("two failure agents", "iter1/pairs-failure.jsonl", until="iter1/pairs-target.jsonl")
    assert rows(run / "sft-failure/train.jsonl") != rows(run / "sft-second/train.jsonl")
    assert {"eval-0-second-validation.jsonl", "iter1/second-agent"} <= phases(run).keys()

    assert phases(run)["iter1/pairs-target.jsonl"]["pairs"]["expert>second"] > 5
    for agent in "failure", "second":
        pairs = rows(run / f"iter1/pairs-{agent}.jsonl")
        named = {row[side]["agent"] for row in pairs for side in ("chosen", "rejected")}
        assert named == {"target", "failure", "second"}


def test_pairs_of_its_own_for_an_agent(fork):
    _, run = fork("pairs of its own for an agent", "iter1/pairs-failure.jsonl",
                  until="iter1/failure-agent")
    counts = defaultdict(Counter)  # task -> number of successes (True) and of failures (False)
    for name in "target", "failure":
        for e in rows(run / f"iter1/{name}.jsonl"):
            counts[e["task"]][e["reward"] == 1] += e["ended"] != "context_limit"
    expected = sum(count[True] * count[False] for count in counts.values())
    assert phases(run)["iter1/pairs-failure.jsonl"]["pairs"] == {"success>failure": expected}
    assert len(learned_from(run)) == expected > 3


def test_a_new_phase_is_printed_and_shown_on_the_page(fork, capsys):
    _, run = fork("a judge of pairs", "iter1/target-agent")
    row = phases(run)["iter1/judged-target.jsonl"]
    before, after = (rows(run / f"iter1/{name}-target.jsonl") for name in ("pairs", "judged"))
    assert after == [row for row in before
                     if row["chosen"]["reward"] - row["rejected"]["reward"] > 0.4]
    assert row["kept"] == len(after) == len(margins(run, "target")) > 5
    assert row["refused"] == len(before) - len(after) > 5

    assert f"{len(after)} kept, {row['refused']} refused" in capsys.readouterr().out
    report.close(run)
    assert "iter1/judged-target.jsonl" in page.page(run)


def test_grpo(changed):
    changed("GRPO without the standard deviation")
    grpo = importlib.import_module("grpo")
    assert grpo.advantages_of([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_a_new_environment(changed, tmp_path):
    core, run = changed("an environment"), tmp_path / "run"
    train(core, ["--env", "echo", "--words", 3, "--rollouts", 2, "--iterations", 1, "--out", run,
                 "--train-tasks", 12, "--eval-tasks", 12, "--sft-epochs", 4])
    found = set()
    for e in rows(run / "iter1/target.jsonl") + rows(run / "eval-1-target-test.jsonl"):
        (_, *asked), said = (m["content"].split() for m in e["messages"])
        right = sum(a == b for a, b in zip(asked, said))
        assert len(asked) == 3 and e["reward"] == pytest.approx(right / 3)
        found.add(right)
    assert 2 in found
