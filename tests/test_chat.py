"""chat: text and ids equal those of transformers for every kind of template and folder; dates are pinned."""

import datetime
import json

import jinja2
import numpy as np
import pytest
import tokenizers as library

from data_pipeline import chat, tokenizers
from llama_jax.errors import ConfigError, DataError

WORDS = ["the", "a", "of", "to", "and", "in", "river", "stone", "over", "under", "light", "walks", "sings", "never"]
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONVERSATIONS = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "over the river\n\n  and under "}],
    [{"role": "system", "content": "naïve 😀 <b>&amp;</b> \u2028 \x00"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "<|im_end|>\n<|endoftext|> <pad> [X]", "name": None, "extra": {"é": [1, True, None]}}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b", "reasoning": "because"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "thinking": None, "tool_calls": None}],
    [{"role": "assistant", "content": "the stone sings " * 50}],
]
TEMPLATES = {
    "chatml": chat.CHATML,
    "llama3": """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'never' }}{%- endif %}
""",
    "blocks": """{% set ns = namespace(last='') %}
{% for message in messages %}
    {% if message.role == 'skip' %}
    {% continue %}
    {% endif %}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
    {% set ns.last = message.role %}
    {% generation %}
    {% set inside = 'seen' %}
[{{ message.content }}|{{ inside }}]{% endgeneration %}
    {{ inside }} {{ message | tojson }} {{ (message.extra or 'é') | tojson(indent=2) }}
{% endfor %}
{{ ns.last }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ tools }}{{ documents }}{{ nothing }}
""",
    "reasoning": "{% for m in messages %}"
    "{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.name is defined }}/{{ m.content }};{% endfor %}",
}  # fmt: skip


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    draw = np.random.default_rng(3)
    texts = [" ".join(draw.choice(WORDS, 40)) for _ in range(200)]
    tokenizers.train_bpe(texts, 300, folder / "tokenizer.json", CONTROL)
    return (folder / "tokenizer.json").read_bytes()


def model_folder(folder, bpe, template=chat.CHATML, settings=None, files=None):
    folder.mkdir(exist_ok=True)
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": CONTROL[0], "eos_token": CONTROL[0]}
    content |= {"clean_up_tokenization_spaces": False} | ({"chat_template": template} if template else {})
    contents = {"tokenizer.json": bpe, "tokenizer_config.json": json.dumps(content | (settings or {}))} | (files or {})
    for name, data in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return folder


def compare(folder, monkeypatch):
    """Renders and encodes all conversations here and in transformers, with its clock set to our date."""
    transformers = pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26, 13, 14, 15)

    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = chat.load(folder)
    assert ours.eos_id == theirs.eos_token_id and ours.vocab_size == len(theirs)
    texts = [ours.render(conversation) for conversation in CONVERSATIONS]
    for conversation, text, ids in zip(CONVERSATIONS, texts, ours.encode(texts), strict=True):
        assert text == theirs.apply_chat_template(conversation, tokenize=False)
        assert ids.dtype == np.int32 and ids.tolist() == theirs.apply_chat_template(conversation, return_dict=False)
    return ours, texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name, tmp_path, bpe, monkeypatch):
    settings = {
        "pad_token": "<pad>", "image_token": "<image>", "model_max_length": 9999,
        "added_tokens_decoder": {
            "0": {"content": "<|endoftext|>", "special": True, "normalized": False, "lstrip": False, "rstrip": True,
                  "single_word": False},
            "300": {"content": "[X]", "special": False, "normalized": True, "lstrip": False, "rstrip": False,
                    "single_word": False},
        },
    }  # fmt: skip
    ours, texts = compare(model_folder(tmp_path / "m", bpe, TEMPLATES[name], settings), monkeypatch)
    assert len(set(texts)) == len(texts) and ours.record["chat_template"]["origin"] == "tokenizer_config.json"
    assert ours.record["chat_template"]["date"] == ("2024-07-26" if name == "llama3" else None)


