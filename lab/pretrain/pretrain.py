"""Makes the tiny model, `tiny/`: it reads what it is shown, and learns on a laptop.

A Llama of two layers with a tokenizer and chat template of its own. It is trained on random tokens
said twice, which forms the heads that copy (a norm on queries and keys, as in Qwen3, keeps them
from forming), and then on practice texts, with copying kept in each batch. It never sees an expert
or an evaluated task, nor anybody who asks for what is held out for the split "unseen".

    bash run.sh pretrain [--env NAME ...] [--out FOLDER]

An environment's texts are of a recipe, lab/pretrain/recipes/NAME.py, with `conversations` and
`exchanged`.
"""

import argparse
import importlib
import random
import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

import dpo
from dpo import Group, Trajectory, action_count
from lab.pretrain.practice import exchange
from lab.runfiles import count

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}")
MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, head_dim=32, max_position_embeddings=2048,
             tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=10_000.0))
LENGTHS = dict(long=(5, 60), short=(3, 12))  # of what is said twice, in tokens
# Batches of 32 sequences said twice; then the texts, (conversations, passes over them), in batches
# of 16 conversations with so many sequences said twice.
COPY_BATCHES, COPY_RATE = 1000, 3e-3
TEXTS = {"webshop": (12_000, 4), "intercodesql": (16_000, 2), "scienceworld": (600, 6)}
COPIES = dict(long=8, short=12)
RATE = 2e-3
TOKENS = 4096  # of a pass, with padding
OBSERVED = 0.3  # of a text's other tokens than replies, the share that is trained on


def make(out: Path, texts: dict = TEXTS, copy_batches: int = COPY_BATCHES,
         width: int | None = None) -> None:
    """Pretrains a model on the texts {environment: (conversations, passes)}, into the folder `out`:
    on one machine with one version of the packages the same bits each time.

    width: of a model with as many layers and heads as the shipped one, which has 128. If given, it
    trains by packed passes, in half the time; what is rounded otherwise is another model."""
    torch.set_num_threads(1)
    transformers.set_seed(0)
    rng = random.Random(0)
    sources = {env: recipe(env) for env in texts}
    raw = {env: sources[env].conversations(0, texts[env][0]) for env in texts}
    kinds = {env: sources[env].exchanged() for env in texts}
    tokenizer = make_tokenizer(
        [m["content"] for env in texts for c in raw[env] for m in c]
        + [word for env in texts for kind in kinds[env] for word in (*kind.pool, *kind.fresh)])
    model = dpo.prepare(transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                    bos_token_id=None, pad_token_id=None, **shape(width or MODEL["hidden_size"])),
        dtype=torch.float32), False)
    model.set_attn_implementation("ragged" if width else "sdpa")
    accelerator = Accelerator(cpu=True)

    def copies(**count):
        return [copy_group(rng, len(tokenizer), *LENGTHS[length])
                for length in count for _ in range(count[length])]

    log_probs = log_probs_of(accelerator, packed=bool(width))
    train(model, [copies(long=32, short=16) for _ in range(copy_batches)], COPY_RATE, log_probs)
    fresh = {word for env in texts for kind in kinds[env] for word in kind.fresh}
    anything = tuple(word for word in sorted(tokenizer.get_vocab())
                     if re.fullmatch("[a-z]{3,}", word) and word not in fresh)
    read = []
    for env, (_, passes) in texts.items():
        for _ in range(passes):
            exchanged = [exchange(rng, c, kinds[env], anything) for c in raw[env]]
            ids = tokenizer.apply_chat_template(exchanged)["input_ids"]
            read += [text_group(rng, i[:MODEL["max_position_embeddings"]], tokenizer) for i in ids]
    batches = dpo.batches(read, 16, "instructions", rng)
    train(model, [batch + copies(**COPIES) for batch in batches], RATE, log_probs)
    model.set_attn_implementation("sdpa")
    dpo.save(accelerator, model, dpo.Encoder(tokenizer), out)
    (out / "README.md").write_text(card(out, texts), encoding="utf-8")


