"""Tokens in, gradients out: encoding, log-probabilities, the losses, the optimiser loop.

Nothing here knows an environment. Equation numbers are those of arXiv 2511.22254.
"""

import math
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

import scale

# ---------------------------------------------------------------------------------- encoding


class Encoder:
    """Conversations as token ids, turn by turn, from the tokenizer's own chat template.

    A conversation grows at its end only: `start` gives the ids up to the agent's first reply,
    `reply` those of a written reply, `observation` those between one reply and the next. The same
    three pieces serve experts and rollouts, so the ids an agent sampled are never tokenised again.
    Raises ValueError, naming the template's problem, if it rewrites earlier turns or if nothing
    marks the end of a reply.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ValueError(f"{self.name}: the tokenizer has no chat template; use a chat model")
        self.special = {t for t in tokenizer.all_special_tokens if t}
        self.special |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        special = set(tokenizer.convert_tokens_to_ids(sorted(self.special)))
        self._control_ids = special - {tokenizer.unk_token_id}  # which stands for odd text
        self._known = {}
        self.has_colon = lru_cache(None)(lambda token: ":" in self.decode([token]))
        # What the template puts around a reply and around an observation, read off a conversation
        # in which both are one unlikely word.
        question, word = {"role": "user", "content": "question"}, "CONTENT"
        answered = [question, {"role": "assistant", "content": word}]
        prompt, full = self._render([question], True), self._render(answered, False)
        asked = self._render(answered + [{"role": "user", "content": word}], True)
        if not (full.startswith(prompt) and full[len(prompt):].count(word) == 1
                and asked.startswith(full) and asked[len(full):].count(word) == 1):
            raise ValueError(f"{self.name}: its chat template rewrites a turn once it is answered; "
                             "use a template without that (an Instruct model that does not think)")
        self._prompt = prompt
        self._before_reply, after = full[len(prompt):].split(word)
        end = min((t for t in self.special if t in after), key=after.index, default=None)
        if end is None:
            raise ValueError(f"{self.name}: its chat template ends a reply with {after!r}, which "
                             "holds no special token to stop at")
        cut = after.index(end) + len(end)
        self._end, self._end_token, self._after = after[:cut], end, after[cut:]
        self._before_observation, self._after_observation = asked[len(full):].split(word)
        self.end_of_turn: int = tokenizer.convert_tokens_to_ids(end)
        # Control tokens other than the end of a turn are never sampled: a reply cannot open a turn.
        self.forbidden = sorted(special - {self.end_of_turn})
        self.encode(answered + [{"role": "user", "content": "second"},
                                {"role": "assistant", "content": "<think>a</think> b"},
                                {"role": "user", "content": "third"},
                                {"role": "assistant", "content": "c"}])

    def _render(self, messages: list[dict], to_reply: bool) -> str:
        messages = [{**m, "content": m["content"].strip()} for m in messages]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_reply)

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control_ids]

    def _controls_in(self, template: str) -> list[int]:
        """The control tokens of a text that nobody but the template wrote."""
        if template not in self._known:
            self._known[template] = self._controls(self._ids(template))
        return self._known[template]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids_after(self, context: str, before: str, content: str, after: str) -> list[int]:
        """Ids of before + content + after as they follow `context`: some tokenizers look back.

        Control tokens in `content`, which others wrote, are encoded as the plain text they are.
        """
        start = self._ids(context) if context else []
        ids = self._ids(context + before + content + after)
        if self._controls(ids) != self._controls_in(context + before + after):
            plain = self.tokenizer(content, add_special_tokens=False, split_special_tokens=True)
            tail = self._ids("x" + after)[len(self._ids("x")):]
            ids = self._ids(context + before) + plain["input_ids"] + tail
            if self._controls(plain["input_ids"]):
                raise ValueError(f"{self.name}: it cannot encode its control tokens as plain text, "
                                 "so that whoever writes them ends a turn; use another tokenizer")
        if ids[:len(start)] != start:
            raise ValueError(f"{self.name}: tokens of {context[-20:]!r} change with what follows; "
                             "this tokenizer cannot encode a conversation turn by turn")
        return ids[len(start):]

    def start(self, messages: list[dict]) -> list[int]:
        """Ids of the opening messages, up to where the agent's first reply begins."""
        *earlier, last = messages
        probe = earlier + [{**last, "content": "CONTENT"}]
        before, after = self._render(probe, True).rsplit("CONTENT", 1)
        return self._ids_after("", before, last["content"].strip(), after)

    def reply(self, text: str) -> list[int]:
        """Ids of a reply written by an expert, the end-of-turn token included."""
        return self._ids_after(self._prompt, self._before_reply, text.strip(), self._end)

    def observation(self, text: str) -> list[int]:
        """Ids that follow a reply's end-of-turn token, up to where the next reply begins."""
        before = self._after + self._before_observation
        return self._ids_after(self._end_token, before, text.strip(), self._after_observation)

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """(ids, action_mask), both (l,): mask 1 on the tokens of each reply and its end of turn.

        The conversation opens with user (or system) turns and then alternates. ValueError if the
        template, given all of it at once, writes another text than turn by turn.
        """
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        ids, text = self.start(messages[:first]), self._render(messages[:first], True)
        mask = [0] * len(ids)
        for i, message in enumerate(messages[first:], first):
            content = message["content"].strip()
            if message["role"] == "assistant":
                piece = self.reply(content)
                text += self._before_reply + content + self._end
            else:
                piece = self.observation(content)
                text += (self._after + self._before_observation + content
                         + self._after_observation)
            ids += piece
            mask += [int(message["role"] == "assistant")] * len(piece)
        if messages[-1]["role"] == "assistant":
            text += self._after
        whole = self._render(messages, messages[-1]["role"] != "assistant")
        if text != whole:
            at = next((i for i, (a, b) in enumerate(zip(text, whole)) if a != b), len(whole))
            raise ValueError(f"{self.name}: its chat template rewrites earlier turns (near "
                             f"{whole[max(0, at - 20):at + 20]!r}); use a template without that")
        return ids, mask

    def decode(self, ids: list[int]) -> str:
        """The text of a sampled reply, without its end-of-turn token."""
        return self.tokenizer.decode([i for i in ids if i != self.end_of_turn]).strip()


