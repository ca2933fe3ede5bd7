"""Learning and sampling: from conversations to tokens, from tokens to a loss, a step, or a reply.

A model is asked for the logits of its plain forward and for replies of `generate` alone, so that
any causal language model of transformers will do. Equations are those of arXiv 2511.22254: a task
u, a trajectory e of it, its action tokens t_k, a policy pi.

Shapes: B trajectories of L tokens in a pass, which is one forward; T trajectories with A action
tokens in all, and P pairs, in some groups; V words. Log-probabilities are in nats.
"""

import gc
import hashlib
import inspect
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence


class Unusable(ValueError):
    """A model, tokenizer, template or conversation cannot be used; one line with the remedy."""


Ids = list[int]  # token ids, or a mask beside them

# ------------------------------------------------------------------------------------ encoding


@dataclass
class Trajectory:
    """A trajectory e of a task u, whole or as far as it has come; a line of a .jsonl file."""
    task: str = ""
    agent: str = ""                  # the name of who played it
    iteration: int = 0               # of the loop, in which it was played
    rollout: int = 0                 # its number among those of one task, agent and iteration
    seed: int = 0                    # of its own random numbers
    messages: list[dict] = field(default_factory=list)    # the conversation, {role, content}
    ids: Ids = field(default_factory=list)          # (l,) read and written, in order
    action_mask: Ids = field(default_factory=list)  # (l,) 1: an action token
    log_probs: list[float] = field(default_factory=list)  # of action tokens, as they were sampled
    reward: float = 0.0              # in [0, 1]; by ETO's protocol from -1
    raw_reward: float | None = None  # before clipping, where the environment clips
    steps: int = 0                   # how many replies it has
    ended: str = ""                  # done, budget (of replies) or context (of tokens)

    def extend(self, ids: Ids, is_action: bool) -> None:
        self.ids += ids
        self.action_mask += [int(is_action)] * len(ids)

    @property
    def action_count(self) -> int:
        """The number of action tokens that are predicted, which the very first token is not."""
        return sum(self.action_mask[1:])


# Some templates write today's date. What an agent reads must not change at midnight, so that all
# runs read the date that Llama 3 falls back on. It stands in front of the template.
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
        control_tokens: Its tokens that are no text.

    Raises:
        Unusable: There is no template, or none that can be taken apart like this.
    """

    # What it writes around contents, in the example above:
    before_reply: str        # nothing; a space in Llama 2
    after_reply: str         # <|im_end|>
    before_observation: str  # \n<|im_start|>user\n
    after_observation: str   # <|im_end|>\n<|im_start|>assistant\n
    end: str                 # <|im_end|>, the control token that ends a reply
    asked: str               # an opening, up to where the agent replies

    def __init__(self, tokenizer, control_tokens: list[str]):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            self.refuse("it has no chat template; use a chat model")
        self.text = FIXED_DATE + tokenizer.get_chat_template()

        # A conversation whose contents are marks shows what stands between contents.
        mark = "CONTENT"
        while mark in self.text:
            mark += "X"
        user = dict(role="user", content=mark)
        assistant = dict(role="assistant", content=mark)
        pieces = self.render([user, assistant, user], go_on=True).split(mark)
        closing = self.render([user, assistant], go_on=False).split(mark)[-1]
        changes = ("its chat template changes a turn that was answered; use an Instruct model that "
                   "does not think")
        if len(pieces) != 4:  # what stands before, between and behind three contents
            self.refuse(changes)
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
        ends = [token for token in control_tokens if token in closing]
        if not ends:
            self.refuse("no control token ends a reply in its chat template; use a chat model")
        self.end = min(ends, key=closing.index)
        size = closing.index(self.end) + len(self.end)
        self.after_reply = closing[:size]
        self.before_observation = to_observation[size:]

    def render(self, messages: list[dict], go_on: bool) -> str:
        """The text of a conversation; go_on: up to where the next reply begins."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.text, add_generation_prompt=go_on, tokenize=False)
        except Exception as error:  # whatever a template does
            self.refuse(f"its chat template fails: {first_line(error)}; use another model")

    def refuse(self, why: str):
        raise Unusable(f"the tokenizer of {self.tokenizer.name_or_path}: {why}")


