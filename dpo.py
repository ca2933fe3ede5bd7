"""Tokens in, gradients or tokens out: encoding, log-probabilities, losses, training, sampling.

A model is asked for log-probabilities and replies alone, by the plain forward and `generate` of
transformers: any causal language model will do. Equations are those of arXiv 2511.22254. Shapes: B
trajectories of L tokens in a pass, A action tokens, V words; T trajectories, P pairs of a batch.
"""

import gc
import inspect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Unusable(ValueError):
    """A model, a tokenizer or its chat template cannot be used; one line with the remedy."""


# ------------------------------------------------------------------------------------ encoding


@dataclass
class Trajectory:
    """An episode e of a task u, whole or as far as it has come; a line of a .jsonl file."""
    task: str = ""
    agent: str = ""                  # its name; of what an explorer plays, the signal
    iteration: int = 0               # in GRPO the step
    rollout: int = 0
    seed: int = 0
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)          # (l,) read and written, in order
    action_mask: list[int] = field(default_factory=list)  # (l,) 1 where the agent wrote the token
    log_probs: list[float] = field(default_factory=list)  # (a,) of those, as they were sampled
    reward: float = 0.0              # in [0, 1]; by ETO's protocol from -1
    raw_reward: float | None = None  # before clipping, where the environment clips
    steps: int = 0
    ended: str = ""                  # done, budget or context

    def extend(self, ids: list[int], acts: int) -> None:
        self.ids += ids
        self.action_mask += [acts] * len(ids)

    @property
    def action_tokens(self) -> int:
        return sum(self.action_mask[1:])


class Encoder:
    """Conversations as token ids, turn by turn, from the tokenizer's own chat template:

        start | reply end | observation | reply end | observation | ...

    Each piece is tokenised once, as it follows what stands before it: experts and rollouts have the
    same ids, sampled ids are never tokenised again, and the action mask is made with the ids.
    """

    def __init__(self, tokenizer):
        self.tokenizer, X = tokenizer, "CONTENT"  # stands for what others write
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special = sorted({*tokenizer.all_special_tokens, *special} - {""})
        if not tokenizer.chat_template:
            self.refuse("it has no chat template; use a chat model")
        talk = [dict(role=role, content=X) for role in ("user", "assistant", "user")]
        self.asked, answered, again = (self.render(talk[:n], n != 2) for n in (1, 2, 3))
        before, _, rest = answered[len(self.asked):].partition(X)
        self.end = min((t for t in self.special if t in rest), key=rest.index, default="")
        thought = dict(role="assistant", content="<think>a</think> b")
        if not (self.end and answered.startswith(self.asked) and again.startswith(answered)
                and thought["content"] in self.render([talk[0], thought, talk[0]], True)):
            self.refuse("its chat template changes a turn that was answered, or no control token "
                        "ends a reply; use an Instruct model that does not think")
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.end)
        space, _, after = rest.partition(self.end)  # Llama 2 writes a space before its end of turn
        self.around_reply = before, space + self.end
        self.around_observation = (after + again[len(answered):]).split(X)
        self.encode(talk[:2] + [talk[0], thought], 1)  # a tokenizer's faults show at once

    def refuse(self, why: str):
        raise Unusable(f"the tokenizer of {self.tokenizer.name_or_path}: {why}")

    def render(self, messages: list[dict], go_on: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=go_on)

    def start(self, messages: list[dict]) -> list[int]:
        """The ids up to where the agent's first reply begins."""
        return self.ids_after("", self.render(
            [{**m, "content": self.plain(m["content"])} for m in messages], True))

    def reply(self, text: str) -> list[int]:
        """Those of a reply in words and of its end of turn."""
        return self.ids_after(self.asked, self.plain(text).join(self.around_reply))

    def observation(self, text: str) -> list[int]:
        """Those from a reply's end of turn to where the next reply begins."""
        return self.ids_after(self.end, self.plain(text).join(self.around_observation))

    def plain(self, text: str) -> str:
        """A text without control tokens, with which it could open or end a turn."""
        for token in self.special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text.strip()

    def ids_after(self, before: str, text: str) -> list[int]:
        start, ids = (self.tokenizer(t, add_special_tokens=False)["input_ids"] if t else []
                      for t in (before, before + text))
        if ids[:len(start)] != start:
            self.refuse(f"its tokens of {before[-20:]!r} change with what follows; use another")
        return ids[len(start):]

    def encode(self, messages: list[dict], first: int) -> tuple[list[int], list[int]]:
        """(ids, action_mask), both (l,), of a conversation that opens with `first` turns."""
        t = Trajectory()
        t.extend(self.start(messages[:first]), acts=0)
        for m in messages[first:]:
            acts = m["role"] == "assistant"
            t.extend((self.reply if acts else self.observation)(m["content"]), acts=int(acts))
        return t.ids, t.action_mask

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i != self.end_of_turn])

    def close(self, ids: list[int], stops: tuple[str, ...]) -> tuple[list[int], list[int], str]:
        """A sampled reply, which ends before one of the texts `stops`: its ids, the end of turn if
        it lacks that, and its text."""
        text, whole = self.decode(ids), ids[-1] == self.end_of_turn
        if found := [text.index(stop) for stop in stops if stop in text]:
            text, whole = text[:min(found)], False
            while len(self.decode(ids)) > len(text) or ids[-1:] == [self.end_of_turn]:
                ids = ids[:-1]
        return ids, [] if whole else [self.end_of_turn], text.strip()

    def never(self, vocabulary: int) -> tuple[int, ...]:
        """Ids that are never sampled: other control tokens, and rows that pad the embedding."""
        control = {*self.tokenizer.convert_tokens_to_ids(self.special)} - {self.end_of_turn}
        return (*sorted(i for i in control | {*range(len(self.tokenizer), vocabulary)}
                        if i < vocabulary),)