@dataclass(frozen=True)
class Sequence:
    """A trajectory as the model reads it: `ids` and `mask`, both of length l; mask 1 = action."""

    ids: list[int]
    mask: list[int]

    @property
    def action_tokens(self) -> int:
        return sum(self.mask[1:])


# --------------------------------------------------------------------------- log-probabilities


def ragged_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None,
                     scaling=None, lengths=None, rows=None, first=None, cache=None, **others):
    """Attention of several sequences laid end to end in one row; no padding, no mask tensor.

    query (1, H, N, d), key and value (1, H_kv, N, d); returns (1, N, H, d). Each sequence, of its
    length in `lengths`, attends causally to itself. rows and first: as `lay_out` says, where
    sequences share tokens; else N = sum(lengths). Rollouts: `cache.attend` does it all.
    ValueError for attention of another form than softmax over all earlier tokens.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: {name}={others[name]} is not supported; "
                             "use a model with full attention (Llama, Qwen2, Qwen3)")
    if cache is not None:
        return cache.attend(module.layer_idx, query, key, value, scaling), None
    if rows is not None:
        query, key, value = (x.index_select(2, rows) for x in (query, key, value))
    outputs = torch.cat([
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling,
                                       enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)))], 2)
    return (outputs if first is None else outputs.index_select(2, first)).transpose(1, 2), None


AttentionInterface.register("ragged", ragged_attention)


def shared_beginning(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def lay_out(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """(rows, first): the model's rows, in which a beginning that sequences share is there once.

        a b c  and  a b d    are the four rows    a b c d
        rows  = [0, 1, 2, 0, 1, 3]   (M,): the row of each token of all sequences, end to end
        first = [0, 1, 2, 5]         (N,): where each row first stands among these M

    The trajectories of an instruction share its prompt and often their first turns. A share below
    1/16 of a sequence would cost more than it saves.
    """
    rows, first, paths = [], [], []
    for s in sequences:
        known, path = max(((shared_beginning(s.ids, t.ids), path)
                           for t, path in zip(sequences, paths)), default=(0, []))
        known = known if 16 * known >= len(s.ids) else 0
        first += range(len(rows) + known, len(rows) + len(s.ids))
        paths.append(path[:known] + list(range(len(first) - len(s.ids) + known, len(first))))
        rows += paths[-1]
    return rows, first


def token_log_probs(model, sequences: list[Sequence], temperature: float = 1.0) -> Tensor:
    """log pi(t_k | t_<k) of every action token of every sequence, laid end to end, (A,), in nats.

    A beginning that sequences share runs once, and the vocabulary is projected for action tokens
    alone: one that several sequences share is predicted once (U), and where two sequences part, one
    row of logits predicts two tokens (K <= U <= A).
    temperature: what the logits were divided by when the tokens were sampled.
    """
    device = next(model.parameters()).device
    rows, first = lay_out(sequences)                                                 # (M,), (N,)
    ids = [i for s in sequences for i in s.ids]
    positions = [k for s in sequences for k in range(len(s.ids))]
    targets, target_of, offset = {}, [], 0  # row -> its number as a target; that of each token
    for s in sequences:
        target_of += [targets.setdefault(rows[offset + k], len(targets))
                      for k in range(1, len(s.ids)) if s.mask[k]]
        offset += len(s.ids)
    logits_at = {}  # row -> number of the logits there; a target's are at the row before it
    logits_of = [logits_at.setdefault(rows[first[row] - 1], len(logits_at)) for row in targets]
    target_ids = [ids[first[row]] for row in targets]
    tensor = partial(torch.tensor, dtype=torch.long, device=device)
    shared = dict(rows=tensor(rows), first=tensor(first)) if len(first) < len(rows) else {}
    logits = model(input_ids=tensor([[ids[m] for m in first]]),
                   position_ids=tensor([[positions[m] for m in first]]),
                   lengths=[len(s.ids) for s in sequences], **shared,
                   logits_to_keep=tensor(list(logits_at)), use_cache=False).logits[0]     # (K, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    if len(logits_at) < len(logits_of):  # index_select, unlike [], adds gradients in a fixed order
        logits = logits.index_select(0, tensor(logits_of))                                # (U, V)
    per_target = -F.cross_entropy(logits, tensor(target_ids), reduction="none")           # (U,)
    return per_target.index_select(0, tensor(target_of))                                   # (A,)


def action_log_probs(model, sequences: list[Sequence]) -> Tensor:
    """log pi(e|u) of each trajectory, (B,) float64, in nats.

    Eq. (2), (5): the sum over action tokens t_k of log pi(t_k | t_<k); observations only condition.
    Sums are float64, because a few hundred nats in float32 lose more than a late step changes.
    """
    per_token = token_log_probs(model, sequences)                                         # (A,)
    owner = torch.tensor([b for b, s in enumerate(sequences) for _ in range(s.action_tokens)],
                         dtype=torch.long, device=per_token.device)
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=per_token.device)
    return sums.index_add(0, owner, per_token.double())                                   # (B,)


# ------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Pair:
    """A preference between two sequences of a group, by index."""

    kind: str
    chosen: int
    rejected: int
    weight: float = 1.0      # of the DPO term
    sft_weight: float = 0.0  # of the SFT term on the chosen trajectory


@dataclass
class Group:
    """One instruction: its distinct sequences, each run through the model once, and its pairs."""

    task: str
    sequences: list[Sequence]
    pairs: list[Pair] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)  # log pi_ref of each sequence, nats

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.sequences)


def dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """Eq. (7), per pair: all arguments (P,) log-probabilities in nats; returns (P,), (P,).

    The second value is the margin, beta times the difference of the log-ratios.
    """
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) )
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def sft_objective(model, groups: list[Group]):
    """Eq. (3)-(5) summed over the groups' trajectories: (), and no statistics.

    Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions.
    """
    return -action_log_probs(model, [s for g in groups for s in g.sequences]).sum(), {}


def preference_objective(model, groups: list[Group], beta, lambda_dpo=1.0, lambda_sft=0.0,
                         log_prob="sum", sft_term="sum"):
    """Eq. (9) summed over the groups' pairs: (), and statistics per kind of pair.

    With lambda_dpo = 1 and every sft_weight 0 this is Eq. (7), the failure agent's loss.
    Statistics: {kind: [pairs, chosen and rejected log-probability, margin, correct]}, sums.
    """
    sequences = [s for g in groups for s in g.sequences]
    policy = action_log_probs(model, sequences)                                           # (T,)
    reference = policy.new_tensor([r for g in groups for r in g.reference])               # (T,)
    tokens = policy.new_tensor([s.action_tokens for s in sequences])                      # (T,)
    chosen, rejected, pairs, first = [], [], [], 0
    for g in groups:
        chosen += [first + p.chosen for p in g.pairs]
        rejected += [first + p.rejected for p in g.pairs]
        pairs += g.pairs
        first += len(g.sequences)
    weight = policy.new_tensor([p.weight for p in pairs])                                 # (P,)
    sft_weight = policy.new_tensor([p.sft_weight for p in pairs])                         # (P,)

    length = tokens if log_prob == "mean" else torch.ones_like(tokens)
    pi, ref = policy / length, reference / length
    preference, margin = dpo_loss(pi[chosen], pi[rejected], ref[chosen], ref[rejected], beta)
    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_chosen|u)], failure pairs without SFT
    sft = -policy[chosen] / (tokens[chosen] if sft_term == "mean" else 1)                 # (P,)
    loss = (lambda_dpo * weight * preference + lambda_sft * sft_weight * sft).sum()

    columns = torch.stack([torch.ones_like(margin), policy[chosen], policy[rejected], margin,
                           (margin > 0).double()], 1).detach()                            # (P, 5)
    statistics = {}
    for pair, row in zip(pairs, columns.tolist()):
        add_statistics(statistics, {pair.kind: row})
    return loss, statistics


def count_action_tokens(batch: list[Group]) -> int:
    """The divisor of the SFT phase: a batch's mean is per action token, as in ETO's trainer."""
    return sum(s.action_tokens for g in batch for s in g.sequences)


def count_pairs(batch: list[Group]) -> int:
    return sum(len(g.pairs) for g in batch)


def sum_weights(batch: list[Group]) -> float:
    return sum(p.weight for g in batch for p in g.pairs)


def add_statistics(total: dict, more: dict) -> None:
    for kind, row in more.items():
        total[kind] = [a + b for a, b in zip(total.get(kind, [0.0] * len(row)), row)]


def mean_statistics(sums: list[float]) -> dict:
    pairs, *rest = sums
    names = ("chosen_log_prob", "rejected_log_prob", "margin", "accuracy")
    return dict(pairs=int(pairs), **{name: value / pairs for name, value in zip(names, rest)})


# ------------------------------------------------------------------------------ optimiser loop


def packs(groups: list[Group], tokens: int) -> list[list[Group]]:
    """Consecutive groups, whole, with at most `tokens` tokens together (or one larger group)."""
    result, room = [], 0
    for g in groups:
        if not result or g.tokens > room:
            result.append([])
            room = tokens
        result[-1].append(g)
        room -= g.tokens
    return result


def batches(groups: list[Group], size: int, unit: str, rng: random.Random) -> list[list[Group]]:
    """The groups shuffled and cut into batches of at most `size` pairs (or instructions).

    An instruction's pairs stay together; one with more than `size` pairs is a batch of its own.
    Nothing is left out: the last batch is smaller.
    """
    shuffled, result, room = rng.sample(groups, len(groups)), [], 0
    for g in shuffled:
        cost = len(g.pairs) if unit == "pairs" else 1
        if not result or cost > room:
            result.append([])
            room = size
        result[-1].append(g)
        room -= cost
    return result


def split_over_ranks(groups: list[Group], ranks: int) -> list[list[Group]]:
    """The groups dealt to ranks, longest first to the rank with the fewest tokens; order is kept.

    All ranks wait for the slowest at every step, so the most tokens a rank has are what counts.
    """
    shares, tokens = [[] for _ in range(ranks)], [0] * ranks
    for n in sorted(range(len(groups)), key=lambda n: -groups[n].tokens):
        rank = tokens.index(min(tokens))
        shares[rank].append(n)
        tokens[rank] += groups[n].tokens
    return [[groups[n] for n in sorted(share)] for share in shares]


def micro_batches(accelerator, groups: list[Group], tokens: int) -> list[tuple[list[Group], bool]]:
    """This rank's (pack, idle) over its share of `groups`, as many as any other rank has.

    A rank with fewer packs runs one group more, whose result does not count, so that all meet.
    """
    work = [packs(share, tokens) for share in split_over_ranks(groups, accelerator.num_processes)]
    mine = work[accelerator.process_index]
    missing = max(len(share) for share in work) - len(mine)
    return [(pack, False) for pack in mine] + [(groups[:1], True)] * missing


@torch.no_grad()
def over_sequences(accelerator, model, groups: list[Group], tokens_per_forward: int, read,
                   progress=None) -> list[list]:
    """read(model, sequences) -> a value for each; those of each group, found on all ranks.

    model: of `scale.spread`. All ranks get all values.
    """
    model.eval()
    found = {}
    for pack, _ in micro_batches(accelerator, groups, tokens_per_forward):
        with scale.precision(accelerator, model):
            values = iter(read(model, [s for g in pack for s in g.sequences]))
        found.update({g.task: [next(values) for _ in g.sequences] for g in pack})
        if progress is not None:
            progress.update(accelerator.num_processes * sum(g.tokens for g in pack))
    for part in gather_object([found]):
        found.update(part)
    return [found[g.task] for g in groups]


def add_reference(accelerator, model, groups: list[Group], tokens_per_forward: int,
                  progress=None) -> None:
    """Sets every group's reference log-probabilities to those of `model`, once per phase."""
    found = over_sequences(accelerator, model, groups, tokens_per_forward,
                           lambda *batch: action_log_probs(*batch).tolist(), progress)
    for g, log_probs in zip(groups, found):
        g.reference = log_probs