class Encoder:
    """Makes token ids of conversations: of an opening, and of replies and observations in turn.

    Each piece becomes ids once, when it comes. So ids that an agent sampled are never made anew of
    their text, and the action mask is made together with the ids: 1 on a reply up to its end of
    turn, 0 on all that the agent reads. What opens a reply belongs to what it reads.

    Args:
        tokenizer: Any tokenizer of transformers with a chat template.
        rows: How many tokens the model's embedding has; else as many as the tokenizer.

    Raises:
        Unusable: The pieces would not be what the template writes.
    """

    def __init__(self, tokenizer, rows: int | None = None):
        self.tokenizer = tokenizer
        tokens = tokenizer.get_vocab().values()  # there may be gaps between them
        self.rows = rows or max(tokens) + 1
        self.known = {i for i in tokens if i < self.rows}
        control_tokens = set(tokenizer.all_special_tokens)
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                control_tokens.add(str(token))
        self.control_tokens = sorted(control_tokens - {""})
        self.template = Template(tokenizer, self.control_tokens)
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.template.end)
        messages = conversation_that_templates_change()
        for turns in range(len(messages)):
            self.encode(messages[:turns + 1], opening=1)

    # The ids of pieces.

    def start(self, messages: list[dict]) -> Ids:
        """The ids of an opening, up to where the agent's first reply begins."""
        return self.tokenise(self.template.render(self.all_plain(messages), go_on=True))

    def reply(self, text: str) -> Ids:
        """The ids of a reply in words and of its end of turn."""
        piece = self.template.before_reply + self.plain(text) + self.template.after_reply
        return self.ids_after(self.template.asked, piece)

    def observation(self, text: str) -> Ids:
        """The ids from a reply's end of turn to where the next reply begins."""
        before, after = self.template.before_observation, self.template.after_observation
        return self.ids_after(self.template.end, before + self.plain(text) + after)

    def plain(self, text: str) -> str:
        """The text without control tokens, with which its author could open or end a turn."""
        if not isinstance(text, str):
            raise Unusable(f"a turn says {text!r:.60}, which is no text; mend who says it")
        if text != text.encode(errors="replace").decode():
            raise Unusable(f"a turn says {text!r:.60}, with half a character (a surrogate without "
                           "the other); mend who says it")
        for token in self.control_tokens:
            if len(token) == 1:
                text = text.replace(token, f"U+{ord(token):04X}")
            else:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text.strip()

    def all_plain(self, messages: list[dict]) -> list[dict]:
        plain = []
        for message in messages:
            plain.append({**message, "content": self.plain(message["content"])})
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
        if largest >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            self.template.refuse(
                f"its token {token!r} ({largest}) has no row in the model's embedding of "
                f"{self.rows:,}; resize the embedding, or use the model's own tokenizer")
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
            Unusable: The ids are not those of the template's text of the whole conversation.
        """
        for number, message in enumerate(messages, 1):
            if set(message) != {"role", "content"}:
                raise Unusable(f"turn {number} has {', '.join(message)}; give it role and content, "
                               "and nothing else")
        t = Trajectory()
        t.extend(self.start(messages[:opening]), is_action=False)
        for message in messages[opening:]:
            if message["role"] == "assistant":
                t.extend(self.reply(message["content"]), is_action=True)
            else:
                t.extend(self.observation(message["content"]), is_action=False)

        whole = self.tokenise(self.template.render(
            self.all_plain(messages), go_on=messages[-1]["role"] != "assistant"))
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

    def decode(self, ids: Ids) -> str:
        """The text of ids, as it is, but for ends of turn."""
        ids = [i for i in ids if i != self.end_of_turn]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def read_back(self, text: str) -> str:
        """What an environment would get of a reply, if an agent sampled the reply's own ids."""
        return self.decode(self.reply(text)).strip()

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
        """The places in t.ids of the ends of its replies, (t.steps,), if it ends with a reply. Each
        reply has an end of turn, also one that the agent did not write."""
        ends = []
        for place, token in enumerate(t.ids):
            if token == self.end_of_turn:
                ends.append(place)
        # Most templates end what an agent reads by the same token, too. Then, counted from the last
        # one, every second is a reply's.
        stride = 1 + self.observation("").count(self.end_of_turn)
        last_first = ends[::-1][::stride]
        return sorted(last_first[:t.steps])

    def sampler(self, temperature: float = 1.0) -> "Sampler":
        """The distribution that agents sample from: of all tokens but those that are no text, which
        are control tokens, the end of turn excepted, and rows of the embedding without a token."""
        control = self.tokenizer.convert_tokens_to_ids(self.control_tokens)
        drawn = self.known - set(control) | {self.end_of_turn}
        never = set(range(self.rows)) - drawn
        return Sampler(temperature, tuple(sorted(never)))

    def fingerprint(self) -> str:
        """What tells ids of this encoder from another's: template, control tokens, words."""
        words = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            words = self.tokenizer.backend_tokenizer.to_str()
        known = repr([self.template.text, self.control_tokens, self.rows, words])
        return hashlib.sha256(known.encode()).hexdigest()[:16]


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


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --------------------------------------------------------------------------- log-probabilities


