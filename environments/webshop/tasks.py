"""Makes new goals for the built-in WebShop from the purchases of agents.

A new goal requests the product and the options that an agent bought in an episode. The actions of
the episode are therefore a solution of the new goal.
"""

import random
import re

from environments import with_pairs, words_of
from environments.webshop.catalogue import draw_limit, goal_for, goal_key, instruction_of, meets
from environments.webshop.pages import Page, name_and_argument

MAX_FITTING = 4  # a new goal that more than 4 products meet is rejected as too vague [ours]


class TaskGenerator:
    """Makes new goals from episodes or from an explorer model's proposals, and checks the goals."""
    form = ("A task is what a customer wants to buy: a kind of product, one or two attributes, the "
            "options and a price limit, in the words of the shop's pages and of the instruction; "
            "the limit as: lower than 50.00 dollars. Its actions end with the purchase.")
    actions = "search[words] on the search page, click[text] with a text of the page elsewhere"

    def __init__(self, shop):
        self.shop = shop
        self.products = shop.data.products
        self.attributes = {text for product in self.products for text in product["Attributes"]}
        self.options = set()
        for product in self.products:
            self.options.update(*product["options"].values())

        self.instructions = set()   # normalised instructions of all splits (see `words_of`)
        self.training_keys = set()  # keys of the training goals
        self.evaluated = set()      # `goal_key` of the goals outside "train"
        for split, goals in shop.data.goals.items():
            self.instructions |= {words_of(goal["instruction"]) for goal in goals}
            if split == "train":
                self.training_keys |= {self.key(goal) for goal in goals}
            else:
                self.evaluated |= {goal_key(goal) for goal in goals}

    # ------------------------------------------------------------------ proposals from episodes

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Returns the kinds of the executed actions, and all pairs of consecutive kinds."""
        return with_pairs([kind for _, kind in self._execute(self.shop.find(task), replies)])

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Returns [{text, task, solution}] if an episode ends with a purchase, and otherwise []."""
        purchase = self._purchase(task, replies)
        if purchase is None:
            return []
        product, chosen, actions = purchase
        attributes = rng.sample(product["Attributes"], rng.choice([1, 2]))
        goal = goal_for(product, attributes, chosen, draw_limit(rng, product["price"]))
        goal["instruction"] = instruction_of(rng, goal)
        return [dict(text=goal["instruction"], task=goal, solution=actions)]

    def written(self, task: str, proposal: dict) -> dict | None:
        """Converts a proposal of an explorer model to {text, task, solution}.

        Returns None unless all of these conditions hold:

        - The actions end with a purchase.
        - The text contains the type of the product, and at least one attribute.
        - The text contains exactly one price limit, which is above the price of the product.
        - The product has all attributes that the text mentions.
        - The actions choose all options that the text mentions.
        """
        text = proposal["query"]
        limits = re.findall(r"(?:than|under|below|\$)\s*\$?(\d+(?:\.\d+)?)", text.lower())
        purchase = self._purchase(task, proposal["action_sequence"])
        if purchase is None or len(limits) != 1:
            return None
        product, chosen, _ = purchase
        limit = float(limits[0])
        types, rest = phrases_in(text, [product["query"]])
        attributes, rest = phrases_in(rest, self.attributes)
        options, _ = phrases_in(rest.replace(f" {words_of(limits[0])} ", " | "), self.options)
        if not types or not attributes or limit <= product["price"]:
            return None
        if not {*attributes} <= {*product["Attributes"]} or not {*options} <= {*chosen}:
            return None
        wanted = [value for value in chosen if value in options]
        goal = goal_for(product, attributes, wanted, limit) | {"instruction": text}
        return dict(text=text, task=goal, solution=proposal["action_sequence"])

    def _purchase(self, task: str, replies: list[str]) -> tuple[dict, list[str], list[str]] | None:
        """Replays an episode, and returns None if it does not end with a purchase.

        Otherwise returns the product, the chosen options with the colour first, and the replies
        that changed the page.
        """
        executed = self._execute(self.shop.find(task), replies)
        page = self.shop.page
        if page.kind != "done":
            return None
        colour = dict(page.options).get("color")
        chosen = sorted((value for _, value in page.options), key=lambda value: value != colour)
        return self.products[page.item], chosen, [reply for reply, _ in executed]

    # ------------------------------------------------------------------ checks of proposals

    def key(self, goal: dict) -> tuple:
        """Returns a key that identifies equivalent goals.

        If two goals have the same key, every purchase of a product of their type earns the same
        reward for both. Instead of the price limit, the key contains the number of products of the
        goal's type that are within the limit.
        """
        within_limit = 0
        for product in self.products:
            within_limit += (product["query"] == goal["query"]
                             and product["price"] <= goal["price_upper"])
        return *goal_key(goal), within_limit

    def refusal(self, goal: dict) -> str | None:
        """Returns the reason why a goal cannot become a new task, or None."""
        if (self.key(goal) in self.training_keys or goal_key(goal) in self.evaluated
                or words_of(goal["instruction"]) in self.instructions):
            return "a goal of a split"
        fitting = [product for product in self.products if meets(product, goal)]
        if not fitting:
            return "no product meets it"
        if any(product["held_out"] for product in fitting):
            return "a held-out product meets it"
        # Check that the goal requests a colour. All products in `fitting` have all options of the
        # goal, so the colours of the first product suffice.
        if not {*fitting[0]["options"]["color"]} & {*goal["goal_options"]}:
            return "no colour chosen"
        if len(fitting) > MAX_FITTING:
            return f"more than {MAX_FITTING} products meet it"
        return None

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution. Returns None if it solves the goal, and otherwise the reason why not.
        """
        solution = proposal["solution"]
        if len(solution) > self.shop.max_turns:
            return "its solution is longer than an episode"
        executed = self._execute(proposal["task"], solution)
        if [reply for reply, _ in executed] != solution:
            return "an action of its solution is not executed"
        reward = self.shop.page.reward
        return None if reward == 1.0 else f"its solution earns {reward:.2f}"

    def _execute(self, goal: dict, replies: list[str]) -> list[tuple[str, str]]:
        """Plays an episode. Returns (reply, kind of action) for each reply that changed the page.
        """
        self.shop.start(goal)
        executed = []
        for reply in replies:
            before = self.shop.page
            self.shop.step(reply)
            after = self.shop.page
            if after is not before:
                _, argument = name_and_argument(self.shop.action(reply))
                executed.append((reply, kind_of(argument, goal, before, after)))
        return executed


def kind_of(argument: str, goal: dict, before: Page, after: Page) -> str:
    """Returns the kind of the action that led from one page to another, such as "open number 2"."""
    if after.kind == "done":
        wanted = {*goal["goal_options"]}
        return "buy as asked" if wanted <= {value for _, value in after.options} else (
            "buy without an option")
    if before.kind == "search":
        attributes = sum(attribute in argument for attribute in goal["attributes"])
        other = "" if goal["query"] in argument else " of another type"
        return f"search for {attributes} attributes{other}"
    if before.kind == "results" and after.kind == "item":
        products = [text for text in before.links if re.fullmatch("b0[a-z0-9]{8}", text)]
        return f"open number {products.index(argument) + 1}"
    if before.kind == after.kind == "item":
        requested = argument in goal["goal_options"]
        return "choose what was asked" if requested else "choose something else"
    return argument


def phrases_in(text: str, phrases) -> tuple[list[str], str]:
    """Returns the phrases that a text contains, and the text without these phrases.

    If two phrases overlap in the text, only the longer phrase is returned.
    """
    text = re.sub(r"[^a-z0-9|]+", " ", f" {text.lower()} ")
    contained = []
    for phrase in sorted(phrases, key=lambda phrase: (-len(phrase), phrase)):
        words = f" {words_of(phrase)} "
        if words in text:
            contained.append(phrase)
            text = text.replace(words, " | ")
    return contained, text