def shape(width: int) -> dict:
    """`MODEL` with another width, all of its layers in proportion."""
    times = width / MODEL["hidden_size"]
    wider = {name: round(times * MODEL[name])
             for name in ("hidden_size", "intermediate_size", "head_dim")}
    return MODEL | wider


def log_probs_of(accelerator, packed: bool):
    """log_probs(model, trajectories), by plain passes or by packed ones."""
    if packed:
        return partial(packing.log_probs, tokens=TOKENS, sampler=dpo.Sampler())
    return partial(dpo.log_probs_in_passes, accelerator, tokens=TOKENS)


def train(model, batches: list[list[Group]], rate: float, log_probs) -> None:
    losses = []
    objective = dpo.Objective(dpo.sft_loss, action_count, rate, warmup=0.05, schedule="cosine",
                              weight_decay=0.01, tokens=TOKENS)
    lines = dpo.training(model, dpo.adamw(model, objective), batches, objective, log_probs)
    for line in tqdm(lines, total=len(batches), unit=" steps", mininterval=10, disable=None):
        losses.append(line["loss"])
    print(f"loss {losses[0]:.2f} -> {sum(losses[-50:]) / len(losses[-50:]):.3f} nats per token")


def text_group(rng: random.Random, ids: list[int], tokenizer) -> Group:
    """A conversation, trained on its replies and a random share of the rest."""
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    mask, replies = [], False
    for i in ids:
        mask.append(int(replies or rng.random() < OBSERVED))
        replies = i == begin or replies and i != end
    return Group([Trajectory(ids=ids, action_mask=mask)])


def copy_group(rng: random.Random, vocabulary: int, shortest: int, longest: int) -> Group:
    """Random tokens, said twice; trained on what can be known, from the second said again."""
    once = [rng.randrange(vocabulary) for _ in range(rng.randint(shortest, longest))]
    mask = [0] * (len(once) + 1) + [1] * (len(once) - 1)
    return Group([Trajectory(ids=once * 2, action_mask=mask)])


def copy_loss(model, length: int, n: int = 256) -> float:
    """Nats per token of random tokens of the whole vocabulary said again, after the first."""
    vocabulary = model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (n, length), generator=random_tokens).repeat(1, 2)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, length:]        # (n, length - 1, V)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1:].flatten()).item()


def answers(model, tokenizer, env: str, fresh: bool, n: int = 300) -> tuple[int, float, float]:
    """How many exchanged words the replies of new practice text hold, and how often the likeliest
    of all such words is the one said, and one that was shown. fresh: words that no text held."""
    source = recipe(env)
    kinds, rng, encoder = source.exchanged(), random.Random(1), dpo.Encoder(tokenizer)
    unknown, known = ({i for word in words for i in tokenizer(word)["input_ids"]} for words in (
        [word for kind in kinds for word in kind.fresh],
        [word for kind in kinds for word in (*kind.words, *kind.pool)]))
    told, words = unknown if fresh else known, torch.tensor(sorted(unknown | known))
    asked = same = shown = 0
    for conversation in source.conversations(1, n):
        conversation = exchange(rng, conversation, kinds, fresh=fresh)
        ids, mask = (x[:2048] for x in encoder.encode(conversation, 1))
        places = [k for k, i in enumerate(ids) if mask[k] and i in told and i in ids[:k]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]                     # (l, V)
        for k in places:
            likeliest = words[logits[k - 1, words].argmax()].item()
            asked += 1
            same += likeliest == ids[k]
            shown += likeliest in told.intersection(ids[:k])
    return asked, same / asked, shown / asked


