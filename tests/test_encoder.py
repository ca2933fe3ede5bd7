"""Text and ids are one: every tokenizer and template is either right to the token, or refused."""

import json
import random

import pytest
from conftest import CHATML, CONVERSATION, LLAMA2, LLAMA3, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import dpo

MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
           "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
           "{% endif %}{% endfor %}")
GEMMA = ("{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else "
         "m.role %}{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
         "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
VICUNA = ("{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
          "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}")
# name -> (template, control tokens, the one that ends a turn)
TEMPLATES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama2": (LLAMA2, ["<s>", "</s>"], "</s>"),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                        "<|eot_id|>"], "<|eot_id|>"),
    "mistral": (MISTRAL, ["<s>", "</s>"], "</s>"),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "vicuna": (VICUNA, ["<s>", "</s>"], "</s>"),
}
WORDS = ("search[red mug] click[Buy Now] It's \"quoted\" a||' '||b {\"name\": 1} \n \n\n \n\n\n  $36.0 "
         "[SEP] <think> </think> [INST] ASSISTANT: user model Ünïcode 日本 🙂 'x' ; -- <s > | #1").split(" ")


def build(name: str, kind: str = "bpe", template: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, or a Unigram one as of SentencePiece, with a chat template."""
    published, special, end = TEMPLATES[name]
    text = [m["content"] for m in CONVERSATION] * 3 + ["user assistant model [INST] [/INST]"]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        letters = [chr(c) for c in range(32, 127)] + list("▁\nÜï日本🙂")
        trainer = trainers.UnigramTrainer(
            vocab_size=420, special_tokens=[*special, "<unk>"], unk_token="<unk>",
            show_progress=False, initial_alphabet=letters)
    tokenizer.train_from_iterator(text, trainer)
    begin = special[0] if special[0] != end else None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=end,
        chat_template=template or published,
        additional_special_tokens=[t for t in special if t not in (begin, end)])


def whole(tokenizer, messages) -> list[int]:
    """The ids of the template's text of a conversation, up to its last end of turn."""
    read = messages[-1]["role"] == "user"
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=read)
    if not read:
        text = text[:text.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def says(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(0, 12))
    return " ".join(words).strip()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations_are_the_ids_of_the_whole(name, kind):
    tokenizer = build(name, kind)
    encoder = dpo.Encoder(tokenizer)
    rng = random.Random(name + kind)
    for _ in range(30):
        messages = []
        for turn in range(rng.randint(1, 9)):
            role = "assistant" if turn % 2 else "user"
            messages.append(dict(role=role, content=encoder.plain(says(rng))))
        ids, mask = encoder.encode(messages, 1)
        assert ids == whole(tokenizer, messages)
        # Replies with their ends of turn are actions, and nothing else is.
        ends = [k for k, i in enumerate(ids) if i == encoder.end_of_turn and mask[k]]
        assert len(ends) == len(messages) // 2
        assert mask[:len(encoder.start(messages[:1]))].count(1) == 0


BODY = CHATML.replace("{{ m.content }}", "{{ BODY }}")
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("template, says", [
    (BODY.replace("BODY", "m.content | trim"), None),
    (CHATML.replace("<|im_end|>\n{%", "<|im_end|>{%"), None),
    ("CONTENT of July\n" + CHATML, None),
    (CHATML.replace(PROMPT, ""), "does not write"),
    (CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"), "changes a turn"),
    (BODY.replace("BODY", "m.content.split('</think>')[-1]"), "does not think"),
    (BODY.replace("BODY", "m.content if loop.last else m.content.split('</think>')[-1]"),
     "does not think"),
    (BODY.replace("BODY", "m.content.split() | join(' ')"), "change what they say"),
    (BODY.replace("BODY", "m.content.replace('\n\n\n', '\n\n')"), "change what they say"),
    (BODY.replace("BODY", "m.content | e"), "change"),
    (BODY.replace("BODY", "m.content | lower"), "change"),
    (BODY.replace("BODY", "m.content | tojson"), "its chat template"),
    (BODY.replace("BODY", "m.content[:60]"), "change what they say"),
    (BODY.replace("BODY", "m.content if loop.index0 + 3 > messages | length else m.content[:9]"),
     "change what they say"),
    (CHATML.replace("{{ m.content }}", "[Round {{ loop.index0 // 2 }}] {{ m.content }}"),
     "does not write"),
    (CHATML.replace("{{ m.role }}", "{{ m.role }}{{ loop.index if loop.index > 4 else '' }}"),
     "number turns"),
    (CHATML.replace("<|im_start|>{{", "{% if loop.index0 // 2 > 1 %}[Round {{ loop.index0 // 2 }}]"
                    "{% endif %}<|im_start|>{{"), "number turns"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}", "no control token ends a reply"),
    ("{{ raise_exception('only for tools') }}" + CHATML, "fails: only for tools"),
    ("{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}" + CHATML,
     "fails: too long"),
    ("{% for m in", "fails"),
    ("{{ messages[0].nothing.at_all }}" + CHATML, "fails"),
])
def test_a_template_is_right_as_a_whole_or_refused_in_a_line(template, says):
    tokenizer = build("chatml", template=template)
    if says is None:
        dpo.Encoder(tokenizer)
        return
    with pytest.raises(dpo.Unusable, match=says) as refusal:
        dpo.Encoder(tokenizer)
    assert "\n" not in str(refusal.value).replace("\\n", "")


def test_a_template_that_reads_the_clock_reads_one_date(monkeypatch):
    """Else the opening of a run that goes on tomorrow would be another than today's."""
    dated = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML
    encoder = dpo.Encoder(build("chatml", template=dated))
    assert "Today: 26 Jul 2024" in encoder.decode(encoder.start(CONVERSATION[:1]))


# -------------------------------------------------------------------------- what the agent writes


@pytest.mark.parametrize("written, stops, kept, reply", [
    (["click[Buy Now", "]\n", "Observation", ":", " won"], ("\nObservation:",), 2,
     "click[Buy Now]"),
    (["click[Buy Now", "]", "\n", "Observation", ":"], ("\nObservation:",), 2, "click[Buy Now]"),
    (["go", "]\n\n", "Task", ":"], ("\n\nTask:",), 2, "go]"),
    (["go", " xObservation", ":"], ("Observation:",), 1, "go"),  # its x has no ids of its own
    (["Observation", ":", "won"], ("Observation:",), 0, ""),
    (["a", "\n---", "b", "Observation", ":"], ("Observation:", "\n---"), 1, "a"),
    (["a", " ", "b"], ("Observation:",), 3, "a b"),
])
def test_a_cut_reply_is_the_text_of_the_ids_that_stay(written, stops, kept, reply):
    """Also where one token holds the reply's last letters and the first ones of a stop."""
    tokenizer = build("chatml")
    tokenizer.add_tokens(sorted({*written} - {*tokenizer.get_vocab()}))
    encoder = dpo.Encoder(tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in written]
    stay, missing, text = encoder.close(ids, stops)
    assert (stay, missing, text) == (ids[:kept], [encoder.end_of_turn], reply)
    assert encoder.decode(stay).strip() == text


def test_decoding_changes_no_blank_and_what_is_not_written_back_shows():
    tokenizer = build("llama2", "unigram")
    tokenizer.clean_up_tokenization_spaces = True
    encoder = dpo.Encoder(tokenizer)
    assert encoder.read_back("a || ' ' || b , c .") == "a || ' ' || b , c ."
    assert encoder.read_back("click[日x]") != encoder.read_back("click[本x]")
    assert encoder.read_back("say ☃") != "say ☃"  # which is no word of it


def test_a_reply_without_tokens_of_its_own_is_a_turn():
    """One that begins with a stop keeps no token; the end of turn that is added ends it."""
    for name in TEMPLATES:
        encoder = dpo.Encoder(build(name))
        t = dpo.Trajectory(steps=3)
        t.extend(encoder.start(CONVERSATION[:1]), is_action=False)
        ends = []
        for reply in "click[a]", "", "click[b]":
            if reply:
                t.extend(encoder.reply(reply)[:-1], is_action=True)
            t.extend([encoder.end_of_turn], is_action=False)
            ends.append(len(t.ids) - 1)
            t.extend(encoder.observation("page"), is_action=False)
        t.ids = t.ids[:ends[-1] + 1]
        assert encoder.reply_ends(t) == ends


# --------------------------------------------------------------------------- what the agent reads


@pytest.mark.parametrize("messages, says", [
    ([dict(role="user", content="a"), dict(role="tool", content="b")], "role|turn by turn"),
    (CONVERSATION[:2] + [dict(role="tool", content="b")], "turn by turn"),
    (CONVERSATION[:1] + CONVERSATION[:1], "turn by turn"),
    (CONVERSATION[:2] + CONVERSATION[1:2], "turn by turn"),
    (CONVERSATION[:2] + [dict(role="user", content=None)], "no text"),
    (CONVERSATION[:1] + [dict(role="assistant", content=["a"])], "no text"),
    ([dict(role="user", content=7)], "no text"),
    (CONVERSATION[:1] + [dict(role="assistant", content="half \ud83d")], "half a character"),
    (CONVERSATION[:1] + [dict(role="assistant", content="a", tool_calls=[])],
     "turn 2 has role, content, tool_calls"),
    (CONVERSATION[:1] + [dict(role="assistant")], "turn 2 has role"),
])
def test_a_conversation_of_another_form_is_refused(messages, says):
    encoder = dpo.Encoder(build("chatml"))
    with pytest.raises(dpo.Unusable, match=says):
        encoder.encode(messages, 1)


@pytest.mark.parametrize("text", ["half \udc00", None, 3.5, b"bytes", ["a"]])
def test_a_page_that_is_no_text_is_refused(text):
    encoder = dpo.Encoder(build("chatml"))
    with pytest.raises(dpo.Unusable, match="no text|half a character"):
        encoder.observation(text)


def test_a_control_token_of_one_letter_is_broken_up_too():
    template = CHATML.replace("<|im_end|>", "§")
    tokenizer = build("chatml", template=template)
    tokenizer.add_special_tokens(dict(additional_special_tokens=["§"]))
    encoder = dpo.Encoder(tokenizer)
    assert encoder.template.end == "§"
    ids = encoder.observation("pay § 5 §§ now")
    assert ids.count(encoder.end_of_turn) == encoder.observation("pay").count(encoder.end_of_turn)
    assert "U+00A7" in encoder.decode(ids)


# ------------------------------------------------------------------------------ rows and tokenizer


def test_a_token_without_a_row_is_refused_by_name_where_a_text_has_it():
    tokenizer = build("chatml")
    rows = len(tokenizer)
    tokenizer.add_tokens(["zebra"])
    encoder = dpo.Encoder(tokenizer, rows)  # no text of the template's has it: no harm
    assert rows not in encoder.sampler().never
    with pytest.raises(dpo.Unusable, match="'zebra' .* no row in the model's embedding"):
        encoder.reply("a zebra")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(dpo.Unusable, match="no row"):
        dpo.Encoder(build("chatml"), end)
    late = build("chatml", template=CHATML.replace("<|im_end|>", "<|turn_end|>"))
    rows = len(late)
    late.add_special_tokens(dict(additional_special_tokens=["<|turn_end|>"]))
    with pytest.raises(dpo.Unusable, match="turn_end"):
        dpo.Encoder(late, rows)


def test_between_the_ids_of_tokens_there_may_be_gaps():
    """The end of turn moves to the last row of all, and is drawn as before; what is in between is
    no token."""
    tokenizer = build("chatml")
    size = len(tokenizer)
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for token in known["added_tokens"]:
        if token["id"] == end:
            token["id"] = size + 6
    if known["model"]["vocab"].pop("<|im_end|>", None):
        known["model"]["vocab"]["<|im_end|>"] = size + 6
    moved = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(known)),
                                    chat_template=tokenizer.chat_template)
    for rows in (None, size + 9):
        encoder = dpo.Encoder(moved, rows)
        assert encoder.end_of_turn == size + 6
        start = moved.convert_tokens_to_ids("<|im_start|>")
        free = {end, *range(size, (rows or size + 7))} - {size + 6}
        assert {*encoder.sampler().never} == free | {start}
    assert encoder.reply("a mug")[-1] == size + 6


