"""Conversations as token ids: how a chat template writes them, and which ids are an agent's own.

`Encoder` is what a run uses: it makes the ids of an opening, of replies and of observations, and
with them the action mask. `Template` takes a chat template apart for it.
"""

import hashlib
from dataclasses import replace

from common.settings import UsageError
from dpo import Ids, Trajectory
from engine.sampling import Sampler


class Encoder:
    """Makes token ids of conversations: of an opening, and of replies and observations in turn.

    Each piece becomes ids once, when it comes. So ids that an agent sampled are never made anew of
    their text, and the action mask is made together with the ids: 1 on a reply up to its end of
    turn, 0 on all that the agent reads. It reads up to where the template asks for a reply. What
    else a template writes before one, such as Llama 2's blank, is the reply's.

    Args:
        tokenizer: Any tokenizer of transformers with a chat template.
        vocabulary_size: How many tokens the model's embedding has; else as many as the tokenizer.

    Raises:
        Refused: The pieces would not be what the template writes.
    """

    def __init__(self, tokenizer, vocabulary_size: int | None = None):
        self.tokenizer = tokenizer
        tokens = tokenizer.get_vocab().values()  # there may be gaps between them
        self.vocabulary_size = vocabulary_size or max(tokens) + 1
        self.valid_ids = {i for i in tokens if i < self.vocabulary_size}
        self.template = Template(tokenizer)
        self.special_tokens = self.template.special_tokens
        # Some tokenizers look for their tokens in the normalised text, by the normalised token.
        normalised = map(self.template.normalised, self.special_tokens)
        self.forgeries = sorted({*self.special_tokens, *normalised} - {""})
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.template.end)
        messages = conversation_that_templates_change()
        for turns in range(len(messages)):
            self.encode(messages[:turns + 1], opening=1)

    # The ids of pieces.

    def start(self, messages: list[dict]) -> Ids:
        """The ids of an opening, up to where the agent's first reply begins."""
        return self.tokenise(self.template.render(self.all_plain(messages), add_generation_prompt=True))

    def reply(self, text: str) -> Ids:
        """The ids of a reply in words and of its end of turn."""
        said = self.plain(text, is_reply=True)
        piece = self.template.before_reply + said + self.template.after_reply
        return self.ids_after(self.template.asked, piece)

    def observation(self, text: str) -> Ids:
        """The ids from a reply's end of turn to where the next reply begins."""
        before, after = self.template.before_observation, self.template.after_observation
        return self.ids_after(self.template.end, before + self.plain(text) + after)

    def plain(self, text: str, is_reply: bool = False) -> str:
        """The text without control tokens, with which its author could open or end a turn, and
        without blanks around it; those around a reply stay, if the template keeps them."""
        if not isinstance(text, str):
            raise UsageError(f"a turn says {text!r:.60}, which is no text; mend who says it")
        if text != text.encode(errors="replace").decode():
            raise UsageError(f"a turn says {text!r:.60}, with half a character (a surrogate without "
                           "the other); mend who says it")
        text = broken(text, self.special_tokens)
        normal = self.template.normalised(text)
        if any(token in normal for token in self.forgeries):  # variants of tokens
            text = broken(normal, self.forgeries)
        return text if is_reply and self.template.keeps_whitespace else text.strip()

    def all_plain(self, messages: list[dict]) -> list[dict]:
        plain = []
        for message in messages:
            content = self.plain(message["content"], message["role"] == "assistant")
            plain.append({**message, "content": content})
        return plain

    def ids_after(self, context: str, text: str) -> Ids:
        """The ids of a text as they are behind the context."""
        before = self.tokenise(context)
        ids = self.tokenise(context + text)
        if ids[:len(before)] != before:
            self.template.refuse(
                f"its tokens of {context[-20:]!r} change with what follows; use another")
        return ids[len(before):]

    def tokenise(self, text: str) -> Ids:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        largest = max(ids, default=0)
        if largest >= self.vocabulary_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            self.template.refuse(
                f"its token {token!r} ({largest}) has no row in the model's embedding of "
                f"{self.vocabulary_size:,}; resize the embedding, or use the model's own tokenizer")
        return ids

    # Whole conversations.

    def encode(self, messages: list[dict], opening: int) -> tuple[Ids, Ids]:
        """Encodes a conversation of which the first messages are its opening.

        Args:
            messages: Turns, {role, content}: an opening, then replies and observations in turn.
            opening: How many messages come before the first reply that is an action.

        Returns:
            The ids and the action mask, (l,) each.

        Raises:
            Refused: The ids are not those of the template's text of the whole conversation.
        """
        for number, message in enumerate(messages, 1):
            if set(message) != {"role", "content"}:
                raise UsageError(f"turn {number} has {', '.join(message)}; give it role and content, "
                               "and nothing else")
        t = Trajectory()
        t.extend(self.start(messages[:opening]), is_action=False)
        for number, message in enumerate(messages[opening:], opening + 1):
            if message["role"] == "assistant":
                self.check_blanks(message["content"], number)
                t.extend(self.reply(message["content"]), is_action=True)
            else:
                t.extend(self.observation(message["content"]), is_action=False)

        whole = self.tokenise(self.template.render(
            self.all_plain(messages), add_generation_prompt=messages[-1]["role"] != "assistant"))
        if messages[-1]["role"] == "assistant":
            # What follows the last end of turn, a line break in ChatML, opens the next observation.
            whole = whole[:len(t.ids)]
        if whole != t.ids:
            roles = ", ".join(message["role"] for message in messages[:4])
            self.template.refuse(
                f"its chat template writes {len(messages)} turns ({roles} ...) otherwise than turn "
                "by turn; give user and assistant in turn, and use an Instruct model that does not "
                "think, number turns or change what they say")
        return t.ids, t.action_mask

    def check_blanks(self, reply: str, turn: int) -> None:
        """Refused where a reply begins with blanks that the template takes away."""
        if isinstance(reply, str) and reply[:1].isspace() and not self.template.keeps_whitespace:
            self.template.refuse(f"turn {turn} begins with blanks, which its chat template takes "
                                 "away; take them out, or use another model")

    def decode(self, ids: Ids) -> str:
        """The text of ids, as it is, but for ends of turn."""
        ids = [i for i in ids if i != self.end_of_turn]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def close(self, ids: Ids, stops: tuple[str, ...]) -> tuple[Ids, Ids, str]:
        """Ends a sampled reply, before the first of the texts `stops` that is in it.

        Returns:
            The sampled ids that stay; the end of turn, if those lack it, else nothing; and the
            reply, which is the text of those that stay.
        """
        text = self.decode(ids)
        found = [text.index(stop) for stop in stops if stop in text]
        if not found:
            if ids[-1] == self.end_of_turn:
                return ids, [], text.strip()
            return ids, [self.end_of_turn], text.strip()

        wanted = text[:min(found)]
        size = len(ids)
        while len(self.decode(ids[:size])) > len(wanted):
            size -= 1
        # One token may hold the reply's last letters and blanks of the stop, such as "]\n".
        reply = self.decode(ids[:size]).strip()
        longer = self.decode(ids[:size + 1]).strip()
        if reply != wanted.strip() and longer == wanted.strip():
            return ids[:size + 1], [self.end_of_turn], longer
        return ids[:size], [self.end_of_turn], reply

    def reply_ends(self, t: Trajectory) -> list[int]:
        """The places in t.ids of the ends of its replies, (t.turns,), if it ends with a reply. Each
        reply has an end of turn, also one that the agent did not write."""
        ends = []
        for place, token in enumerate(t.ids):
            if token == self.end_of_turn:
                ends.append(place)
        # Most templates end what an agent reads by the same token, too. Then, counted from the last
        # one, every second is a reply's.
        stride = 1 + self.observation("").count(self.end_of_turn)
        last_first = ends[::-1][::stride]
        return sorted(last_first[:t.turns])

    def cut(self, t: Trajectory, replies: int) -> Trajectory:
        """The trajectory up to the end of its reply number `replies`."""
        if replies >= t.turns:
            return t
        size = self.reply_ends(t)[replies - 1] + 1
        return replace(t, ids=t.ids[:size], action_mask=t.action_mask[:size], turns=replies,
                       ended="turn_limit")

    def without_ends(self, t: Trajectory) -> Trajectory:
        """The trajectory with a mask that leaves out what ends turns and what ended the episode,
        which is all of its last reply; unless nothing would be left."""
        ends = self.reply_ends(t)
        mask = list(t.action_mask)
        for end in ends:
            mask[end] = 0
        if t.ended == "done" and len(ends) > 1:
            last = ends[-2] + 1
            mask[last:] = [0] * len(mask[last:])
        return replace(t, action_mask=mask) if any(mask) else t

    def sampler(self, temperature: float = 1.0) -> Sampler:
        """The distribution that agents sample from: of all tokens but those that are no text, which
        are control tokens, the end of turn excepted, and rows of the embedding without a token."""
        control = self.tokenizer.convert_tokens_to_ids(self.special_tokens)
        drawn = self.valid_ids - set(control) | {self.end_of_turn}
        never = set(range(self.vocabulary_size)) - drawn
        return Sampler(temperature, tuple(sorted(never)), self.vocabulary_size)

    def fingerprint(self) -> str:
        """What tells ids of this encoder from another's: template, control tokens, tokenizer."""
        words = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            words = self.tokenizer.backend_tokenizer.to_str()
        known = repr([self.template.text, self.special_tokens, words])
        return hashlib.sha256(known.encode()).hexdigest()[:16]


