"""New goals for the embedded shop, made of what somebody bought there.

A find is a purchase: product, options, price. It becomes a goal that asks for what was bought, and
the episode's own actions are its solution: what was bought by mistake is right for the new goal.
"""

import random
import re

from worlds import parse_reply, plain
from worlds.webshop_catalogue import goal_for, goal_key, instruction_of, meets

FITS_MOST = 4  # products that may meet a goal, else it asks for nothing in particular [ours]


class ShopSmith:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a customer wants to buy: a kind of product, one or two attributes, the "
            "options and a price limit, as in the instruction. Its actions end with the purchase.")
    # And about those that it plays, where the rules are not said.
    actions = "search[words] on the search page, click[text] with a text of the page elsewhere"

    def __init__(self, shop):
        """shop: a WebShop of the smith's own, which it plays."""
        self.shop, world = shop, shop.world
        self.said = {plain(goal["instruction"]) for goals in world.goals.values()
                     for goal in goals}
        self.taken = {goal_key(goal) for goal in world.goals["train"]}
        # What is evaluated is not asked for with another price limit either.
        self.evaluated = {goal_key(goal)[:-1] for split, goals in world.goals.items()
                          if split != "train" for goal in goals}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Kinds of the actions that the shop carried out, and of two in a row.

        What is searched and bought is told by how much of it was asked for.
        """
        kinds = [kind for _, kind, _, _ in self._carried_out(self.shop.find(task), replies)]
        return {*kinds, *(f"{a}, {b}" for a, b in zip(kinds, kinds[1:]))}

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution} from an episode: none, or the one of its purchase."""
        done = list(self._carried_out(self.shop.find(task), replies))
        if not done or done[-1][2].kind != "done":
            return []
        *_, shown, options = done[-1]
        product = self.shop.world.products[shown.item]
        attributes = rng.sample(product["Attributes"], rng.choice([1, 2]))
        chosen = sorted(options.values(), key=lambda value: value != options.get("color"))
        goal = goal_for(rng, product, attributes, chosen)
        goal["instruction"] = instruction_of(rng, goal)
        return [dict(text=goal["instruction"], task=goal, solution=[reply for reply, *_ in done])]

    def written(self, task: str, proposal: dict, rng: random.Random) -> dict | None:
        """An explorer model's proposal: its words, and the goal that its purchase comes to."""
        actions = proposal["action_sequence"]
        for found in self.finds(task, actions, rng):
            goal = {**found["task"], "instruction": proposal["query"]}
            return dict(text=proposal["query"], task=goal, solution=actions)
        return None

    def key(self, task: dict) -> str:
        """What makes two goals one."""
        kind, attributes, options, limit = goal_key(task)
        return f"{kind}/{sorted(attributes)}/{sorted(options)}/{limit}"

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this goal; None if one may."""
        if (goal_key(task) in self.taken or goal_key(task)[:-1] in self.evaluated
                or plain(task["instruction"]) in self.said):
            return "a goal of a split"
        fits = [product for product in self.shop.world.products if meets(product, task)]
        if not fits:
            return "no product meets it"
        if any(product["held_out"] for product in fits):
            return "a held-out product meets it"
        if not set(task["goal_options"]) & {v for p in fits for v in p["options"]["color"]}:
            return "no colour chosen"
        return f"more than {FITS_MOST} products meet it" if len(fits) > FITS_MOST else None

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice under the new goal; why it does not prove it, or None."""
        played = []
        if len(proposal["solution"]) > self.shop.max_steps:
            return "its solution is longer than an episode"
        for _ in range(2):
            pages, reward = [self.shop.start(proposal["task"])], 0.0
            for reply in proposal["solution"]:
                if self._ended():
                    return "the solution goes on after the end"
                before = self.shop._shown
                step = self.shop.step(reply)
                if self.shop._shown is before:
                    return "an action of its solution is not carried out"
                pages.append(step.observation)
                reward = step.reward
            played.append((pages, reward))
        if played[0] != played[1]:
            return "its replays differ"
        return None if played[0][1] == 1.0 else f"its solution earns {played[0][1]:.2f}"

    def _carried_out(self, goal: dict, replies: list[str]):
        """(reply, kind, page after it, chosen options) of each action that was carried out."""
        self.shop.start(goal)
        options = {}
        for reply in replies:
            if self._ended():
                return
            before = self.shop._shown
            self.shop.step(reply)
            after = self.shop._shown
            if after is before:  # not carried out
                continue
            match = re.match(r"(.+)\[(.+)\]", parse_reply(reply))
            kind = argument = match[2].lower()
            if after.kind == "item" and before.kind == "item":
                product = self.shop.world.products[after.item]
                name = next((n for n, pool in product["options"].items() if argument in pool), "")
                options = {**options, name: argument} if name else options
                asked = argument in goal["goal_options"]
                kind = "choose what was asked" if asked else "choose something else"
            elif after.kind == "item" and before.kind == "results":
                opened = [text for text in before.links if re.fullmatch("b0[a-z0-9]{8}", text)]
                kind, options = f"open number {opened.index(argument) + 1}", {}
            elif after.kind == "results" and before.kind == "search":
                told = sum(a in argument for a in goal["attributes"])
                kind = (f"search for {told} attributes"
                        + ("" if goal["query"] in argument else " of another type"))
            elif after.kind == "done":
                missing = len(set(goal["goal_options"]) - set(options.values()))
                kind = "buy as asked" if not missing else "buy without an option"
            yield reply, kind, after, dict(options)

    def _ended(self) -> bool:
        return self.shop._shown.kind == "done"