def test_the_sampler_draws_text_and_ends_of_turn_alone():
    tokenizer = build("chatml")
    encoder = dpo.Encoder(tokenizer, len(tokenizer) + 4)
    never = {*encoder.sampler(0.7).never}
    padding = {*range(len(tokenizer), len(tokenizer) + 4)}
    assert never == padding | {tokenizer.convert_tokens_to_ids("<|im_start|>")}
    assert encoder.sampler(0.7).temperature == 0.7


def test_a_fingerprint_tells_templates_and_tokenizers_apart():
    same = {dpo.Encoder(build("chatml")).fingerprint() for _ in range(2)}
    assert len(same) == 1
    others = {dpo.Encoder(build("chatml", "unigram")).fingerprint(),
              dpo.Encoder(build("chatml", template="You shop.\n" + CHATML)).fingerprint(),
              dpo.Encoder(build("chatml"), 1000).fingerprint()}
    assert len(same | others) == 4


def test_the_four_pieces_of_the_documented_example():
    template = dpo.Encoder(make_tokenizer("chatml")).template
    assert (template.before_reply, template.after_reply) == ("", "<|im_end|>")
    assert template.before_observation == "\n<|im_start|>user\n"
    assert template.after_observation == "<|im_end|>\n<|im_start|>assistant\n"
