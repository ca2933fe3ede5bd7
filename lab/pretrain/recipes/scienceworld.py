"""Practice text of ScienceWorld: noisy wanderers, most of whom lose their way."""

import random

from environments.scienceworld.environment import ScienceWorld, things_in
from lab.pretrain.practice import Words, play

# What is called otherwise in a share of the conversations, and by what else. What lives how long
# and which room is where can mostly be learnt.
KINDS = [
    ("red, orange, yellow, green, blue, violet, purple, white, black",
     "grey, teal, cyan, maroon, lilac, crimson, scarlet, indigo", 1.0),
    ("apple, avocado, banana, cherry, grapefruit, lemon, peach, pea",
     "mango, plum, fig, papaya, quince, lime, olive, melon", 1.0),
    ("bear, beaver, butterfly, chameleon, chipmunk, crocodile, dove, dragonfly, elephant, frog, "
     "hedgehog, jay, mouse, parrot, rabbit, tortoise, turtle, wolf",
     "otter, badger, lynx, heron, weasel, gecko, moose, toad, robin, panda, lemur, camel", 0.5),
    ("kitchen, foundry, workshop, bathroom, outside, living room, bedroom, greenhouse, art studio, "
     "hallway",
     "attic, pantry, library, laundry, nursery, porch, corridor, balcony, lobby, kiosk", 0.4)]
# What a wanderer does to something that it sees, perhaps; a wrong focus ends the episode.
DOES = ("pick up {}", "examine {}", "focus on {}", "open {}", "look around", "inventory")


def exchanged() -> list[Words]:
    found = []
    for words, others, share in KINDS:
        words = tuple(words.split(", "))
        found.append(Words(words, (*words, *others.split(", ")), share))
    return found


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of wanderers on training tasks."""
    env = ScienceWorld("short", "short")
    rng = random.Random(f"wanderers-{seed}")

    def slips(observation):
        thing = rng.choice(things_in(observation) or ["air"])
        return [rng.choice(DOES).format(thing)]

    texts = []
    for _ in range(n):
        page = env.reset(rng.choice(env.tasks("train")))
        texts.append(play(env, page, env.expert(), slips, rng))
    env.close()
    return texts
