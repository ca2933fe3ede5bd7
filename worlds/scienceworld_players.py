"""Who plays in ScienceWorld: an expert with the simulator's solution, noisy explorers for practice."""

import random
import re

from worlds import practised


def science_actions(gold: list[str]) -> list[str]:
    """The simulator's solution, looking around wherever it acts.

    The solution walks without looking where it is, so nobody could tell from what is read why it
    goes where it goes. What it does to doors, which are open, is left out.
    """
    actions, looked = ["look around"], True
    for action in gold:
        moves = action.startswith(("go to", "teleport to"))
        if action.startswith("open door") or (action == "look around" and looked):
            continue
        if not (moves or looked or action == "look around"):
            actions.append("look around")
        actions.append(action)
        looked = not moves
    return actions


def science_expert(gold: list[str], thoughts: bool, timed: bool = False):
    """An expert that plays `science_actions`, naming things as it has read them (see `as_shown`).

    timed: it plays the solution as it is, because each step counts or the names change. Once its
    actions are over it only looks around.
    """
    script, shown = iter(gold if timed else science_actions(gold)), []

    def reply(observation: str) -> str:
        shown[:0] = things_in(observation)
        action = next(script, "look around")
        action = action if timed else as_shown(action, shown)
        return f"Thought: {_science_thought(action)}\nAction: {action}" if thoughts else action
    return reply


def things_in(observation: str) -> list[str]:
    """The names of the things that a description of a room shows, as in "a dove egg"."""
    named = r"(?:^\t|: |, |\()(?:a|an) (?!substance called)([a-z]+(?:[ -][a-z]+)*(?: \d+)?)"
    return re.findall(named, observation, re.M)


def as_shown(action: str, shown: list[str]) -> str:
    """The action with its first thing called as shown, not as the simulator calls it in solutions.

    "focus on egg dove" is "focus on dove egg", "move egg dove egg in inventory to red box" is "move
    dove egg to red box". A name that was not shown, or fits several things, is left.
    """
    match = re.fullmatch(r"(focus on|pick up|move) (.+?)(?: in inventory)?( to .+)?", action)
    if not match:
        return action
    words = set(re.sub(" containing .*", "", match[2]).split())
    same = [name for name in shown if set(name.split()) == words]
    more = {name for name in shown if set(name.split()) > words}
    name = same[0] if same else more.pop() if len(more) == 1 else None
    return f"{match[1]} {name}{match[3] or ''}" if name else action


def _science_thought(action: str) -> str:
    verb, _, object = action.partition(" ")
    return {"look": "I should see what is here.",
            "go": f"What I need next is on the way through the {object[3:]}.",
            "teleport": f"What I need next is in the {object[3:]}.",
            "focus": f"The task is about the {object[3:]}.",
            "pick": f"I need to carry the {object[3:]}.",
            "wait": "This takes time.", "wait1": "This takes time.",
            }.get(verb, f"The next step is to {action}.")


# Habits, as of the shoppers. `right`: does what the solution does next; else it slips: `wanders`
# through a door and comes back, `focuses` on something (mostly wrong, which ends the episode), or
# does something else to what it sees.
EXPLORERS = [
    dict(share=0.3, right=0.9, wanders=0.3, focuses=0.15),
    dict(share=0.3, right=0.7, wanders=0.3, focuses=0.1),
    dict(share=0.4, right=0.35, wanders=0.25, focuses=0.05),
]


def explorer(env, seed: int, k: int) -> list[dict]:
    """Conversation number k of an explorer of random competence with `env` on a training task.

    A list of {"role", "content"} that ends with the explorer's last action. Few solve their task;
    they lose their way and come back, and do what has no effect.
    """
    rng = random.Random(f"explorer-{seed}-{k}")
    habits = rng.choices(EXPLORERS, [e["share"] for e in EXPLORERS])[0]
    page = env.reset(rng.choice(env.tasks("train")))
    return practised(env, page, _explorer_script(rng, science_actions(env.gold()), habits))


def _explorer_script(rng, solution, habits):
    room, doors, objects, shown = "hallway", ["kitchen"], ["air"], []

    def read(observation):
        nonlocal room, doors, objects
        shown[:0] = things_in(observation)
        if moved := re.search(r"You move to the ([\w ]+)\.", observation):
            room = moved[1]
        if seen := re.search(r"called the ([\w ]+)\.", observation):
            room = seen[1]
            doors = re.findall(r"A door to the ([\w ]+)", observation) or doors
            objects = things_in(observation) or objects

    for action in solution:
        while rng.random() > habits["right"]:
            thing, slip = rng.choice(objects), rng.random()
            if slip < habits["wanders"]:
                home = room
                read((yield f"go to {rng.choice(doors)}"))
                if rng.random() < 0.5:
                    read((yield "look around"))
                if room != home:
                    read((yield f"go to {home}"))
            elif slip < habits["wanders"] + habits["focuses"]:
                read((yield f"focus on {thing}"))
            else:
                read((yield rng.choice([f"pick up {thing}", f"examine {thing}", "look around",
                                        f"go to {rng.choice(doors)}", "inventory",
                                        f"move {thing} to {rng.choice(objects)}", action])))
        read((yield as_shown(action, shown)))
    while True:
        yield "look around"
