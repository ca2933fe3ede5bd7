"""Practice text of ScienceWorld: noisy wanderers, most of whom lose their way."""

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

from lab.pretrain.practice import Words, play
from worlds.scienceworld.world import ScienceWorld, as_shown, science_actions, things_in


def exchanged() -> list[Words]:
    """Colours and plants always; what lives how long and which room is where can mostly be learnt.
    """
    return [Words(*(tuple(text.split(", ")) for text in (words, words, fresh)), share, any)
            for words, fresh, share, any in (
        ("red, orange, yellow, green, blue, violet, purple, white, black",
         "grey, teal, cyan, maroon, lilac, crimson, scarlet, indigo", 1.0, 0.3),
        ("apple, avocado, banana, cherry, grapefruit, lemon, peach, pea",
         "mango, plum, fig, papaya, quince, lime, olive, melon", 1.0, 0.3),
        ("bear, beaver, butterfly, chameleon, chipmunk, crocodile, dove, dragonfly, elephant, "
         "frog, hedgehog, jay, mouse, parrot, rabbit, tortoise, turtle, wolf",
         "otter, badger, lynx, heron, weasel, gecko, moose, toad, robin, panda, lemur, camel, "
         "hare, finch", 0.5, 0.6),
        ("kitchen, foundry, workshop, bathroom, outside, living room, bedroom, greenhouse, "
         "art studio, hallway",
         "attic, pantry, library, laundry, nursery, porch, corridor, balcony, lobby, kiosk",
         0.4, 0.6))]


# The mixture of competence: chances of each habit. `share`: of all wanderers; `right`: does what
# the solution does next; else it slips: `wanders` through a door and comes back, `focuses` on
# something (mostly wrong, which ends the episode), or does something else to what it sees.
WANDERERS = [
    dict(share=0.3, right=0.9, wanders=0.3, focuses=0.15),
    dict(share=0.3, right=0.7, wanders=0.3, focuses=0.1),
    dict(share=0.4, right=0.35, wanders=0.25, focuses=0.05),
]


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of wanderers, some of them side by side, each in its own simulator."""
    def some(first):
        env = ScienceWorld("short", "short")
        texts = [wanderer(env, seed, k) for k in range(first, n, workers)]
        env.close()
        return texts

    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads:
        parts = list(threads.map(some, range(workers)))
    return [parts[k % workers][k // workers] for k in range(n)]


def wanderer(env, seed: int, k: int) -> list[dict]:
    """Conversation number k of a wanderer of random competence on a training task."""
    rng = random.Random(f"explorer-{seed}-{k}")
    habits = rng.choices(WANDERERS, [e["share"] for e in WANDERERS])[0]
    page = env.reset(rng.choice(env.tasks("train")))
    env.expert()  # after which the solution is known, even if the simulator broke at first
    return play(env, page, _wanderer_script(rng, science_actions(env.gold()), habits))


def _wanderer_script(rng, solution, habits):
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