def broken(text: str, tokens: list[str]) -> str:
    """Returns a text in which each of these tokens is broken up, so that it is text alone."""
    for token in tokens:
        if len(token) == 1:
            text = text.replace(token, f"U+{ord(token):04X}")
        else:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def conversation_that_templates_change() -> list[dict]:
    """Twelve turns, which some templates number. They say what some leave out (a thought), escape
    (quotes, brackets), squeeze (blanks and empty lines) or shorten (long texts)."""
    messages = []
    for n in range(6):
        for role in ["user", "assistant"]:
            content = (f"<think>a {n}</think> It's [{n}] & <b>\"c\"</b>, {{'d': \"e\"}}\n\n\n"
                       f"f  g\n\n```h```\n{'long text ' * 20}{role} {n}.")
            messages.append(dict(role=role, content=content))
    return messages


# Some templates write today's date. What an agent reads must not change at midnight, and a saved
# agent reads in anybody's tools what it was trained on: the date that Llama 3 falls back on. It
# stands in front of such a template.
FIXED_DATE = """{%- macro strftime_now(form) -%}
    {{- form | replace("%d", "26") | replace("%m", "07") | replace("%Y", "2024")
        | replace("%y", "24") | replace("%b", "Jul") | replace("%B", "July")
        | replace("%a", "Fri") | replace("%A", "Friday") -}}
{%- endmacro -%}"""


