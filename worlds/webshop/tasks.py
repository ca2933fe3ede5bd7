"""New goals for the embedded shop, which ask for what somebody bought there: what was bought by
mistake is right for the new goal, and the episode's own actions are its solution."""

import random
import re

from worlds import converse, words_of
from worlds.webshop.catalogue import draw_goal, goal_for, goal_key, instruction_of, meets

DRAWS = 20  # of a variation, until one is new and its solution has the rare pattern [ours]
# What the scripted expert does; no goal asks for the other kinds of actions.
ASKED = re.compile(r"search for [12] attributes|open number \d+|< prev|next >|"
                   "choose what was asked|buy as asked")
FITS_MOST = 4  # products that may meet a goal, else it asks for nothing in particular [ours]


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a customer wants to buy: a kind of product, one or two attributes, the "
            "options and a price limit, in the words of the shop's pages and of the instruction; "
            "the limit as: lower than 50.00 dollars. Its actions end with the purchase.")
    # And about those that it plays, where the rules are not said.
    actions = "search[words] on the search page, click[text] with a text of the page elsewhere"

    def __init__(self, shop):
        self.shop, world = shop, shop.world
        goals = [(split, goal) for split in world.goals for goal in world.goals[split]]
        self.said = {words_of(goal["instruction"]) for _, goal in goals}
        self.taken = {goal_key(goal) for split, goal in goals if split == "train"}
        # What is evaluated is not asked for with another price limit either.
        self.evaluated = {goal_key(goal)[:-1] for split, goal in goals if split != "train"}
        self.attributes = {a for product in world.products for a in product["Attributes"]}
        self.options = {value for product in world.products
                        for values in product["options"].values() for value in values}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Kinds of the actions that the shop carried out, and of two in a row."""
        return self._kinds(self.shop.find(task), replies)

    def _kinds(self, goal: dict, replies: list[str]) -> set[str]:
        kinds = [kind for _, kind, _ in self._carried_out(goal, replies)]
        return {*kinds, *(f"{a}, {b}" for a, b in zip(kinds, kinds[1:]))}

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution} from an episode: none, or the one of its purchase."""
        if not (bought := self._bought(task, replies)):
            return []
        product, chosen, actions = bought
        attributes = rng.sample(product["Attributes"], rng.choice([1, 2]))
        goal = goal_for(rng, product, attributes, chosen)
        goal["instruction"] = instruction_of(rng, goal)
        return [dict(text=goal["instruction"], task=goal, solution=actions)]

    def parses(self, pattern: str) -> bool:
        """Whether goals whose solution has this pattern can be drawn."""
        return all(ASKED.fullmatch(kind) for kind in pattern.split(", "))

    def vary(self, task: str, pattern: str | None, rng: random.Random) -> list[dict]:
        """A proposal of the same type of product, which the scripted expert solves, with the rare
        pattern if there is one; none where nothing like that is drawn."""
        families = [family for family in self.shop.world.families
                    if family["query"] == self.shop.find(task)["query"] and not family["held_out"]]
        for _ in range(DRAWS):
            goal = draw_goal(rng, rng.choice(families), set(), self.shop.world.products)
            if self.refusal(goal):
                continue
            messages, _ = converse(self.shop, self.shop.start(goal), self.shop.expert())
            solution = [m["content"] for m in messages if m["role"] == "assistant"]
            if pattern is None or pattern in self._kinds(goal, solution):
                return [dict(text=goal["instruction"], task=goal, solution=solution)]
        return []

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's words, and the goal that they come to with its purchase, or None."""
        text, actions = proposal["query"], proposal["action_sequence"]
        limits = re.findall(r"(?:than|under|below|\$)\s*\$?(\d+(?:\.\d+)?)", text.lower())
        if not (bought := self._bought(task, actions)) or len(limits) != 1:
            return None
        product, chosen, _ = bought
        kinds, rest = named(text, [product["query"]])
        attributes, rest = named(rest, self.attributes)
        options, _ = named(rest.replace(f" {words_of(limits[0])} ", " | "), self.options)
        if (not kinds or not attributes or not {*attributes} <= {*product["Attributes"]}
                or not {*options} <= {*chosen} or float(limits[0]) <= product["price"]):
            return None
        goal = dict(name=product["Title"], query=product["query"],
                    product_category=product["product_category"], attributes=attributes,
                    goal_options=[value for value in chosen if value in options],
                    price_upper=float(limits[0]), instruction=text)
        return dict(text=text, task=goal, solution=actions)

    def _bought(self, task: str, replies: list[str]) -> tuple[dict, list[str], list[str]] | None:
        """What an episode ends with: product, options (colour first), the actions carried out."""
        done = list(self._carried_out(self.shop.find(task), replies))
        if not done or (end := done[-1][2]).kind != "done":
            return None
        colour = dict(end.options).get("color")
        chosen = sorted((value for _, value in end.options), key=lambda value: value != colour)
        return self.shop.world.products[end.item], chosen, [reply for reply, _, _ in done]

    def key(self, task: dict) -> str:
        """What makes two goals one."""
        kind, attributes, options, limit = goal_key(task)
        return f"{kind}/{sorted(attributes)}/{sorted(options)}/{limit}"

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this goal; None if one may."""
        if (goal_key(task) in self.taken or goal_key(task)[:-1] in self.evaluated
                or words_of(task["instruction"]) in self.said):
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
        solution = proposal["solution"]
        if len(solution) > self.shop.max_steps:
            return "its solution is longer than an episode"
        first, second = (list(self._carried_out(proposal["task"], solution)) for _ in range(2))
        if [reply for reply, _, _ in first] != solution:
            return "an action of its solution is not carried out"
        if first != second:
            return "its replays differ"
        reward = first[-1][2].reward if first else 0.0
        return None if reward == 1.0 else f"its solution earns {reward:.2f}"

    def _carried_out(self, goal: dict, replies: list[str]):
        """(reply, kind, page after it) of each action that the shop carried out."""
        self.shop.start(goal)
        for reply in replies:
            before = self.shop.page
            if before.kind == "done":
                return
            self.shop.step(reply)
            after = self.shop.page
            if after is before:  # not carried out
                continue
            kind = argument = re.match(r"(.+)\[(.+)\]", self.shop.action(reply))[2].lower()
            if after.kind == before.kind == "item":
                asked = argument in goal["goal_options"]
                kind = "choose what was asked" if asked else "choose something else"
            elif after.kind == "item" and before.kind == "results":
                opened = [text for text in before.links if re.fullmatch("b0[a-z0-9]{8}", text)]
                kind = f"open number {opened.index(argument) + 1}"
            elif after.kind == "results" and before.kind == "search":
                told = sum(a in argument for a in goal["attributes"])
                kind = (f"search for {told} attributes"
                        + ("" if goal["query"] in argument else " of another type"))
            elif after.kind == "done":
                missing = set(goal["goal_options"]) - set(dict(after.options).values())
                kind = "buy as asked" if not missing else "buy without an option"
            yield reply, kind, after


def named(text: str, phrases) -> tuple[list[str], str]:
    """The phrases that stand in a text, of two that overlap the longer; the text without them."""
    text, found = re.sub(r"[^a-z0-9|]+", " ", f" {text.lower()} "), []
    for phrase in sorted(phrases, key=lambda phrase: (-len(phrase), phrase)):
        words = f" {words_of(phrase)} "
        if words in text:
            found.append(phrase)
            text = text.replace(words, " | ")
    return found, text