def test_hand_written_text(tmp_path, bpe):
    ours = chat.load(model_folder(tmp_path / "m", bpe))
    text = ours.render([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x <|im_end|>"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nx <|im_end|><|im_end|>\n"
    ids = ours.encode([text, ""])
    assert ids[0].tolist().count(2) == 3 and ids[0].tolist().count(1) == 2 and ids[1].size == 0
    assert (ours.eos_id, ours.vocab_size, ours.model_vocab_size) == (0, ours.engine.get_vocab_size(), None)


def test_where_templates_and_tokens_come_from(tmp_path, bpe, monkeypatch):
    def with_files(name, template=None, settings=None, **files):
        folder = tmp_path / name
        named = {key.replace("__", "/").replace("_DOT_", "."): value for key, value in files.items()}
        return compare(model_folder(folder, bpe, template, settings, named), monkeypatch)

    _, texts = with_files("file", "no", chat_template_DOT_jinja="FILE {{ messages[0].content }}\r\n")
    assert texts[0] == "FILE hello"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "LIST {{ messages[0].role }}"}]
    assert with_files("list", named)[1][0] == "LIST user"
    more = {"additional_chat_templates__tool_use_DOT_jinja": "no", "chat_template_DOT_jinja": "MORE {{ eos_token }}"}
    assert with_files("more", "no", None, **more)[0].record["chat_template"]["origin"] == "chat_template.jinja"
    # Without a table of added tokens, special_tokens_map.json counts, and a token of the vocabulary becomes special.
    tokens = json.dumps({"eos_token": {"content": "river", "lstrip": False, "rstrip": False, "normalized": False,
                                       "single_word": False}, "pad_token": "<pad>"})  # fmt: skip
    ours, texts = with_files("map", "{{ eos_token }}|{{ pad_token }}", None, special_tokens_map_DOT_json=tokens)
    assert texts[0] == "river|<pad>" and ours.record["eos"] == {"id": ours.eos_id, "token": "river"}
    with_files("extra", chat.CHATML, {"additional_special_tokens": ["stone", "[Y]"]})
    _, texts = with_files("dict", "{{ audio_token }} [Z]", {"extra_special_tokens": {"audio_token": "[Z]"}})
    assert texts[0] == "[Z] [Z]"


def test_a_post_processor_adds_nothing(tmp_path, bpe, monkeypatch):
    engine = library.Tokenizer.from_str(bpe.decode())
    engine.post_processor = library.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert engine.encode("the").ids[0] == 0
    ours, _ = compare(model_folder(tmp_path / "m", engine.to_str().encode()), monkeypatch)
    assert 0 not in ours.encode(["the"])[0]


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path, bpe):
    engine = library.Tokenizer.from_str(bpe.decode())
    engine.enable_truncation(3)
    engine.enable_padding(length=64, pad_id=0)
    plain = chat.load(model_folder(tmp_path / "plain", bpe))
    other = chat.load(model_folder(tmp_path / "other", engine.to_str().encode()))
    text = ["the river " * 5]
    assert other.encode(text)[0].tolist() == plain.encode(text)[0].tolist() != []


def test_the_date_is_pinned_and_recorded(tmp_path, bpe):
    folder = model_folder(tmp_path / "m", bpe, "{{ strftime_now('%d %b %Y %H:%M') }}")
    assert chat.load(folder).render(CONVERSATIONS[0]) == "26 Jul 2024 00:00"
    other = chat.load(folder, date="2026-01-02")
    assert (
        other.render(CONVERSATIONS[0]) == "02 Jan 2026 00:00" and other.record["chat_template"]["date"] == "2026-01-02"
    )
    with pytest.raises(ConfigError, match=r"--date=yesterday: expected YYYY-MM-DD"):
        chat.load(folder, date="yesterday")