@dataclass(frozen=True)
class Sampler:
    """The distribution that an agent samples from: softmax(logits / temperature) over the tokens
    that are not in `never`. As it stands it is the model's own, over the whole vocabulary.

    Tokens that are never drawn are never pushed down either. If log-probabilities counted them,
    their mass would grow with each push on the others."""
    temperature: float = 1.0     # 0: the most probable token, for certain
    never: tuple[int, ...] = ()  # ids that are not drawn

    def apply(self, logits: Tensor) -> Tensor:
        """A model's logits, (..., V), as those whose softmax is the distribution, float32."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature > 0:
            logits = logits / self.temperature
        return logits.index_fill(-1, index_of(self.never, logits.device), -torch.inf)


@lru_cache(maxsize=None)
def index_of(ids: tuple[int, ...], device) -> Tensor:
    """Ids as an index on a device. It is copied there once, since the host waits for each copy."""
    with torch.inference_mode(False):  # else what is sampled first could not be trained on
        return torch.tensor(ids, dtype=torch.long, device=device)


def token_log_probs(model, trajectories: list[Trajectory], sampler: Sampler = Sampler()) -> Tensor:
    """Computes log pi(t_k | t_<k) of every action token t_k by one pass; pi is the sampler's.

    Returns:
        (A,) nats, of the trajectories laid end to end.
    """
    device = next(model.parameters()).device
    # Padding stands behind all that matters. A causal model needs no attention mask to ignore it.
    ids = padded([t.ids for t in trajectories]).to(device)                        # (B, L)
    mask = padded([t.action_mask for t in trajectories]).to(device)               # (B, L)

    # The logits at one place are for the token at the next.
    targets = ids[:, 1:]                                                          # (B, L-1)
    is_action = mask[:, 1:].bool()                                                # (B, L-1)

    # Logits are made only where the next token of some row is an action: most of it is read.
    places = is_action.any(0).nonzero()[:, 0]                                     # (K,)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits
    else:
        logits = model(input_ids=ids, use_cache=False).logits[:, places]          # (B, K, V)
    logits = logits[is_action[:, places]]                                         # (A, V)

    # log pi(t_k | t_<k) = log softmax(logits)[t_k]
    return -F.cross_entropy(sampler.apply(logits), targets[is_action], reduction="none")


def padded(rows: list[Ids], side: str = "right") -> Tensor:
    """Rows as one tensor, (B, L), with 0 where they are shorter than the longest."""
    rows = [torch.tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=0, padding_side=side)


def log_probs_in_passes(accelerator, model, trajectories: list[Trajectory], tokens: int,
              sampler: Sampler = Sampler()) -> Tensor:
    """Computes `token_log_probs` of many trajectories, by several passes that the ranks share.

    Args:
        accelerator: accelerate's, which knows ranks, device and precision.
        model: One that is whole on each rank, or in parts over all (FSDP2).
        trajectories: The same ones on all ranks.
        tokens: Of a pass at most, with padding; 0: each trajectory is a pass of its own.
        sampler: What pi is.

    Returns:
        (A,) nats, the same ones on all ranks. Gradients flow into the rank's own passes.
    """
    rank = accelerator.process_index
    ranks = accelerator.num_processes
    device = accelerator.device
    lengths = [len(t.ids) for t in trajectories]
    found = [torch.zeros(t.action_count, device=device) for t in trajectories]
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for passes in deal(lengths, tokens, ranks):
            # All ranks have to meet in a pass. One without work repeats a text, and forgets it.
            works = rank < len(passes)
            places = passes[rank] if works else passes[-1][-1:]
            some = [trajectories[place] for place in places]
            values = int(works) * token_log_probs(model, some, sampler)
            parts = values.split([t.action_count for t in some])
            for place, part in zip(places, parts):
                found[place] = found[place] + part
    mine = torch.cat(found)                                                       # (A,)
    if ranks == 1:
        return mine

    # The value is the sum over ranks: each has filled in what it has run, and left the rest 0. The
    # gradient is that of this rank's passes, times `ranks`, since the optimiser loop and FSDP
    # average gradients over ranks, where the loss asks for their sum.
    value = accelerator.reduce(mine.detach())
    gradient = ranks * (mine - mine.detach())  # zeros, whose gradient counts
    return value + gradient


def action_log_probs(per_token: Tensor, trajectories: list[Trajectory]) -> Tensor:
    """Adds up log pi(e|u) of each trajectory, (T,) float64, from those of its tokens, (A,)."""
    # The trajectory of each action token: 0, 0, 0, 1, 1, ...
    counts = torch.tensor([t.action_count for t in trajectories], dtype=torch.long)
    owners = torch.arange(len(counts)).repeat_interleave(counts).to(per_token.device)  # (A,)
    # Eq. (2), (5): log pi(e|u) = sum_k log pi(t_k | t_<k) over action tokens t_k. What the agent
    # reads only conditions. In float32 hundreds of nats would lose more than a late step changes.
    zeros = per_token.new_zeros(len(trajectories), dtype=torch.float64)
    return zeros.index_add(0, owners, per_token.double())


# -------------------------------------------------------------------------------------- passes
# Which trajectories are run in which pass, and by which rank. Nothing depends on it but time.

LIMITS = 64   # sizes of passes that are tried where ranks share them [ours]
FLOOR = 1024  # tokens: a pass of fewer hardly takes less time than one of so many [ours]
Pass = list[int]  # of which trajectories it is, by their places; the longest is the first


def deal(lengths: list[int], tokens: int, ranks: int) -> list[list[Pass]]:
    """Shares trajectories among ranks. In each round every rank runs one pass, and waits for the
    slowest.

    Args:
        lengths: The tokens of each trajectory, (T,).
        tokens: Of a pass at most, with padding; 0: each trajectory is a pass of its own.
        ranks: How many passes run at the same time.

    Returns:
        Rounds of at most `ranks` passes.
    """
    if ranks == 1:
        return [[one] for one in fill_passes(lengths, tokens)]

    # Large passes are best for each rank, but where some are left over the others idle.
    best = []
    least = math.inf
    for part in range(LIMITS, 0, -1):
        passes = fill_passes(lengths, tokens * part / LIMITS)
        passes.sort(key=lambda one: cost(one, lengths), reverse=True)
        rounds = []
        time = 0
        for first in range(0, len(passes), ranks):
            rounds.append(passes[first:first + ranks])
            time += max(FLOOR, cost(passes[first], lengths))
        if time < least:
            best = rounds
            least = time
    return best


def cost(one: Pass, lengths: list[int]) -> int:
    """The tokens of a pass with padding, in which all rows are as long as the longest."""
    return len(one) * lengths[one[0]]


def fill_passes(lengths: list[int], limit: float) -> list[Pass]:
    """Passes that cost at most so many tokens, or are of one trajectory that has more. The longest
    come first, so that those of a pass are of like length and little is padded."""
    passes = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not passes or cost(passes[-1], lengths) + lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(place)
    return passes


# -------------------------------------------------------------------------------------- losses
# loss(policy, groups) -> the sum over the groups, (), and what its log is made of: sums by kind and
# name, one of them the count. policy: log pi of all action tokens of the groups, (A,), in nats.


@dataclass(frozen=True)
class Pair:
    """A preference between two trajectories of a group, given by their places in it."""
    kind: str
    chosen: int
    rejected: int
    weight: float = 1.0      # of the DPO term
    sft_weight: float = 0.0  # of the SFT term on the chosen trajectory


@dataclass
class Group:
    """A task: its distinct trajectories, each of which a model reads once, and its pairs."""
    trajectories: list[Trajectory]
    pairs: list[Pair] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)  # log pi_ref(e|u) of each; empty: 0


def trajectories_of(groups: list[Group]) -> list[Trajectory]:
    """All trajectories of the groups, in order, (T,)."""
    found = []
    for group in groups:
        found += group.trajectories
    return found


def references_of(groups: list[Group]) -> list[float]:
    """log pi_ref(e|u) of each of them, (T,)."""
    found = []
    for group in groups:
        if group.reference:
            found += group.reference
        else:
            found += [0.0] * len(group.trajectories)
    return found


def sft_loss(policy: Tensor, groups: list[Group]) -> tuple[Tensor, dict]:
    """Eq. (3)-(5), summed over the groups' trajectories."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions
    return -policy.double().sum(), {}


def dpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor,
             reference_rejected: Tensor, s) -> tuple[Tensor, Tensor]:
    """Eq. (7) of each pair, from log pi(e|u) and log pi_ref(e|u) of its two trajectories.

    Args:
        policy_chosen, policy_rejected: log pi of the two, (P,) each.
        reference_chosen, reference_rejected: log pi_ref of the two, (P,) each.
        s: Settings; their beta is asked for.

    Returns:
        The losses and the margins, (P,) each.
    """
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) )
    margin = s.beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def preference_loss(policy: Tensor, groups: list[Group], s) -> tuple[Tensor, dict]:
    """Eq. (9), summed over the groups' pairs: weighted DPO plus SFT on the chosen trajectory.

    With lambda_dpo 1 and every sft_weight 0 it is Eq. (7), the failure agent's loss. It asks the
    settings s for beta, lambda_dpo, lambda_sft, log_prob and sft_term."""
    chosen, rejected = places_of_pairs(groups)                                    # (P,) each
    pi = action_log_probs(policy, trajectories_of(groups))                        # (T,)
    ref = pi.new_tensor(references_of(groups))                                    # (T,)
    counts = pi.new_tensor([t.action_count for t in trajectories_of(groups)])     # (T,)

    # The preference, of log-probabilities that are sums over action tokens, or means.
    pi_scored = pi
    ref_scored = ref
    if s.log_prob == "mean":
        pi_scored = pi / counts
        ref_scored = ref / counts
    preference, margin = dpo_loss(pi_scored[chosen], pi_scored[rejected],
                                  ref_scored[chosen], ref_scored[rejected], s)    # (P,) each

    # The imitation of the chosen trajectory, -log pi(e_w|u), or its mean over action tokens.
    imitation = -pi[chosen]                                                       # (P,)
    if s.sft_term == "mean":
        imitation = imitation / counts[chosen]

    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_w|u)], pairs of failures without SFT
    pairs = pairs_of(groups)
    weight = pi.new_tensor([pair.weight for pair in pairs])                       # (P,)
    sft_weight = pi.new_tensor([pair.sft_weight for pair in pairs])               # (P,)
    loss = s.lambda_dpo * weight * preference + s.lambda_sft * sft_weight * imitation
    return loss.sum(), pair_statistics(pairs, pi[chosen], pi[rejected], margin)


def pairs_of(groups: list[Group]) -> list[Pair]:
    """All pairs of the groups, in order, (P,)."""
    found = []
    for group in groups:
        found += group.pairs
    return found


def places_of_pairs(groups: list[Group]) -> tuple[list[int], list[int]]:
    """Where chosen and rejected of each pair stand among all the groups' trajectories, (P,) each.
    """
    chosen, rejected = [], []
    before = 0  # how many trajectories the groups before have
    for group in groups:
        if not group.pairs:
            raise ValueError(f"the group of task {group.trajectories[0].task!r} has no pairs; "
                             "leave it out of what preferences are learned from")
        chosen += [before + pair.chosen for pair in group.pairs]
        rejected += [before + pair.rejected for pair in group.pairs]
        before += len(group.trajectories)
    return chosen, rejected


def pair_statistics(pairs: list[Pair], chosen: Tensor, rejected: Tensor, margin: Tensor) -> dict:
    """Sums over the pairs of each kind: log pi(e|u) of both sides, margin, and pairs in order."""
    sums = defaultdict(Counter)
    rows = torch.stack([chosen, rejected, margin], 1).tolist()                    # (P, 3)
    for pair, (w, l, m) in zip(pairs, rows):
        # A Counter's update adds.
        sums[pair.kind].update(chosen=w, rejected=l, margin=m, count=1, accuracy=m > 0)
    return sums