# --------------------------------------------------------------------------- log-probabilities


@dataclass(frozen=True)
class Sampler:
    """softmax(logits / temperature) without some tokens, of which the mass would else grow."""
    temperature: float = 1.0     # 0: always the most probable token
    never: tuple[int, ...] = ()  # ids that are never drawn

    def logits(self, logits: Tensor) -> Tensor:
        """Those whose softmax is the distribution, (..., V) float32."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        never = torch.tensor(self.never, dtype=torch.long, device=logits.device)
        return (logits / (self.temperature or 1.0)).index_fill(-1, never, -torch.inf)


def token_log_probs(model, sequences: list[Trajectory], sampler: Sampler = Sampler()) -> Tensor:
    """log pi(t_k | t_<k) of every action token of every trajectory, laid end to end, (A,), in nats,
    by one pass. Padding on the right needs no mask: it stands behind all that matters. sampler:
    what pi is; as it stands, the softmax over the whole vocabulary."""
    device, longest = next(model.parameters()).device, max(len(s.ids) for s in sequences)
    ids, acts = (torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
                 for rows in ([s.ids for s in sequences], [s.action_mask for s in sequences]))
    acts = acts[:, 1:].bool()                                       # (B, L-1), and ids (B, L)
    # Logits are made only where the next token of some row is an action.
    keep = acts.any(0).nonzero()[:, 0]                                            # (K,)
    chosen = "logits_to_keep" in inspect.signature(model.forward).parameters
    logits = model(input_ids=ids, use_cache=False,
                   **dict(logits_to_keep=keep) if chosen else {}).logits          # (B, K, V)
    logits = (logits if chosen else logits[:, keep])[acts[:, keep]]               # (A, V)
    targets = ids[:, 1:][acts]                                                    # (A,)
    # log pi(t_k | t_<k) = log softmax(logits)[t_k]
    return -F.cross_entropy(sampler.logits(logits), targets, reduction="none")


def log_probs(accelerator, model, sequences: list[Trajectory], tokens: int,
              sampler: Sampler = Sampler()) -> Tensor:
    """`token_log_probs` of many, (A,), in passes of at most so many tokens with padding (0: of one
    trajectory each). Each rank runs some, all get all; gradients flow into a rank's own passes."""
    ranks, lengths = accelerator.num_processes, [len(s.ids) for s in sequences]
    first = [0, *itertools.accumulate(s.action_tokens for s in sequences)]
    longest_first = sorted(range(len(sequences)), key=lambda n: -lengths[n])  # little padding
    if ranks > 1 and tokens:  # no rank idles
        tokens = min(tokens, max(*lengths, math.ceil(sum(lengths) / ranks)))
    passes = fill(longest_first, tokens, lambda ns: len(ns) * lengths[ns[0]])
    own = torch.zeros(first[-1], device=accelerator.device)
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16):
        for k in range(accelerator.process_index, math.ceil(len(passes) / ranks) * ranks, ranks):
            # All ranks have to meet in a pass; one without work repeats something and forgets it.
            ns, counts = (passes[k], 1) if k < len(passes) else (passes[-1][-1:], 0)
            places = [j for n in ns for j in range(first[n], first[n + 1])]
            own = own.index_add(0, torch.tensor(places, device=own.device).long(), counts * (
                token_log_probs(model, [sequences[n] for n in ns], sampler)))
    return own if ranks == 1 else ranks * own + (  # gradients are averaged over ranks
        accelerator.reduce(own.detach()) - ranks * own.detach())