def test_other_templates(tmp_path, bpe):
    folder = model_folder(tmp_path / "m", bpe, None)
    with pytest.raises(ConfigError, match=r"no chat template; give one with --chat_template=FILE, or .*=chatml"):
        chat.load(folder)
    assert chat.load(folder, "chatml").render(CONVERSATIONS[0]).startswith("<|im_start|>user\nhello<|im_end|>")
    (tmp_path / "own.jinja").write_text("{{ messages | length }}")
    ours = chat.load(folder, str(tmp_path / "own.jinja"))
    assert ours.render(CONVERSATIONS[0]) == "2" and ours.record["chat_template"]["origin"] == "own.jinja"
    with pytest.raises(ConfigError, match="no such file"):
        chat.load(folder, str(tmp_path / "nothing"))
    named = model_folder(tmp_path / "n", bpe, [{"name": "rag", "template": "x"}])
    with pytest.raises(ConfigError, match=r"no default among its chat templates \(rag\)"):
        chat.load(named)
    with pytest.raises(DataError, match="not a chat template"):
        chat.load(model_folder(tmp_path / "o", bpe, "{% for %}"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
    ],
)
def test_refusals(tmp_path, bpe, template):
    ours = chat.load(model_folder(tmp_path / "m", bpe, template))
    with pytest.raises(chat.Refused, match="the chat template refuses it"):
        ours.render(CONVERSATIONS[0])


def test_lone_surrogates_are_refused(tmp_path, bpe):
    with pytest.raises(chat.Refused, match=r"lone surrogate \\ud800"):
        chat.load(model_folder(tmp_path / "m", bpe)).render([{"role": "user", "content": "a\ud800"}])


def test_folders_that_will_not_do(tmp_path, bpe):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json$"):
        chat.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"tokenizer\.model alone is not enough"):
        chat.load(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        chat.load(model_folder(tmp_path / "a", b"{}"))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not JSON"):
        chat.load(model_folder(tmp_path / "b", bpe, files={"tokenizer_config.json": "{"}))
    with pytest.raises(ConfigError, match="names no eos_token; name the token between conversations with --eos_token"):
        chat.load(model_folder(tmp_path / "c", bpe, settings={"eos_token": None}))
    with pytest.raises(ConfigError, match=r"--eos_token=<nothing> is not in"):
        chat.load(tmp_path / "c", eos_token="<nothing>")
    assert chat.load(tmp_path / "c", eos_token="<|im_end|>").eos_id == 2
    wrong = {"added_tokens_decoder": {"7": {"content": "<|im_end|>", "special": True}}}
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>' has id 7, in tokenizer.json 2; the folder mixes two"):
        chat.load(model_folder(tmp_path / "d", bpe, settings=wrong))
    with pytest.raises(DataError, match="added_tokens_decoder is not a table of tokens"):
        chat.load(model_folder(tmp_path / "e", bpe, settings={"added_tokens_decoder": {"x": 1}}))
    small = chat.load(model_folder(tmp_path / "f", bpe, files={"config.json": '{"vocab_size": 100}'}))
    with pytest.raises(ConfigError, match=r"gives id \d+, the model's config.json has vocab_size 100"):
        small.encode(["the river"])


def test_make_tokenizer(tmp_path):
    texts = ["the river sings under the stone"] * 50
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert chat.make_tokenizer(tmp_path / "m", iter(texts), 270, scratch) == 270
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    ours = chat.load(tmp_path / "m")
    assert (ours.eos_id, ours.vocab_size) == (0, 270)
    assert ours.encode(["<|endoftext|><|im_start|><|im_end|>"])[0].tolist() == [0, 1, 2]
    chat.make_tokenizer(tmp_path / "m", iter(texts), 270, scratch)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    with pytest.raises(ConfigError, match="is of another tokenizer; leave out --make_tokenizer"):
        chat.make_tokenizer(tmp_path / "m", iter(texts), 265, scratch)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    with pytest.raises(ConfigError, match="--make_tokenizer=258 is not from 259"):
        chat.make_tokenizer(tmp_path / "m", iter(texts), 258, scratch)


def test_jinja_has_the_release_that_transformers_asks_for():
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)  # older ones have escapes from the sandbox