# ------------------------------------------------------------------------------ optimiser loop


@dataclass(frozen=True)
class Objective:
    """What is minimised, and how. The loss of a batch is a sum over its groups, divided by one over
    the whole batch: a mean of passes' means would weigh a pair by the pass that it is in."""
    loss: Callable              # loss(policy, groups), as above
    divisor: Callable           # divisor(group) -> what it adds to the batch's divisor
    lr: float                   # peak
    warmup: float = 0.0         # share of the steps, linear
    schedule: str = "constant"  # or cosine, after the warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    tokens: int = 4096          # whose activations are in memory at once, on all ranks together

    def learning_rate(self, step: int, steps: int) -> float:
        """That of step number `step` of `steps`, counted from 0."""
        rising = int(self.warmup * steps)  # none in a phase of one step
        if step < rising:
            return self.lr * step / rising
        if self.schedule == "constant":
            return self.lr
        angle = math.pi * (step - rising) / (steps - rising)
        return self.lr * 0.5 * (1 + math.cos(angle))


def batches(groups: list[Group], size: int, unit: str, rng: random.Random) -> list[list[Group]]:
    """The groups, shuffled, in batches of at most `size` pairs (or tasks), each group whole."""
    shuffled = rng.sample(groups, len(groups))
    costs = [1] * len(shuffled)
    if unit == "pairs":
        costs = [max(1, len(group.pairs)) for group in shuffled]
    return fill(shuffled, costs, size)


def micro_batches(groups: list[Group], tokens: int) -> list[list[Group]]:
    """A batch in parts of at most so many tokens, whose activations are in memory together."""
    costs = []
    for group in groups:
        costs.append(sum(len(t.ids) for t in group.trajectories))
    return fill(groups, costs, tokens)


def fill(things: list, costs: list[float], size: float) -> list[list]:
    """Consecutive things in parts that cost at most `size`, or that are one thing that costs more.
    """
    parts = []
    room = 0
    for thing, cost in zip(things, costs):
        if not parts or cost > room:
            parts.append([])
            room = size
        parts[-1].append(thing)
        room -= cost
    return parts


@torch.no_grad()
def add_references(model, groups: list[Group], log_probs_of: Callable, tokens: int) -> None:
    """Puts log pi_ref(e|u) of each trajectory into its group; pi_ref is the model as it is now.

    Args:
        model: pi_ref.
        groups: Those that get it.
        log_probs_of: log_probs_of(model, trajectories) -> (A,), such as `token_log_probs`.
        tokens: Of trajectories that are run together, on all ranks.
    """
    for some in micro_batches(groups, tokens):
        per_token = log_probs_of(model, trajectories_of(some))                    # (A,)
        values = action_log_probs(per_token, trajectories_of(some)).tolist()      # (T,)
        for group in some:
            group.reference = values[:len(group.trajectories)]
            values = values[len(group.trajectories):]


def adamw(model, objective: Objective) -> torch.optim.AdamW:
    """The optimiser of those of the model's parameters that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, weight_decay=objective.weight_decay, fused=True)


def training(model, optimizer: torch.optim.Optimizer, steps: list[list[Group]],
             objective: Objective, log_probs_of: Callable, done: int = 0) -> Iterator[dict]:
    """Trains a model in place, one batch a step. It takes a step when it is asked for the next line
    of the log: `for line in dpo.training(...)`.

    Args:
        model: One that `load` or `prepare` has made ready.
        optimizer: That of `adamw`, or another.
        steps: The batch of each step.
        objective: What is minimised.
        log_probs_of: log_probs_of(model, trajectories) -> (A,), such as `token_log_probs`.
        done: How many of the steps model and optimizer have behind them.

    Yields:
        {step, loss, lr, norm, kinds}; kinds: kind of pair -> {count, and means over its pairs}.

    Raises:
        ValueError: Model or trajectories cannot be trained on as they are.
        FloatingPointError: Loss or gradient is not finite; the weights are as before the step.
    """
    check_trainable(model, steps)
    for step, batch in enumerate(steps[done:], done + 1):
        loss, kinds = backward(model, batch, objective, log_probs_of)
        complete_gradients(model)
        average_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), objective.max_grad_norm)
        if isinstance(norm, DTensor):  # of a model in parts
            norm = norm.full_tensor()
        norm = norm.item()
        if not math.isfinite(loss + norm):
            tasks = ", ".join(dict.fromkeys(t.task for t in trajectories_of(batch)))
            raise FloatingPointError(
                f"loss {loss}, gradient norm {norm} at step {step} on tasks {tasks}")

        lr = objective.learning_rate(step - 1, len(steps))
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        yield dict(step=step, loss=loss, lr=lr, norm=norm, kinds=kinds)


def check_trainable(model, steps: list[list[Group]]) -> None:
    """Refuses what would train to no effect or to a wrong one, without a word."""
    if model.training:
        raise ValueError("the model is in training mode, in which dropout makes each pass another; "
                         "use dpo.prepare(model, recompute=False), or model.eval()")
    for name, p in model.named_parameters():
        if p.requires_grad and p.element_size() < 4:
            raise ValueError(f"the weights {name} are {p.dtype}, which steps at a rate of 1e-6 do "
                             "not change; read the model with dtype=torch.float32")
    for t in trajectories_of(itertools.chain(*steps)):
        if t.action_count == 0:
            raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r} has no action "
                             "tokens to learn from; leave it out")


def backward(model, batch: list[Group], objective: Objective,
             log_probs_of: Callable) -> tuple[float, dict]:
    """Adds the gradient of a batch's loss to the model's, part by part.

    Returns:
        The loss, and what a line of the log says of kinds of pairs.
    """
    loss = 0.0
    sums = defaultdict(Counter)
    divisor = sum(objective.divisor(group) for group in batch)
    for groups in micro_batches(batch, objective.tokens):
        policy = log_probs_of(model, trajectories_of(groups))                     # (A,)
        part, statistics = objective.loss(policy, groups)
        (part / divisor).backward()
        loss += part.item() / divisor
        for kind, row in statistics.items():
            sums[kind].update(row)

    kinds = {}
    for kind, row in sums.items():
        kinds[kind] = {name: total / row["count"] for name, total in row.items()}
        kinds[kind]["count"] = row["count"]
    return loss, kinds


def complete_gradients(model) -> None:
    """Gives parameters that no text uses, such as a part for pictures, a gradient of 0. Then each
    has AdamW's moments, without which torch reads no saved ones; and all ranks average it."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


