"""Episodes side by side: an agent on this machine, or a chat endpoint, plays tasks.

`play` gives the rows of a phase; `rollout` is the engine: one model, many slots, a cache of keys and
values that is kept over all turns of an episode.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import AutoTokenizer

import chat
import dpo
import envs
from plan import cache_shape, slot_bytes, slots_that_fit
from runner import Run, load_model


@dataclass
class Episode:
    """One episode: what it is, and what has happened so far."""

    task: str
    agent: str
    iteration: int
    rollout: int
    seed: int
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)   # everything read and written, in order
    mask: list[int] = field(default_factory=list)  # 1 where the agent sampled the token
    past: int = 0                                  # how many of `ids` are in the cache
    reply_at: int = 0                              # where the running reply begins
    reward: float = 0.0
    raw_reward: float | None = None                # before clipping, where the environment clips
    steps: int = 0
    cut_replies: int = 0                           # that filled max_new_tokens
    ended: str = ""                                # done, budget, context or lost

    def record(self) -> dict:
        return dict(task=self.task, agent=self.agent, iteration=self.iteration,
                    rollout=self.rollout, seed=self.seed, messages=self.messages, ids=self.ids,
                    action_mask=self.mask, reward=self.reward, steps=self.steps,
                    cut_replies=self.cut_replies, ended=self.ended,
                    **({} if self.raw_reward is None else {"raw_reward": self.raw_reward}))


def play(run: Run, phase: str, agent: Path, episodes: list[Episode], temperature) -> list[dict]:
    """The episodes' trajectories as rows, in order. Lost ones are left out and logged.

    Each rank plays its share, all get all rows. agent: the folder of the model that plays.
    """
    share = episodes[run.accelerator.process_index::run.accelerator.num_processes]
    order = {(e.task, e.rollout): n for n, e in enumerate(episodes)}
    with run.bar(phase, len(share), "episode") as progress:
        if run.settings.method == "chat":  # one process asks, with as many threads as slots
            rows = chat.play(run, episodes, progress) if run.main else []
        else:
            rows = play_policy(run, agent, share, temperature, progress, len(episodes))
    rows = sorted(gather_object(rows), key=lambda row: order[row["task"], row["rollout"]])
    lost = [row["task"] for row in rows if row["ended"] == "lost"]
    run.log_dropped(phase, LOST, lost)
    if too_many(len(lost), len(rows)):
        raise envs.EnvError(f"{phase}: {len(lost)} of {len(rows)} episodes were lost")
    if lost:
        run.say(f"{phase}: {len(rows) - len(lost)} of {len(rows)} episodes; {LOST} on "
                f"{', '.join(lost)}")
    return [row for row in rows if row["ended"] != "lost"]


def play_policy(run: Run, agent: Path, share: list[Episode], temperature, progress,
                of: int) -> list[dict]:
    """The rows of `rollout` by the agent in a folder, which is in memory only meanwhile.

    of: episodes of the phase on all ranks, of which `share` is this one's.
    """
    s, device = run.settings, run.accelerator.device
    bf16 = run.accelerator.mixed_precision == "bf16"
    model = load_model(agent, torch.bfloat16 if bf16 else torch.float32)
    model, slots = model.to(device), s.slots
    if device.type == "cuda":  # episodes that do not fit beside the replica wait
        free = torch.cuda.mem_get_info(device)[0]
        slot = s.max_tokens * slot_bytes(model.config, model.dtype.itemsize)
        slots = max(1, min(slots, slots_that_fit(free, slot)))
    encoder = dpo.Encoder(AutoTokenizer.from_pretrained(agent))
    threads = torch.get_num_threads()
    if device.type == "cpu" and model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # several would only wait for each other: 1.6 s against 3.6 s
    rollout(model, encoder, run.make_env, share, temperature=temperature, slots=slots,
            max_tokens=s.max_tokens, max_new_tokens=s.max_new_tokens,
            tokens_per_forward=s.tokens_per_forward, progress=progress, of=of)
    torch.set_num_threads(threads)
    del model
    run.accelerator.free_memory()
    return [e.record() for e in share]


class SlotCache:
    """Keys and values of the episodes side by side, kept over all turns of an episode.

    Bytes: layers x 2 x slots x key heads x tokens x width of a head x bytes of a number, so 19 GB
    for 36 layers, 32 slots, 8 heads, 4,096 tokens, 128 wide, in bf16.
    """

    def __init__(self, model, slots: int, tokens: int):
        layers, heads, d = cache_shape(model.config)
        self.kv = torch.empty((layers, 2, slots, heads, tokens, d), dtype=model.dtype,
                              device=model.device)
        # Neighbouring slots can be read in one product, each as far as the longest of them: fewer
        # launches for a GPU, where this has not been measured; a CPU waits for the keys it reads.
        self.together = 1 if model.device.type == "cpu" else slots
        if self.together > 1:
            self.kv.zero_()  # what is masked has weight 0, but 0 x nan is nan

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        """Says where the coming tokens go.

        segments: (slot, past, n), n new tokens after the `past` that the slot holds; those of one
        token come first.
        """
        device, heads = self.kv.device, self.kv.shape[3]
        single = [(slot, past) for slot, past, n in segments if n == 1]
        at = torch.tensor(single, dtype=torch.long, device=device).reshape(-1, 2)        # (S, 2)
        self.slots, self.positions = at.T
        # Slots that are read in one product: rows of the cache, length of the longest, mask of what
        # lies beyond each one's own (None for one slot); and how many rows.
        self.runs, self.sizes, first = [], [], 0
        while first < len(single):
            end = first + 1
            while (end < len(single) and single[end][0] == single[end - 1][0] + 1
                   and end - first < self.together):
                end += 1
            slot, longest, hidden = single[first][0], max(p for _, p in single[first:end]) + 1, None
            if end - first > 1:
                own = self.positions[first:end].repeat_interleave(heads)[:, None, None]
                hidden = torch.arange(longest, device=device) > own         # (rows, 1, longest)
            rows = slice(slot * heads, (slot + end - first) * heads)
            self.runs.append((rows, longest, hidden))
            self.sizes.append((end - first) * heads)
            first = end
        # In a longer segment new token j sees the past and the new tokens up to itself.
        self.longer = [(slot, past, n, None if not past else torch.ones(
            n, past + n, dtype=torch.bool, device=device).tril(past))
            for slot, past, n in segments[len(single):]]

    def attend(self, layer: int, query, key, value, scaling: float):
        """Adds key and value (1, H_kv, N, d) of the tokens placed; their attention, (1, N, H, d).

        query (1, H, N, d). Each token sees what its own slot holds, up to itself.
        """
        keys, values = self.kv[layer]                                     # (slots, H_kv, T, d)
        H, N, d = query.shape[1:]
        query, key, value = query[0], key[0], value[0]
        out, S = query.new_empty(N, H, d), len(self.slots)                # S single tokens first
        keys[self.slots, :, self.positions] = key[:, :S].transpose(0, 1)
        values[self.slots, :, self.positions] = value[:, :S].transpose(0, 1)
        # Single tokens: the query heads that share a key head are rows of one product.
        q = (query[:, :S] * scaling).transpose(0, 1).reshape(-1, H // keys.shape[1], d)
        k, v = keys.flatten(0, 1), values.flatten(0, 1)                   # (slots H_kv, T, d)
        parts = zip(self.runs, q.split(self.sizes), out[:S].view_as(q).split(self.sizes))
        for (rows, n, hidden), part, result in parts:
            scores = torch.bmm(part, k[rows, :n].mT)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))
            torch.bmm(weights.to(v.dtype), v[rows, :n], out=result)
        for slot, past, n, mask in self.longer:
            new, end = slice(S, S + n), past + n
            keys[slot, :, past:end], values[slot, :, past:end] = key[:, new], value[:, new]
            k, v = keys[slot, None, :, :end], values[slot, None, :, :end]
            if mask is not None and k.is_cuda:  # there a mask and fewer key heads have no kernel
                k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
            out[new] = F.scaled_dot_product_attention(
                query[None, :, new], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=H != k.shape[1])[0].transpose(0, 1)
            S += n
        return out[None]


@torch.inference_mode()
def rollout(model, encoder: dpo.Encoder, make_env, episodes: list[Episode], *, temperature: float,
            slots: int, max_tokens: int, max_new_tokens: int, tokens_per_forward: int,
            progress=None, of: int = 0) -> list[Episode]:
    """Plays the episodes, `slots` side by side, and returns them in the order given.

    Each turn of the loop is one forward pass over every slot with something new: one sampled token,
    or a page. A slot keeps its cache over an episode's turns and takes the next episode at once; of
    a prompt that begins like the last one's it reads the rest only. Every episode has its own
    random generator, so what runs beside it changes nothing but rounding. `make_env()` gives each
    slot its environment. An episode whose environment breaks ends "lost", which is no failure of
    the agent's; EnvError is raised if `check_lost` says that too many are, of these episodes or of
    so many on all ranks (`of`), or after LOST_IN_A_ROW in succession.
    """
    if not episodes:  # of a rank's share
        return episodes
    model.eval()
    slots = min(slots, len(episodes))
    waiting, cache = list(reversed(episodes)), SlotCache(model, slots, max_tokens)
    environments, playing, rngs = {}, {}, {}  # by slot
    lost_in_a_row = 0   # episodes, since an environment last answered
    left = {}           # slot -> the ids whose keys and values its last episode left in the cache
    answers, now = {}, 0  # slot -> (pass at which to read its environment's answer, the answer)
    vocabulary = len(encoder.tokenizer)
    known = [t for t in encoder.forbidden if t < model.config.get_text_config().vocab_size]
    forbidden = torch.tensor(known, dtype=torch.long, device=model.device)
    threads = ThreadPoolExecutor(slots)

    def ask(slot, call, text):
        answers[slot] = now + environments[slot].latency, threads.submit(call, text)

    def free_if_ended(slot):
        if playing[slot].ended:
            e = playing.pop(slot)
            left[slot] = e.ids[:e.past]
            if progress is not None:
                progress.update()

    try:
        while waiting or playing:
            for slot in range(slots):
                if slot not in playing and waiting:
                    if slot not in environments:
                        environments[slot] = make_env()
                    e = playing[slot] = waiting.pop()
                    rngs[slot] = random.Random(e.seed)
                    ask(slot, environments[slot].reset, e.task)

            # A slow environment works while others generate. Its answer is read a fixed number of
            # passes later, not when it is there: batches, and so rounding, must not depend on time.
            if len(answers) == len(playing):
                now = max(now, min(due for due, _ in answers.values()))
            for slot in [slot for slot, (due, _) in sorted(answers.items()) if due <= now]:
                e, (_, answer) = playing[slot], answers.pop(slot)
                try:
                    _observe(e, encoder, environments[slot], answer.result(), max_tokens)
                    lost_in_a_row = 0
                    if not e.steps:  # a prompt that the slot has read before is not read again
                        e.past = dpo.shared_beginning(left.get(slot, []), e.ids[:-1])
                except envs.EnvError as error:
                    e.ended, lost_in_a_row = "lost", lost_in_a_row + 1
                    if lost_in_a_row == LOST_IN_A_ROW:
                        raise
                    check_lost(sum(e.ended == "lost" for e in episodes), of or len(episodes), error)
                free_if_ended(slot)

            # Every single token that waits, then pages while they fit, but one page in any case.
            chosen, room = [], tokens_per_forward
            for slot in sorted(playing.keys() - answers.keys(), key=lambda slot: (
                    len(playing[slot].ids) - playing[slot].past, slot)):
                n = len(playing[slot].ids) - playing[slot].past
                if n == 1 or n <= room or room == tokens_per_forward:
                    chosen.append(slot)
                    room -= n if n > 1 else 0
            now += 1
            if not chosen:
                continue
            logits = _next_token_logits(model, cache, [(slot, playing[slot]) for slot in chosen])
            if not (logits < torch.inf).all():  # nor nan
                tasks = ", ".join(playing[slot].task for slot in chosen)
                raise FloatingPointError(f"logits that are no numbers on tasks {tasks}")
            logits[:, forbidden] = -torch.inf
            logits[:, vocabulary:] = -torch.inf  # rows that only pad the embedding
            draws = [rngs[slot].random() for slot in chosen] if temperature else None
            for slot, token in zip(chosen, sample(logits, temperature, draws).tolist()):
                e = playing[slot]
                e.ids.append(token)
                e.mask.append(1)
                if _reply_ended(e, encoder, token, max_tokens, max_new_tokens):
                    reply = encoder.decode(e.ids[e.reply_at:])
                    e.messages.append({"role": "assistant", "content": reply})
                    ask(slot, environments[slot].step, reply)
                free_if_ended(slot)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        wait([answer for _, answer in answers.values() if not answer.done()], timeout=1)
        for slot, env in environments.items():
            if slot not in answers or answers[slot][1].done():  # nobody waits for one that hangs
                env.close()
    return episodes


# Lost episodes that are tolerated: this share of a phase, at least one. So many in succession mean
# that the environment itself is down [ours].
LOST_SHARE, LOST_IN_A_ROW, LOST = 0.01, 3, "the environment broke"


def too_many(lost: int, of: int) -> bool:
    return 0 < lost == of or lost > max(1, LOST_SHARE * of)


def check_lost(lost: int, of: int, error: envs.EnvError) -> None:
    """Tells of an episode that is lost; raises `error` where `lost` of `of` are too many."""
    if too_many(lost, of):
        raise error
    tqdm.write(f"lost, and left out: {error}", file=sys.stderr)


def _next_token_logits(model, cache, playing) -> torch.Tensor:
    """One pass over the tokens not yet in the cache; logits after each segment's last, (S, V)."""
    new = [e.ids[e.past:] for _, e in playing]
    device, lengths = model.device, [len(ids) for ids in new]
    ids = torch.tensor([i for part in new for i in part], device=device)              # (N,)
    positions = torch.tensor([i for _, e in playing for i in range(e.past, len(e.ids))],
                             device=device)                                           # (N,)
    cache.place([(slot, e.past, n) for (slot, e), n in zip(playing, lengths)])
    last = torch.tensor(lengths, device=device).cumsum(0) - 1                         # (S,)
    logits = model(input_ids=ids[None], position_ids=positions[None], lengths=lengths,
                   cache=cache, logits_to_keep=last, use_cache=False).logits[0]       # (S, V)
    for _, e in playing:
        e.past = len(e.ids)
    return logits.float()