def action_log_probs(per_token: Tensor, sequences: list[Trajectory]) -> Tensor:
    """log pi(e|u) of each trajectory, (T,) float64, from those of its action tokens, (A,), in nats.
    Eq. (2), (5): the sum over action tokens t_k of log pi(t_k | t_<k); observations only condition.
    In float32 a few hundred nats lose more than a late step changes."""
    owner = torch.tensor([n for n, s in enumerate(sequences) for _ in range(s.action_tokens)],
                         dtype=torch.long, device=per_token.device)
    return per_token.new_zeros(len(sequences), dtype=torch.float64).index_add(
        0, owner, per_token.double())


def fill(things: list, size: float, cost: Callable[[list], float]) -> list[list]:
    """Consecutive things that cost at most `size` together, or one that costs more."""
    filled = []
    for thing in things:
        if not filled or cost([*filled[-1], thing]) > size:
            filled.append([])
        filled[-1].append(thing)
    return filled


# -------------------------------------------------------------------------------------- losses
# loss(policy, groups) -> the sum over the groups, (), and sums of statistics by kind, one of them
# the count. policy: log pi of all action tokens of the groups' trajectories, (A,), in nats.


@dataclass(frozen=True)
class Pair:
    """A preference between two trajectories of a group, by index."""
    kind: str
    chosen: int
    rejected: int
    weight: float = 1.0      # of the DPO term
    sft_weight: float = 0.0  # of the SFT term on the chosen trajectory


@dataclass
class Group:
    """One instruction: its distinct trajectories, each run through a model once, and its pairs."""
    sequences: list[Trajectory]
    pairs: list[Pair] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)  # log pi_ref(e|u) of each; empty: 0


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [s for g in groups for s in g.sequences]


def sft_loss(policy: Tensor, groups: list[Group]) -> tuple[Tensor, dict]:
    """Eq. (3)-(5), summed over the groups' trajectories."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions
    return -policy.double().sum(), {}


def dpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor,
             reference_rejected: Tensor, s) -> tuple[Tensor, Tensor]:
    """Eq. (7), of log-probabilities in nats, each (P,): each pair's loss and margin. It asks for
    s.beta."""
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) )
    margin = s.beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def preference_loss(policy: Tensor, groups: list[Group], s) -> tuple[Tensor, dict]:
    """Eq. (9), summed over the groups' pairs. With lambda_dpo 1 and every sft_weight 0 it is
    Eq. (7), the failure agent's loss. It asks for s.lambda_dpo, lambda_sft, log_prob, sft_term."""
    pi, ref, tokens, w, l = of_pairs(policy, groups, s.log_prob)
    preference, margin = dpo_loss(pi[w], pi[l], ref[w], ref[l], s)                # (P,)
    pairs = [p for g in groups for p in g.pairs]
    weight = pi.new_tensor([p.weight for p in pairs])                             # (P,)
    sft_weight = pi.new_tensor([p.sft_weight for p in pairs])                     # (P,)
    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_chosen|u)], failure pairs without SFT
    total = pi * tokens if s.log_prob == "mean" else pi                           # (T,)
    sft = -total[w] / (tokens[w] if s.sft_term == "mean" else 1)                  # (P,)
    loss = (s.lambda_dpo * weight * preference + s.lambda_sft * sft_weight * sft).sum()

    sums = {}
    for pair, *row in zip(pairs, total[w].tolist(), total[l].tolist(), margin.tolist()):
        row = dict(zip(("chosen", "rejected", "margin"), row), count=1, accuracy=row[2] > 0)
        add(sums, {pair.kind: row})
    return loss, sums