def average_gradients(model) -> None:
    """Averages gradients over ranks that have the whole model each. FSDP has done so by itself."""
    if not torch.distributed.is_initialized() or isinstance(model, FSDPModule):
        return
    for p in model.parameters():
        if not p.requires_grad:
            continue
        p.grad /= torch.distributed.get_world_size()
        torch.distributed.all_reduce(p.grad)


# -------------------------------------------------------------------------------------- models


def read(kind, folder, **options):
    """What kind.from_pretrained makes of a folder or hub name; Unusable where it makes nothing."""
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # of safetensors, too, and of tokenizers
        raise Unusable(f"--model {folder}: {first_line(error)}; give a hub name within reach, or a "
                       "folder with config, weights and tokenizer of a causal LM") from None


def is_causal_lm(config) -> bool:
    return type(config) in transformers.AutoModelForCausalLM._model_mapping


def read_config(folder):
    """The config in a folder; of a model that also reads pictures that of the causal LM in it."""
    config = read(transformers.AutoConfig, folder)
    text = config.get_text_config(decoder=True)  # of BART, say, a copy that names sizes otherwise
    if type(text) is not type(config) and is_causal_lm(text):
        text.tie_word_embeddings |= config.tie_word_embeddings
        return text
    if not is_causal_lm(config):
        raise Unusable(f"--model {folder}: {config.model_type} is no causal language model of "
                       "transformers; give one, such as a Llama or a Qwen")
    return config


def positions_of(config) -> float:
    """How many tokens a model has positions for; infinity where its config does not say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return positions if positions > 0 else math.inf


def read_model(folder, dtype=torch.float32, device="cpu"):
    """Reads the causal LM in a folder.

    Raises:
        Unusable: There is none, or it lacks weights, which transformers would draw at random.
    """
    collect()
    model, found = read(transformers.AutoModelForCausalLM, folder, dtype=dtype,
                        device_map={"": device}, output_loading_info=True)
    missing = {*found["missing_keys"], *found["mismatched_keys"]}
    if missing:
        raise Unusable(f"--model {folder}: {len(missing)} weights are missing, such as "
                       f"{min(map(str, missing))}; give a whole checkpoint")

    # Of a model that reads pictures too, such as Gemma 3, the part that reads text is taken.
    config = read_config(folder)
    if type(model.config) is not type(config):
        text = empty_model(config, dtype)
        setattr(text, text.base_model_prefix, model.get_decoder())
        text.set_output_embeddings(model.get_output_embeddings())
        text.generation_config = model.generation_config
        model = text.eval()
    if not is_causal_lm(model.config):
        raise Unusable(f"--model {folder}: what is saved of it cannot be read; use a text model")

    # Of the base's ways of generating only what ends a text stays: a penalty would change draws.
    own = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    return model


def collect() -> None:
    """Frees models that nobody holds any more: hooks and recomputed layers hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def empty_model(config, dtype):
    """A model with parameters without data, and buffers with theirs, some of which no file has."""
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_count(config) -> int:
    """The number of parameters of a causal LM, which is not read."""
    model = empty_model(config, torch.float32)
    model.tie_weights()
    return model.num_parameters()


def layers(model) -> torch.nn.ModuleList:
    """The model's layers, its largest list of modules."""
    largest = None
    most = -1
    for module in model.modules():
        size = sum(p.numel() for p in module.parameters())
        if isinstance(module, torch.nn.ModuleList) and size > most:
            largest = module
            most = size
    return largest


def layers_of_their_own(model) -> list[torch.nn.Module]:
    """The layers that share no parameter with another one, as some of Zamba's do."""
    of_model = layers(model)
    users = Counter()
    for layer in of_model:
        users.update(layer.parameters())
    found = []
    for layer in of_model:
        if all(users[p] == 1 for p in layer.parameters()):
            found.append(layer)
    return found


def prepare(model, recompute: bool):
    """Makes a model ready to train: without dropout, with which the first DPO loss is not ln 2.
    recompute: layers run again in the backward pass, which saves memory (checkpointing)."""
    if recompute:
        for layer in layers(model):
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                    use_reentrant=False)
    return model.eval()