def schedule_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """What the peak rate is multiplied by at step 0, 1, ...: a linear rise, then constant or
    cosine.

    warmup: the share of the steps that rise, rounded down: the first of them has rate 0, so a
    phase of one step has none.
    """
    rising = int(warmup * steps)
    if step < rising:
        return step / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) \
        if schedule == "cosine" else 1.0


def fit(accelerator, model, epochs: list[list[list[Group]]], objective, normaliser, *, lr, warmup,
        schedule, weight_decay, max_grad_norm, tokens_per_forward, log, progress=None,
        checkpoint=None) -> None:
    """Trains a model of `scale.spread` in place: AdamW over epochs of batches of groups.

    objective(model, groups) -> (sum of losses, statistics); normaliser(batch) -> the divisor of
    a whole batch's sum, over all accumulation steps and all ranks. warmup: share of the steps;
    schedule: "cosine" or "constant" after it. log(dict) is called once per optimiser step.
    checkpoint: a `scale.Checkpoint`, from which a phase that was stopped goes on.
    FloatingPointError, naming the tasks, if the loss or the gradient stops being finite.
    """
    batches = [(number, batch) for number, epoch in enumerate(epochs, 1) for batch in epoch]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
    model.train()
    ranks = accelerator.num_processes
    done, events = checkpoint.restore(model, optimizer) if checkpoint else (0, [])
    for event in events:
        log(event)
    if progress is not None:
        progress.update(sum(g.tokens for _, batch in batches[:done] for g in batch))
    for step, (number, batch) in enumerate(batches[done:], done + 1):
        started = time.perf_counter()
        rate = lr * schedule_factor(step - 1, len(batches), warmup, schedule)
        divisor, total, statistics = normaliser(batch), 0.0, {}
        work = micro_batches(accelerator, batch, tokens_per_forward)
        for i, (pack, idle) in enumerate(work, 1):
            # DDP all-reduces once a step; FSDP reduce-scatters after every pass, so that no rank
            # holds whole gradients.
            with nullcontext() if i == len(work) else accelerator.no_sync(model):
                with scale.precision(accelerator, model):
                    loss, sums = objective(model, pack)
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"loss {loss.item()} at step {step} on tasks "
                                             f"{', '.join(g.task for g in pack)}")
                # Both average over ranks, but the divisor counts the pairs of all: undo it.
                accelerator.backward(loss * (0 if idle else ranks / divisor))
            if idle:
                continue
            total += loss.item() / divisor
            add_statistics(statistics, sums)
        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm {norm} at step {step} on tasks "
                                     f"{', '.join(g.task for g in batch)}")
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        due = checkpoint is not None and checkpoint.due()  # the main rank's clock decides
        shares = gather_object([(total, statistics, due)])
        total, statistics = sum(share[0] for share in shares), {}
        for _, sums, _ in shares:
            add_statistics(statistics, sums)
        tokens = sum(g.tokens for g in batch)
        seconds = time.perf_counter() - started
        event = dict(step=step, epoch=number, loss=total, lr=rate, gradient_norm=norm,
                     tokens_per_second=round(tokens / seconds),
                     kinds={kind: mean_statistics(sums) for kind, sums in statistics.items()})
        log(event)
        events.append(event)
        if progress is not None:
            progress.update(tokens)
        if shares[0][2]:
            checkpoint.save(model, optimizer, step, events)
