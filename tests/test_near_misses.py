"""Hard negatives by design: each fails by one mistake, and is played as a rollout is."""

import json
import random
import runpy
import shlex
import signal
import sys
from types import SimpleNamespace

import pytest
from conftest import SMALL_RUN, ended, fork

import envs
import worlds
from common.files import write_jsonl
from common.settings import Refused, parse
from dpo import Trajectory
from lab.careful.run import Run
from lab.near_misses import make_near_misses, near_misses, wrong_queries
from lab.settings import METHODS, Settings
from lab.study import answers


def expert_of(env, replies: list[str], task: str) -> Trajectory:
    """An expert of one observation and these replies."""
    messages = [dict(role="user", content=env.reset(task))]
    for reply in replies:
        messages += [dict(role="assistant", content=reply), dict(role="user", content="page")]
    return Trajectory(task, "expert", messages=messages, steps=len(replies))


def experts_of(env, most: int) -> list[Trajectory]:
    found = []
    for task, messages, _ in envs.experts(env, None, most):
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        found.append(expert_of(env, replies, task))
    return found


def replies_of(expert: Trajectory) -> list[str]:
    return [m["content"] for m in expert.messages if m["role"] == "assistant"]


@pytest.mark.parametrize("name, least", [("webshop", 12 * 4), ("intercodesql", 9 * 3)])
@pytest.mark.parametrize("view", ["short", "full"])
def test_a_near_miss_earns_much_and_not_all(name, least, view):
    env, rewards = envs.make(name, view), []
    for expert in experts_of(env, 12):
        for replies in near_misses(env, expert, random.Random(0), 0.6, 4):
            env.reset(expert.task)
            for reply in replies:
                step = env.step(reply)
            assert step.done
            rewards.append(step.reward)
    env.close()
    assert len(rewards) >= least and all(0.6 <= reward < 1 for reward in rewards)


def test_in_the_shop_one_choice_is_another():
    """The words searched for stay; of what is clicked one thing differs, or a twin is bought, with
    the options that it has."""
    env = envs.make("webshop", "short")
    titles = {product["asin"]: product["Title"] for product in env.world.products}
    for expert in experts_of(env, 12):
        right = replies_of(expert)
        for wrong in near_misses(env, expert, random.Random(0), 0.0, 100):
            assert wrong[0] == right[0] and wrong[-1] == right[-1] and wrong != right
            twins = [n for n, (a, b) in enumerate(zip(right, wrong)) if a != b and b[6:-1] in titles]
            if twins:
                n = twins[0]
                assert titles[wrong[n][6:-1]] == titles[right[n][6:-1]]
                assert {*wrong[n + 1:]} <= {*right[n + 1:]}
            else:
                assert len([*{*right} - {*wrong}]) == 1 and len({*wrong} - {*right}) <= 1


def test_a_wrong_query_has_one_condition_wrong():
    query = "SELECT name FROM doctors WHERE age > 40 OR rank = 'novice' AND pay < 60"
    found = [*wrong_queries(query)]
    assert len(found) == len({*found}) and query not in found
    assert {"SELECT name FROM doctors WHERE rank = 'novice' AND pay < 60",
            "SELECT name FROM doctors WHERE age > 40 AND pay < 60",
            "SELECT name FROM doctors WHERE age > 40 OR rank = 'novice'",
            "SELECT name FROM doctors WHERE age < 40 OR rank = 'novice' AND pay < 60",
            "SELECT name FROM doctors WHERE age > 40 AND rank = 'novice' AND pay < 60",
            "SELECT name FROM doctors WHERE age > 41 OR rank = 'novice' AND pay < 60",
            "SELECT name FROM doctors WHERE age > 40 OR rank = 'senior' AND pay < 60"} <= {*found}
    assert "SELECT site FROM farms ORDER BY rooms LIMIT 3" in wrong_queries(
        "SELECT site FROM farms ORDER BY rooms DESC LIMIT 3")


@pytest.mark.parametrize("name, more", [
    ("webshop", ["click the red one"]), ("intercodesql", ["hm", "I look. Action: what now?"])])