def load(accelerator, folder, recompute: bool, shard: bool):
    """Reads the model in a folder, ready to train, in fp32: bf16 weights do not move at 1e-6.

    Args:
        accelerator: accelerate's.
        folder: Of the model, or its hub name.
        recompute: As for `prepare`.
        shard: In parts over the ranks (FSDP2); else whole on each.
    """
    if shard:
        return load_in_parts(accelerator, folder, recompute)
    return prepare(read_model(folder, device=accelerator.device), recompute)


def load_in_parts(accelerator, folder, recompute: bool):
    """Reads a model over the ranks: one of them reads the file, each gets its parts from it."""
    collect()
    whole = read_model(folder) if accelerator.is_main_process else None
    model = empty_model(read_config(folder), torch.float32)
    model.tie_weights()
    prepare(model, recompute)

    precision = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for part in [*layers_of_their_own(model), model]:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    weights = {}
    generation = [None]
    if whole is not None:
        weights = whole.state_dict()
        generation = [whole.generation_config]
    torch.distributed.broadcast_object_list(generation)
    model.generation_config = generation[0]
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    model.tie_weights()  # which makes two of one again
    return model


def save(accelerator, model, encoder: Encoder, folder) -> None:
    """Writes a model of `load`, whole, with its tokenizer, as `from_pretrained` and other programs
    read it: one that generates with it stops at the end of a turn. Every rank has to call it."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if not accelerator.is_main_process:
        return
    for name in model.all_tied_weights_keys or {}:  # which would stand in the file twice
        weights.pop(name, None)
    model.generation_config = stopping(model.generation_config, encoder)
    model.save_pretrained(folder, state_dict=weights)
    encoder.tokenizer.save_pretrained(folder)


def stopping(base, encoder: Encoder) -> transformers.GenerationConfig:
    """What ends and what pads a text: as the base has it, and the end of a turn."""
    ends = base.eos_token_id
    if ends is None:
        ends = []
    elif isinstance(ends, int):
        ends = [ends]
    ends = list(dict.fromkeys([*ends, encoder.end_of_turn]))
    pad = base.pad_token_id
    if pad is None:
        pad = encoder.tokenizer.pad_token_id
    if pad is None:
        pad = encoder.end_of_turn
    return transformers.GenerationConfig(
        bos_token_id=base.bos_token_id, eos_token_id=ends, pad_token_id=pad)


# ------------------------------------------------------------------------------------ sampling

Sampled = tuple[Ids, list[float]]  # a reply: its ids, and the log-probability of each


@torch.inference_mode()
def replies(model, encoder: Encoder, sampler: Sampler, max_new_tokens: int, stops: tuple[str, ...],
            asked: list[tuple[Ids, random.Random]], alone: bool = False,
            cache: bool | str = True) -> list[Sampled]:
    """Samples a reply to each conversation, by `generate` of transformers.

    Args:
        model: A causal LM.
        encoder: Of its tokenizer.
        sampler: The distribution that is sampled from.
        max_new_tokens: Of a reply at most.
        stops: Texts that end a reply, as the end of turn does.
        asked: Of each conversation the ids so far, and its own random numbers.
        alone: One conversation at a time, not all side by side.
        cache: Whether keys and values of what was read are kept; "static": where they have their
            places from the start, else each token copies all of them. Nothing is compiled: each
            length would be, for a copy of a model that plays one phase.

    Returns:
        Of each reply its ids, and the log-probability of each as the sampler had it, in nats; none
        at temperature 0.
    """
    at_once = 1 if alone else len(asked)
    found = []
    for first in range(0, len(asked), at_once):
        some = asked[first:first + at_once]
        # Padded on the left, all begin to write in the same column.
        ids = padded([ids for ids, _ in some], "left").to(model.device)           # (B, L)
        mask = padded([[1] * len(ids) for ids, _ in some], "left").to(model.device)
        options = dict(use_cache=bool(cache))
        if cache == "static":
            options.update(cache_implementation="static", disable_compile=True)
        draw = Draw([rng for _, rng in some], sampler, encoder, stops)
        model.generate(ids, attention_mask=mask, logits_processor=[draw], do_sample=False,
                       max_new_tokens=max_new_tokens, eos_token_id=encoder.end_of_turn,
                       pad_token_id=encoder.end_of_turn, **options)
        found += draw.replies
    return found


class Draw(transformers.LogitsProcessor):
    """Draws each row's next token with the row's own random numbers, so that what runs beside it
    changes nothing, and leaves `generate` no other choice. A row that is over draws no more.

    Conversations stay on the device. The host has the replies so far, and waits once a token."""

    def __init__(self, rngs: list[random.Random], sampler: Sampler, encoder: Encoder,
                 stops: tuple[str, ...]):
        self.rngs = rngs
        self.sampler = sampler
        self.encoder = encoder
        self.stops = stops
        self.replies = [([], []) for _ in rngs]  # of each row ids and log-probabilities so far
        self.over = [False] * len(rngs)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Logits, (B, V), with one finite one in each row; ids: the conversations, (B, L)."""
        log_p = self.sampler.apply(logits).log_softmax(-1)                        # (B, V)
        u = self.uniform().to(log_p.device, non_blocking=True)                    # (B, 1)
        if self.sampler.temperature > 0:
            # The first token at which the distribution function exceeds u. Rounding leaves its
            # last value not quite 1.
            cdf = log_p.exp().double().cumsum(-1)                                 # (B, V)
            drawn = (cdf <= cdf[:, -1:] * u).sum(-1, keepdim=True)                # (B, 1)
        else:
            drawn = log_p.argmax(-1, keepdim=True)                                # (B, 1)
        values = log_p.gather(1, drawn)                                           # (B, 1)
        drawn = drawn.masked_fill(u < 0, self.encoder.end_of_turn)  # where a row is over
        noted = torch.cat([drawn.double(), values.double()], 1)                   # (B, 2)
        self.note(noted.tolist())
        return torch.full_like(log_p, -torch.inf).scatter_(1, drawn, 0.0)

    def uniform(self) -> Tensor:
        """A random number in [0, 1) of each row, (B, 1); -1 of one that is over."""
        numbers = []
        for rng, over in zip(self.rngs, self.over):
            if over:
                numbers.append(-1.0)
            elif self.sampler.temperature > 0:
                numbers.append(rng.random())
            else:
                numbers.append(0.0)
        return torch.tensor(numbers, dtype=torch.float64)[:, None]

    def note(self, drawn: list[list[float]]) -> None:
        """Adds token and log-probability to each reply that is not over, and finds who is now."""
        for row, (token, value) in enumerate(drawn):
            if self.over[row]:
                continue
            if not math.isfinite(value):
                raise FloatingPointError("logits that are no numbers; lower the learning rate")
            ids, log_probs = self.replies[row]
            ids.append(int(token))
            if self.sampler.temperature > 0:
                log_probs.append(value)
            self.over[row] = self.ends(ids)

    def ends(self, ids: list[int]) -> bool:
        """Whether a reply ends with its last token."""
        if ids[-1] == self.encoder.end_of_turn:
            return True
        for stop in self.stops:  # of which a token has a letter at least
            if stop in self.encoder.decode(ids[-len(stop) - 1:]):
                return True
        return False


