"""What a chat template writes around a reply and around an observation, and the ids of both.

A conversation grows at its end only, so its text is a row of pieces:

    opening | before_reply REPLY end | after before_observation OBSERVATION after_observation | ...
"""

from functools import lru_cache

WORD = "CONTENT"  # stands for what others write; unlikely in a template
UNKNOWN = " \ue000"  # a character for private use, which no vocabulary has
ANSWERED = [{"role": "user", "content": "question"}, {"role": "assistant", "content": WORD}]
# A conversation that shows the faults of a template, such as hiding what a model thought before.
TRIAL = ANSWERED + [{"role": "user", "content": "second"},
                    {"role": "assistant", "content": "<think>a</think> b"},
                    {"role": "user", "content": "third"}, {"role": "assistant", "content": "c"}]


class Pieces:
    """The pieces of a tokenizer's chat template, and the ids of what stands between them.

    A control token in a text that others wrote is plain text; so is the token that the tokenizer
    names unknown, which in many is the end of a text or of a turn. ValueError, naming the problem,
    if there is no template, if a turn changes once answered, or if nothing marks a reply's end.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        self.special = special = {t for t in tokenizer.all_special_tokens if t}  # control tokens
        special |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self.control = set(tokenizer.convert_tokens_to_ids(sorted(special)))  # their ids
        self.unknown = tokenizer.unk_token_id  # may stand for characters without an id
        # The control tokens of a text that nobody but the template wrote.
        self.controls_in = lru_cache(None)(lambda template: self.controls(self.ids(template)))
        if not tokenizer.chat_template:
            raise ValueError(f"{self.name}: the tokenizer has no chat template; use a chat model")
        # The text of an opening, up to `before_reply`.
        self.prompt = self.render(ANSWERED[:1], True)
        full = self.render(ANSWERED, False)
        asked = self.render(ANSWERED + [{"role": "user", "content": WORD}], True)
        last = next((t for t in special if full.endswith(t)), "")
        if not asked.startswith(full) and asked.startswith(full.removesuffix(last)):
            raise ValueError(f"{self.name}: its chat template ends a conversation with {last!r} "
                             "and takes that back when it goes on; use a template without it")
        if not (full.startswith(self.prompt) and full[len(self.prompt):].count(WORD) == 1
                and asked.startswith(full) and asked[len(full):].count(WORD) == 1):
            raise ValueError(f"{self.name}: its chat template rewrites a turn once it is answered; "
                             "use a template without that (an Instruct model that does not think)")
        self.before_reply, rest = full[len(self.prompt):].split(WORD)
        self.end_token = min((t for t in special if t in rest), key=rest.index, default=None)
        if self.end_token is None:
            raise ValueError(f"{self.name}: its chat template ends a reply with {rest!r}, which "
                             "holds no special token to stop at")
        cut = rest.index(self.end_token) + len(self.end_token)
        self.end, self.after = rest[:cut], rest[cut:]  # what the template writes after that token
        self.before_observation, self.after_observation = asked[len(full):].split(WORD)
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.end_token)
        self.suppress_tokens = sorted(self.control - {self.end_of_turn})
        if tokenizer.unk_token and tokenizer.unk_token in asked:
            self.unknown = None  # as a mark of turns it may not stand for characters as well
        self.ids_of_observation(" ".join(sorted(special)) + UNKNOWN)  # the worst page

    def ids_of_opening(self, messages: list[dict]) -> list[int]:
        *earlier, last = messages
        probe = self.render([*earlier, {**last, "content": WORD}], True)
        before, after = probe.rsplit(WORD, 1)
        return self.ids_after("", before, last["content"].strip(), after)

    def ids_of_reply(self, text: str) -> list[int]:
        return self.ids_after(self.prompt, self.before_reply, text.strip(), self.end)

    def ids_of_observation(self, text: str) -> list[int]:
        return self.ids_after(self.end_token, self.after + self.before_observation, text.strip(),
                              self.after_observation)

    def check(self, messages: list[dict], first: int) -> None:
        """ValueError if the template, given all at once, writes another text than turn by turn, of
        which the conversation opens with the `first` ones."""
        text = self.render(messages[:first], True)
        for m in messages[first:]:
            content = m["content"].strip()
            text += (self.before_reply + content + self.end if m["role"] == "assistant" else
                     self.after + self.before_observation + content + self.after_observation)
        acted_last = messages[-1]["role"] == "assistant"
        text += self.after if acted_last else ""
        whole = self.render(messages, not acted_last)
        if text != whole:
            at = next((i for i, (a, b) in enumerate(zip(text, whole)) if a != b), len(whole))
            raise ValueError(f"{self.name}: its chat template rewrites earlier turns (near "
                             f"{whole[max(0, at - 20):at + 20]!r}); use a template without that")

    def render(self, messages: list[dict], to_reply: bool) -> str:
        messages = [{**m, "content": m["content"].strip()} for m in messages]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_reply)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self.control]

    def ids_after(self, context: str, before: str, content: str, after: str) -> list[int]:
        """Ids of before + content + after as they follow `context`: some tokenizers look back."""
        start = self.ids(context) if context else []
        ids = self.ids(context + before + content + after)
        if self.controls(ids) != self.controls_in(context + before + after):
            plain = self.tokenizer(content, add_special_tokens=False,
                                   split_special_tokens=True)["input_ids"]
            found = set(self.controls(plain))
            same = plain == self.ids(content)  # nothing in it is a control token's text
            if found - {self.unknown} or (
                    same and self.tokenizer.unk_token and self.tokenizer.unk_token in content):
                raise ValueError(f"{self.name}: it cannot encode its control tokens as plain text "
                                 f"({', '.join(self.tokenizer.convert_ids_to_tokens([*found]))}), "
                                 "so that whoever writes them ends a turn; use another tokenizer")
            if not (found and same):  # which are characters that it does not know
                tail = self.ids("x" + after)[len(self.ids("x")):]
                ids = self.ids(context + before) + plain + tail
        if ids[:len(start)] != start:
            raise ValueError(f"{self.name}: tokens of {context[-20:]!r} change with what follows; "
                             "this tokenizer cannot encode a conversation turn by turn")
        return ids[len(start):]