def of_pairs(policy: Tensor, groups: list[Group], log_prob: str = "sum") -> tuple[Tensor, ...]:
    """log pi, log pi_ref, action tokens, (T,) each; and the places of chosen and rejected, (P,)."""
    sequences = trajectories(groups)
    pi = action_log_probs(policy, sequences)
    reference = pi.new_tensor([r for g in groups for r in g.reference or [0.0] * len(g.sequences)])
    tokens = pi.new_tensor([s.action_tokens for s in sequences])
    if log_prob == "mean":
        pi, reference = pi / tokens, reference / tokens
    firsts = itertools.accumulate((len(g.sequences) for g in groups), initial=0)
    places = [(n + p.chosen, n + p.rejected) for n, g in zip(firsts, groups) for p in g.pairs]
    return pi, reference, tokens, *torch.tensor(places, device=pi.device).reshape(-1, 2).T


def add(sums: dict, more: dict) -> None:
    for kind, row in more.items():
        before = sums.get(kind, {})
        sums[kind] = {name: before.get(name, 0) + x for name, x in row.items()}


# ------------------------------------------------------------------------------ optimiser loop


@dataclass(frozen=True)
class Objective:
    """What a batch is trained on, and how. Its loss is a sum over its groups, divided by one over
    the whole batch: a mean of passes' means would weigh a pair by the pass that it is in."""
    loss: Callable              # (policy, groups) -> sum, statistics
    divisor: Callable           # group -> number
    lr: float                   # peak
    warmup: float = 0.0         # share of the steps, linear
    schedule: str = "constant"  # or cosine, after the warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    tokens: int = 4096          # whose activations are in memory at once, on all ranks together
    before: Callable | None = None  # (batch, log_probs) -> a third argument of the loss
    sampler: Sampler = Sampler()  # what pi is

    def rate(self, step: int, steps: int) -> float:
        rising = int(self.warmup * steps)  # a phase of one step has none
        if step < rising:
            return self.lr * step / rising
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def batches(groups: list[Group], size: int, unit: str, rng: random.Random) -> list[list[Group]]:
    """The groups, shuffled, in batches of at most `size` pairs (or instructions), each whole."""
    cost = (lambda gs: sum(max(1, len(g.pairs)) for g in gs)) if unit == "pairs" else len
    return fill(rng.sample(groups, len(groups)), size, cost)


def together(groups: list[Group], tokens: int) -> list[list[Group]]:
    return fill(groups, tokens, lambda gs: sum(len(s.ids) for s in trajectories(gs)))


@torch.no_grad()
def add_references(model, groups: list[Group], log_probs: Callable, tokens: int) -> None:
    """Puts log pi_ref(e|u) of each trajectory into its group."""
    for some in together(groups, tokens):
        sequences = trajectories(some)
        values = action_log_probs(log_probs(model, sequences), sequences).tolist()
        for g in some:
            g.reference, values = values[:len(g.sequences)], values[len(g.sequences):]