CARD = """\
---
license: mit
---
A Llama of {layers} layers x {hidden} with {parameters:,} parameters and {vocabulary:,} words: small
enough to train on a laptop. `bash run.sh pretrain` made it, with torch {torch}.

It has read random tokens said twice, and conversations of noisy players, who make mistakes, recover
and often fail: {read}.
Names, numbers and values are exchanged at random in each conversation.
It has never read an expert or an evaluated task, and nobody in its texts asks for, opens or queries
what is held out for the split "unseen".

Copy loss, in nats per token, on random tokens of the whole vocabulary said twice:
{copies}.

Exchanged words in replies of new conversations, which only the conversation can tell: how often the
likeliest word is the one said, how often one that was shown (of several a player takes any), and
the latter for words that no text held:

| | words | the one said | one that was shown | the same, words of no text |
|---|---|---|---|---|
{answers}
"""


def card(folder: Path, texts: dict) -> str:
    model = dpo.read_model(folder).eval()
    tokenizer = dpo.read(transformers.AutoTokenizer, folder)
    rows = [(env, *answers(model, tokenizer, env, fresh=False),
             answers(model, tokenizer, env, fresh=True)[2]) for env in texts]
    return CARD.format(
        layers=model.config.num_hidden_layers, hidden=model.config.hidden_size,
        parameters=model.num_parameters(), vocabulary=len(tokenizer), torch=torch.__version__,
        read=", ".join(f"{n:,} of {env} {passes} times" for env, (n, passes) in texts.items()),
        copies=", ".join(f"{copy_loss(model, n):.2f} at length {n}" for n in (6, 20, 60)),
        answers="\n".join("| {} | {} | {:.0%} | {:.0%} | {:.0%} |".format(*row) for row in rows))


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """One token per word, quoted word, number or mark of `texts`; others are spelled out. A noun is
    the same token in its plural and in "doctor_info"."""
    pattern = Regex(r"'[^\W_]+'|[^\W_]+(?:\.[^\W_]+)?|_|[^\w\s]")
    split = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    words -= {word for word in words if len(word) > 3 and word.endswith("s") and word[:-1] in words}
    letters = {chr(c) for c in range(33, 127)}
    special = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|unknown|>"]
    pieces = special + sorted(words | letters) + sorted("##" + c for c in letters)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = split
    # "search [ red mug ]" back to "search[red mug]", the form that environments read.
    tokenizer.decoder = decoders.Sequence([
        decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(" [", "["),
        decoders.Replace("[ ", "["), decoders.Replace(" ]", "]"), decoders.Replace(" _ ", "_")])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unknown|>", eos_token="<|end|>",
        additional_special_tokens=special[:3], chat_template=CHAT_TEMPLATE)


def recipe(env: str):
    return importlib.import_module(f"lab.pretrain.recipes.{env}")


def main(flags: list[str]) -> None:
    parser = argparse.ArgumentParser("run.sh pretrain", description="Makes the tiny model.")
    parser.add_argument("--env", nargs="+", default=list(TEXTS), choices=sorted(
        file.stem for file in (HERE / "recipes").glob("[a-z]*.py")),
        help="whose texts it reads, lab/pretrain/recipes/NAME.py [all built-in ones]")
    parser.add_argument("--width", type=count, help="of a model with as many layers and heads; "
                        "trained by packed passes [as the shipped one, 128]")
    parser.add_argument("--copies", type=count, default=COPY_BATCHES,
                        help="batches of sequences said twice, before the texts [%(default)s]")
    parser.add_argument("--conversations", type=count, help="of each environment, in place of as "
                        "many as the shipped model has read")
    parser.add_argument("--passes", type=count, help="over the conversations, likewise")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=HERE.parents[1] / "tiny",
                        help="where it goes [%(default)s]")
    given = parser.parse_args(flags)
    texts = {}
    for env in given.env:
        conversations, passes = TEXTS.get(env, (8000, 3))
        texts[env] = (given.conversations or conversations, given.passes or passes)
    make(given.out, texts, given.copies, given.width)


if __name__ == "__main__":
    main(sys.argv[1:])