def test_an_agent_that_said_something_else_is_an_expert_too(name, more):
    """Before each of its replies, and between the query and what hands it in, it says what is no
    action. What is exchanged is one of its actions, or there is nothing to exchange."""
    env = envs.make(name, "full")
    found = []
    for expert in experts_of(env, 2):
        replies = replies_of(expert)
        for place in range(len(replies)):
            said = [*replies[:place], *more, *replies[place:]]
            talker = expert_of(env, said, expert.task)
            for changed in near_misses(env, talker, random.Random(0), 0.6, 2):
                found.append(changed)
                assert [reply for reply in changed if reply not in said] or len(changed) < len(said)
                last = worlds.replay(env, env.find(expert.task), changed)[-1]
                assert last.done and 0.6 <= last.reward < 1
    assert len(found) > 8
    for said in more, more[:1]:  # it did nothing at all
        idle = expert_of(env, said, f"{name}-train-0")
        assert near_misses(env, idle, random.Random(0), 0.0, 9) == []


def test_a_near_miss_ends():
    """Of an expert that never bought nothing can be played to its end, whatever is near."""
    env = envs.make("webshop", "short")
    for expert in experts_of(env, 6):
        unfinished = expert_of(env, replies_of(expert)[:-1], expert.task)
        assert near_misses(env, unfinished, random.Random(0), 0.0, 9) == []
        assert near_misses(env, expert, random.Random(0), 0.0, 9)


def test_where_there_is_no_near_miss_the_run_says_what_to_do(tmp_path):
    """Nothing both fails and earns 1."""
    env = envs.make("webshop", "short")
    write_jsonl(tmp_path / "experts.jsonl", experts_of(env, 2))
    run = SimpleNamespace(make_env=lambda: env, settings=SimpleNamespace(
        seed=0, hard_threshold=1.0, rollouts=2, max_tokens=768))
    with pytest.raises(Refused, match="--hard-threshold 1.0 .*lower it") as refusal:
        make_near_misses(run, tmp_path / "designed.jsonl", tmp_path / "experts.jsonl", "designed", 1)
    assert "\n" not in str(refusal.value)


def parsed(flags: str):
    return parse([*flags.split(), "--method", "designed"], Settings, METHODS, envs.environment)


@pytest.mark.parametrize("flags, says", [
    ("--env scienceworld", "no script knows a mistake in scienceworld; give --env webshop or"),
    ("--env bfcl --model m", "no script knows a mistake in bfcl"),
    ("--env appworld --model m", "no script knows a mistake in appworld"),
    ("--model m --webshop-url http://h:1", "leave out --webshop-url"),
    ("--model m --protocol eto --prompts .", "leave out --protocol eto"),
])
def test_what_no_script_can_do_is_refused_before_anything_runs(flags, says):
    with pytest.raises(Refused) as refusal:
        parsed(flags)
    assert str(refusal.value).startswith("--method designed: ") and says in str(refusal.value)


def test_other_data_and_texts_of_the_databases_are_no_obstacle():
    for flags in "--intercode-data .", "--protocol eto --prompts .":
        settings, _ = parsed(f"--env intercodesql --model m {flags}")
        assert settings.method == "designed"