def fit(model, steps: list[list[Group]], log_probs: Callable, how: Objective, log: Callable,
        checkpoint=None, optimizer=None) -> None:
    """Trains a model of `load` in place by AdamW, a batch a step; FloatingPointError where the loss
    is not finite. log_probs(model, trajectories) -> (A,). log(dict): after each step.
    checkpoint: restore(model, optimizer) -> steps done; keep(model, optimizer, step)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(parameters, fused=True,
                                               weight_decay=how.weight_decay)
    done = checkpoint.restore(model, optimizer) if checkpoint else 0
    for step, batch in enumerate(steps[done:], done + 1):
        total, statistics, divisor = 0.0, {}, sum(map(how.divisor, batch))
        given = [how.before(batch, partial(log_probs, model))] if how.before else []
        for groups in together(batch, how.tokens):
            value, sums = how.loss(log_probs(model, trajectories(groups)), groups, *given)
            (value / divisor).backward()
            total += value.item() / divisor
            add(statistics, sums)
        if torch.distributed.is_initialized() and not isinstance(model, FSDPModule):
            for p in parameters:  # whole on each rank; gradients of shards are averaged already
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                torch.distributed.all_reduce(p.grad.div_(torch.distributed.get_world_size()))
        norm = torch.nn.utils.clip_grad_norm_(parameters, how.max_grad_norm)
        norm = getattr(norm, "full_tensor", lambda: norm)().item()  # of shards
        if not math.isfinite(total + norm):
            raise FloatingPointError(f"loss {total}, gradient norm {norm} at step {step} on tasks "
                                     f"{', '.join({s.task: 0 for s in trajectories(batch)})}")
        optimizer.param_groups[0]["lr"] = rate = how.rate(step - 1, len(steps))
        optimizer.step()
        optimizer.zero_grad()
        log(dict(step=step, loss=total, lr=rate, norm=norm, kinds={
            kind: {name: x if name == "count" else x / row["count"] for name, x in row.items()}
            for kind, row in statistics.items()}))
        if checkpoint:
            checkpoint.keep(model, optimizer, step)


# -------------------------------------------------------------------------------------- models


def read(kind, folder, **how):
    """What kind.from_pretrained makes of a folder or hub name; Unusable where it makes nothing."""
    try:
        return kind.from_pretrained(str(folder), **how)
    except Exception as error:  # of safetensors, too, and of tokenizers
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unusable(f"--model {folder}: {said}; give a hub name within reach, or a folder with "
                       "config, weights and tokenizer of a causal LM") from None


def read_config(folder):
    """The config in a folder; of a checkpoint that also reads pictures that of its text model, if
    transformers has that as a causal LM of its own."""
    config = read(transformers.AutoConfig, folder)
    text = config.get_text_config(decoder=True)
    text.tie_word_embeddings |= config.tie_word_embeddings
    return text if type(text) in transformers.AutoModelForCausalLM._model_mapping else config


def read_model(folder, dtype=torch.float32, device="cpu"):
    """The causal LM in a folder. Unusable where it lacks weights, which transformers would draw."""
    model, found = read(transformers.AutoModelForCausalLM, folder, dtype=dtype,
                        device_map={"": device}, output_loading_info=True)
    if lacking := sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]})):
        raise Unusable(f"--model {folder}: {len(lacking)} weights are missing, such as "
                       f"{lacking[0]}; give a whole checkpoint")
    config = read_config(folder)
    if type(model.config) is not type(config):  # it also reads pictures, as Gemma 3 does
        with init_empty_weights():
            text = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        setattr(text, text.base_model_prefix, model.get_decoder())
        text.set_output_embeddings(model.get_output_embeddings())
        model = text.eval()
    if type(model.config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise Unusable(f"--model {folder}: what is saved of it cannot be read; use a text model")
    model.generation_config = transformers.GenerationConfig()  # its own may penalise repetitions
    return model


def layers(model) -> torch.nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)),
               key=lambda m: sum(p.numel() for p in m.parameters()))


def prepare(model, recompute: bool):
    """The model, ready to train; in eval mode: with dropout the first DPO loss is not ln 2."""
    for layer in layers(model) if recompute else ():  # gradient checkpointing
        layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                use_reentrant=False)
    return model.eval()


def load(accelerator, folder, recompute: bool, shard: bool):
    """The model in a folder, ready to train, its weights in fp32: bf16 ones do not move at a rate
    of 1e-6. shard: in parts over the ranks (FSDP2), read by one of them; else whole on each."""
    gc.collect()  # a sharded model that nobody holds any more is freed only here
    if not shard:
        return prepare(read_model(folder, device=accelerator.device), recompute)
    whole = read_model(folder).state_dict() if accelerator.is_main_process else {}
    with init_empty_weights():  # parameters without data; buffers, some in no file, with theirs
        model = transformers.AutoModelForCausalLM.from_config(read_config(folder),
                                                              dtype=torch.float32)
    model.tie_weights()
    prepare(model, recompute)
    bf16 = accelerator.mixed_precision == "bf16"
    how = dict(mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
               mp_policy=MixedPrecisionPolicy(*(torch.bfloat16, torch.float32) if bf16 else ()),
               reshard_after_forward=True)
    for part in [*layers(model), model]:
        fully_shard(part, **how)
    states.set_model_state_dict(model, whole, options=states.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    return model


def save(accelerator, model, tokenizer, folder) -> None:
    """Writes a model of `load`, whole, as `from_pretrained` reads it. Every rank has to call it."""
    weights = states.get_model_state_dict(
        model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        tied = model.all_tied_weights_keys or {}  # which would stand in the file twice
        model.save_pretrained(folder, state_dict={k: weights[k] for k in weights if k not in tied})
        tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------------------ sampling


@torch.inference_mode()
def replies(model, encoder: Encoder, sampler: Sampler, max_new_tokens: int, stops: tuple[str, ...],
            asked: list[tuple[list[int], random.Random]], alone: bool = False,
            cache: bool = True) -> list[tuple]:
    """A reply to each conversation, (ids so far, random numbers): sampled ids, at most so many, up
    to the end of turn or a text in `stops`; and each one's log-probability as the sampler had it,
    nats (none at temperature 0). alone: one by one. cache: of what was read already."""
    if alone and len(asked) > 1:
        return [replies(model, encoder, sampler, max_new_tokens, stops, [one], True, cache)[0]
                for one in asked]
    prompts, end = [ids for ids, _ in asked], encoder.end_of_turn
    longest = max(map(len, prompts))

    def left(rows):  # padded there, all begin to write in the same column
        return torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)

    draw = Draw([rng for _, rng in asked], sampler, end, lambda ids: any(
        stop in encoder.decode(ids[longest:][-len(stop) - 1:]) for stop in stops))
    rows = model.generate(left(prompts), attention_mask=left([[1] * len(p) for p in prompts]),
                          do_sample=False, eos_token_id=end, pad_token_id=end,
                          max_new_tokens=max_new_tokens, logits_processor=[draw],
                          use_cache=cache)
    rows = [row[:row.index(end) + 1] if end in row else row for row in rows[:, longest:].tolist()]
    log_probs = torch.stack(draw.log_probs, 1).tolist() if draw.log_probs else [[]] * len(rows)
    return [(row, values[:len(row)]) for row, values in zip(rows, log_probs)]


class Draw(transformers.LogitsProcessor):
    """Draws each row's token with the row's own random numbers, so that what runs beside it changes
    nothing, and leaves `generate` no other choice. A row that is over draws no more."""
    def __init__(self, rngs: list[random.Random], sampler: Sampler, end: int, stopped: Callable):
        self.rngs, self.sampler, self.end, self.stopped = rngs, sampler, end, stopped
        self.over, self.log_probs = [False] * len(rngs), []

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        logits = self.sampler.logits(logits)                                      # (B, V)
        if not (logits < torch.inf).all():  # nor nan
            raise FloatingPointError("logits that are no numbers; lower the learning rate")
        self.over = [over or self.stopped(row) for over, row in zip(self.over, ids.tolist())]
        if not self.sampler.temperature:
            token = logits.argmax(-1, keepdim=True)                               # (B, 1)
        else:
            log_p = logits.log_softmax(-1)
            cdf = log_p.exp().double().cumsum(-1)                                 # (B, V)
            draws = [0.0 if over else rng.random() for over, rng in zip(self.over, self.rngs)]
            u = cdf[:, -1:] * torch.tensor(draws, dtype=torch.float64, device=cdf.device)[:, None]
            token = (cdf <= u).sum(-1, keepdim=True)                              # (B, 1)
            self.log_probs.append(log_p.gather(1, token)[:, 0])
        token = token.masked_fill(torch.tensor(self.over, device=token.device)[:, None], self.end)
        self.over = [over or t == self.end for over, t in zip(self.over, token[:, 0].tolist())]
        return torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)


@torch.inference_mode()
def trial(model, encoder: Encoder, longest: int = 64) -> tuple[bool, bool, bool]:
    """Whether passes, and whether replies, are to be of one text at a time, and these may keep a
    cache: the fastest way with the log-probabilities of plain passes over texts of up to `longest`
    tokens. Unusable where none has."""
    # Mean error of a token in nats: rounding makes up to 1e-5 in fp32, 0.02 in bf16, faults 0.05.
    most = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.03
    never = (*encoder.never(model.config.get_text_config().vocab_size), encoder.end_of_turn)
    sampler, known = Sampler(never=never), sorted({*range(len(encoder.tokenizer))} - {*never})
    texts = [random.Random(k).choices(known, k=k) for k in (longest - 8, longest // 2)]
    for cache, alone in itertools.product((True, False), (False, True)):
        try:
            made = replies(model, encoder, sampler, 8, (),
                           [(ids, random.Random(0)) for ids in texts], alone, cache)
            whole = [Trajectory(ids=ids + new, action_mask=[0] * len(ids) + [1] * len(new))
                     for ids, (new, _) in zip(texts, made)]
            plain = torch.cat([token_log_probs(model, [t], sampler) for t in whole])
            drawn = plain.new_tensor([x for _, log_probs in made for x in log_probs])
            if (plain - drawn).abs().mean() < most:
                padded = token_log_probs(model, whole, sampler)
                return not (plain - padded).abs().mean() < most, alone, cache
            fault = "its replies have other log-probabilities than plain passes over them"
        except Exception as error:  # of its code for a cache or a mask, say
            fault = str(error).partition("\n")[0]
    raise Unusable(f"{type(model).__name__} cannot be used: {fault}; use another model")