# --------------------------------------------------------------- whether a model can be used so

RIGHT = 1e-3  # nats a token that rounding explains in fp32: it makes 4e-5, faults 0.012 and more
# What a model's code raises where it lacks a way of being run. Disk and driver are not among them.
OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
           TypeError, ValueError)
OF_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError)  # which are RuntimeErrors, too


@torch.inference_mode()
def trial(model, encoder: Encoder, longest: int = 64) -> tuple[bool, bool, bool | str]:
    """Finds the fastest way to ask a model that gives right log-probabilities: those of plain
    passes over one text. Some models read padding, or err with their cache.

    It judges code, not rounding: in bf16 rounding alone moves a token by 0.04 to 0.06 nats, more
    than some faults do. So the model is turned into fp32.

    Args:
        model: A causal LM; its weights are fp32 afterwards.
        encoder: Of its tokenizer.
        longest: Tokens of the longest text that is tried, since some faults begin at a length.

    Returns:
        Whether passes, and whether replies, have to be of one text at a time; and the cache that
        these may keep, see `replies`.

    Raises:
        Unusable: No way is right. What the machine lacks, memory say, is raised as it is.
    """
    model.float()
    never = (*encoder.sampler().never, encoder.end_of_turn)
    sampler = Sampler(never=never)
    drawn = sorted(encoder.known - set(never))
    texts = []
    for size in [longest - 8, longest // 2]:
        texts.append(random.Random(size).choices(drawn, k=size))
    ways = [(True, False), (True, True), (False, False), (False, True)]  # the fastest first
    if model.device.type == "cuda":
        ways = [("static", False), (True, False), ("static", True), *ways[1:]]
    fault = ""
    for cache, alone in ways:
        try:
            of_replies, of_padding = errors_of_way(model, encoder, sampler, texts, alone, cache)
        except OF_MACHINE:
            raise
        except OF_CODE as error:
            if "DefaultCPUAllocator" in str(error):  # out of memory, on a CPU
                raise MemoryError(str(error)) from None
            fault = first_line(error)
            continue
        if of_replies < RIGHT:
            return of_padding >= RIGHT, alone, cache
        fault = "its replies have other log-probabilities than plain passes over them"
    remedy = "use another model"
    positions = positions_of(model.config)
    if longest > positions:
        remedy = f"it has {positions:,} positions, lower --max-tokens {longest}"
    raise Unusable(f"{type(model).__name__} cannot be used: {fault}; {remedy}")


def errors_of_way(model, encoder: Encoder, sampler: Sampler, texts: list[Ids], alone: bool,
                  cache: bool | str) -> tuple[float, float]:
    """How far this way is from plain passes over one text, in nats a token: that of replies to the
    texts, and that of one padded pass over texts and replies."""
    asked = [(ids, random.Random(0)) for ids in texts]
    made = replies(model, encoder, sampler, 8, (), asked, alone, cache)
    trajectories = []
    sampled = []
    for ids, (reply, values) in zip(texts, made):
        t = Trajectory()
        t.extend(ids, is_action=False)
        t.extend(reply, is_action=True)
        trajectories.append(t)
        sampled += values
    plain = torch.cat([token_log_probs(model, [t], sampler) for t in trajectories])  # (A,)
    side_by_side = token_log_probs(model, trajectories, sampler)                  # (A,)
    of_replies = (plain - plain.new_tensor(sampled)).abs().mean()
    of_padding = (plain - side_by_side).abs().mean()
    return of_replies.item(), of_padding.item()