def test_the_study_trains_on_them_and_chooses_by_validation(tmp_path):
    """Its pairs name experts and near misses, whose ids and mask are those of the text."""
    small = [flag for flag in SMALL_RUN if flag not in ("--env", "webshop")]

    def work():
        answers.make("webshop", "designed", "--method designed", 13, tmp_path,
                     [*small, "--dpo-steps", "2", "--iterations", "2"])

    assert ended(fork(work, tmp_path / "said")) == 0, (tmp_path / "said").read_text()[-2000:]
    out = tmp_path / "designed-s13"
    phases = json.loads((out / "phases.json").read_text())
    assert phases["iter1/pairs-target.jsonl"]["pairs"]["expert>designed"] == 12
    assert phases["iter2/target-agent"]["steps"] == 2
    rewards = [phases[f"eval-{i}-target-validation.jsonl"]["reward"] for i in (1, 2)]
    best = 1 + (rewards[1] > rewards[0])
    assert phases["chosen-test.jsonl"]["i"] == phases["chosen-unseen.jsonl"]["i"] == best
    assert "eval-1-failure-validation.jsonl" not in phases

    settings = Settings(env="webshop", model="tiny", view="short", out=str(tmp_path / "other"))
    run = Run(settings, envs.environment("webshop")())
    played = [json.loads(row) for row in (out / "iter1/designed.jsonl").read_text().splitlines()]
    for row in played:
        assert (row["ids"], row["action_mask"]) == run.encoder.encode(row["messages"], 1)
        assert 0.6 <= row["reward"] < 1 and row["ended"] == "done"
    assert len({json.dumps(row["messages"]) for row in played}) == len(played) == 12
    assert METHODS["designed"][0].__name__ == "designed"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("study, flags, says", [
    ("near-misses", "--bogus 3", "unrecognized arguments: --bogus 3"),
    ("near-misses", "--base /nonexistent", "--base /nonexistent: "),
    ("near-misses", "--serve 'serve {agent} {port}' --threads=2", "--serve, --threads"),
    ("near-misses", "--seed 3", "--seed"), ("size", "--method=eto", "--method"),
    ("near-misses", "--env intercodesql", "--env"), ("size", "--reuse .", "--reuse"),
    ("near-misses", "--eval-splits test", "--eval-splits"), ("size", "--d-fail all", "--d-fail"),
    ("threshold", "--hard-threshold 0.5", "--hard-threshold"),
    ("near-misses", "--model m --webshop-url http://h:1", "--method designed: "),
])
def test_what_a_study_sets_or_an_arm_cannot_do_is_refused_in_a_line_before_all(
        study, flags, says, tmp_path, monkeypatch, capsys):
    """The last arm's refusal too, and as `run.sh answers` says it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["answers", study, "webshop", "--out", str(tmp_path / "out"),
                                      *shlex.split(flags)])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lab.study.answers", run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"answers: {says}")
    assert not (tmp_path / "out").exists()


def test_what_is_no_arms_own_is_given_to_every_run(tmp_path, monkeypatch):
    """Also what the study would have shorter."""
    made = []
    monkeypatch.setattr(answers, "make", lambda *given: made.append(answers.flags_of(
        given[0], given[2], given[5])))
    answers.main(["size", "webshop", "--out", str(tmp_path), "--seeds", "1", "--iterations", "3",
                  "--hard-threshold", "0.7"])
    read = [parse(flags, Settings, METHODS, envs.environment)[0] for flags in made]
    assert [(s.method, s.d_fail) for s in read] == [
        ("eto", "all"), ("coevolve", "all"), ("coevolve", "none")]
    assert {(s.iterations, s.hard_threshold, s.dpo_steps, s.eval_splits) for s in read} == {
        (3, 0.7, 30, "validation")}


def test_a_report_is_on_the_seeds_on_which_every_arm_has_ended(tmp_path):
    study = answers.Study({"eto": "", "coevolve": ""}, (("coevolve", "eto"),), range(1, 5))
    for seed, eto, both in ((1, 0.5, 0.6), (2, 0.4, 0.6), (3, 0.6, 0.6), (4, 0.9, None)):
        for arm, reward in (("eto", eto), ("coevolve", both)):
            if reward is None:
                continue
            run = tmp_path / f"{arm}-s{seed}"
            run.mkdir()
            row = dict(work="evaluate", name="target", reward=reward, success=0.0)
            phases = {f"{kind}-test.jsonl": row for kind in ("sft", "chosen")}
            phases |= {f"{kind}-unseen.jsonl": row for kind in ("sft", "chosen")}
            (run / "phases.json").write_text(json.dumps(phases))
            (run / "chosen-test.jsonl").touch()
    said = answers.report(study, [1, 2, 3, 4], tmp_path)
    assert "seeds [1, 2, 3]" in said
    # 0.1, 0.2, 0: mean 0.1, deviation 0.1, 4.3027 x 0.1 / sqrt(3)
    assert "test reward coevolve - eto: +0.1000 ± 0.2484, ahead on 2 of 3\n" in said