def sample(logits: torch.Tensor, temperature: float, draws: list[float] | None) -> torch.Tensor:
    """A token per row of logits (S, V): the best one at temperature 0, else by inverse CDF.

    draws: one uniform number in [0, 1) per row, from the episode's own generator.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits.double() / temperature, -1).cumsum(-1)                 # (S, V)
    u = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cdf[:, -1:]
    return (cdf <= u).sum(-1)


def _append(e: Episode, ids: list[int], max_tokens: int) -> None:
    """The episode reads `ids`, or ends if no reply would fit after them."""
    if len(e.ids) + len(ids) >= max_tokens:
        e.ended = "context"
        return
    e.ids += ids
    e.mask += [0] * len(ids)
    e.reply_at = len(e.ids)


def _reply_ended(e: Episode, encoder, token: int, max_tokens: int, max_new_tokens: int) -> bool:
    """Whether the reply is complete; an end of turn that was not sampled gets mask 0.

    A reply that fills the context is taken back and ends the episode at its last whole turn.
    """
    if token == encoder.end_of_turn:
        return True
    if len(e.ids) >= max_tokens - 1:
        del e.ids[e.reply_at:], e.mask[e.reply_at:]
        e.ended = "context"
        return False
    reply = e.ids[e.reply_at:]
    if encoder.has_colon(token) and "Observation:" in encoder.decode(reply[-8:]):
        ours = encoder.decode(reply).index("Observation:")  # what follows is the environment's
        while len(encoder.decode(e.ids[e.reply_at:])) > ours:
            e.ids.pop()
            e.mask.pop()
    elif len(reply) < max_new_tokens:
        return False
    else:
        e.cut_replies += 1
    e.ids.append(encoder.end_of_turn)
    e.mask.append(0)
    e.past = min(e.past, len(e.ids) - 1)
    return True


def _observe(e: Episode, encoder, env, answer, max_tokens: int) -> None:
    """The episode reads what its environment answered: to `reset` a text, to `step` a Step."""
    if isinstance(answer, str):
        e.messages = envs.opening(env, answer)
        _append(e, encoder.start(e.messages), max_tokens)
        return
    e.reward, e.raw_reward, e.steps = answer.reward, answer.raw, e.steps + 1
    if answer.done or e.steps == env.max_steps:
        e.ended = "done" if answer.done else "budget"
        return
    _append(e, encoder.observation(answer.observation), max_tokens)
    if not e.ended:
        e.messages.append({"role": "user", "content": answer.observation})