class Template:
    r"""A tokenizer's chat template: how it writes a conversation as one text.

    ChatML, for example, writes this, where \n is a line break. Llama 2 and others differ in what
    stands between the contents alone:

        <|im_start|>user\nbuy a mug<|im_end|>\n<|im_start|>assistant\n       the opening
        click[mug]<|im_end|>                                               a reply
        \n<|im_start|>user\nBought.<|im_end|>\n<|im_start|>assistant\n        an observation

    Args:
        tokenizer: Any tokenizer of transformers.

    Raises:
        Refused: There is no template, or none that can be taken apart like this.
    """

    # What it writes around contents, in the example above:
    before_reply: str        # nothing; a space in Llama 2
    after_reply: str         # <|im_end|>
    before_observation: str  # \n<|im_start|>user\n
    after_observation: str   # <|im_end|>\n<|im_start|>assistant\n
    end: str                 # <|im_end|>, the control token that ends a reply
    asked: str               # an opening, up to where the agent replies
    keeps_whitespace: bool       # whether blanks around a reply stay
    special_tokens: list[str]  # tokens that are no text: special ones, and others that mark turns

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            self.refuse("it has no chat template; use a chat model")
        try:
            self.text = tokenizer.get_chat_template()
        except ValueError:
            self.refuse(f"of its chat templates, {', '.join(tokenizer.chat_template)}, none is "
                        "called default; save it with one alone")
        if "strftime_now" in self.text and FIXED_DATE not in self.text:
            self.text = FIXED_DATE + self.text

        # A conversation whose contents are marks shows what stands between contents.
        mark = "CONTENT"
        while mark in self.text:
            mark += "X"
        user = dict(role="user", content=mark)
        assistant = dict(role="assistant", content=mark)
        pieces = self.render([user, assistant, user], add_generation_prompt=True).split(mark)
        closing = self.render([user, assistant], add_generation_prompt=False).split(mark)[-1]
        changes = ("its chat template changes a turn that was answered; use an Instruct model that "
                   "does not think")
        if len(pieces) != 4:  # what stands before, between and behind three contents
            self.refuse(changes)
        special_tokens = self.markers_in("".join([*pieces, closing]))
        self.special_tokens = sorted(special_tokens)
        blank = dict(role="assistant", content=f"  {mark}  ")
        self.keeps_whitespace = f"  {mark}  " in self.render([user, blank], add_generation_prompt=False)
        opening, to_reply, to_observation, self.after_observation = pieces
        if not to_reply.startswith(self.after_observation):
            self.refuse(changes)
        self.asked = opening + mark + self.after_observation

        # All that stands before a reply has to come from the template where it asks for one. Else
        # agents would have to write it themselves, and would be trained to.
        self.before_reply = to_reply.removeprefix(self.after_observation)
        if self.before_reply.strip():
            self.refuse(f"its chat template does not write {self.before_reply!r} where it asks for "
                        "a reply (add_generation_prompt); use another model")

        # The first control token behind a reply ends it. What follows opens the next observation.
        ends = [token for token in special_tokens if token in closing]
        if not ends:
            self.refuse("no control token ends a reply in its chat template; use a chat model")
        self.end = min(ends, key=closing.index)
        size = closing.index(self.end) + len(self.end)
        self.after_reply = closing[:size]
        self.before_observation = to_observation[size:]

    def markers_in(self, text: str) -> set[str]:
        """The tokenizer's special tokens, and other tokens that were added to it and that the
        template writes, but for words and blanks."""
        found = {token for token in self.tokenizer.all_special_tokens if token}
        for token in self.tokenizer.added_tokens_decoder.values():
            marks = str(token) in text and not str(token).isalnum() and str(token).strip()
            if token.special or marks:
                found.add(str(token))
        return found

    def normalised(self, text: str) -> str:
        """The text as the tokenizer reads it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is None:
            return text
        return backend.normalizer.normalize_str(text)

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """The text of a conversation; go_on: up to where the next reply begins."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.text, add_generation_prompt=add_generation_prompt, tokenize=False)
        except Exception as error:  # whatever a template does
            self.refuse(f"its chat template fails: {first_line(error)}; use another model")

    def refuse(self, why: str):
        raise UsageError(f"--model {self.tokenizer.name_or_path}: its tokenizer cannot be used: {why}")


def first_line(error: Exception) -> str:
    """What an error says, in a line; with its kind where that is a word alone."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if " " in lines[0] else f"{type(error).__name__} {lines[0]}".strip()
