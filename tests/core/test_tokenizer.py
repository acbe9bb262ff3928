"""The tokenizer wrapper: ids outside it (C34), chat templates (C35), malformed input (C43)."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nanoserve.contracts.errors import ModelLoadError, RequestError
from nanoserve.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizer import ENDOFTEXT, IM_END, IM_START, save_tiny_tokenizer

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'NOTHINK' }}{%- endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE))


def test_encode_and_decode(tokenizer):
    text = "a😀b é 世"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert len(ids) == 13
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("x<|im_end|>") == [ord("x"), IM_END]
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_id == IM_END
    assert tokenizer.special_ids == {ENDOFTEXT, IM_START, IM_END}


def test_ids_outside_the_tokenizer_are_empty_text(tokenizer):
    """C34: a model's vocabulary is padded beyond the tokenizer's."""
    assert tokenizer.decode([400]) == ""
    assert tokenizer.decode([97, 400, IM_END, 98]) == "ab"
    assert tokenizer.decode([97, 400, IM_END, 98], skip_special_tokens=False) == "a<|im_end|>b"
    assert tokenizer.token_bytes(skip_special_tokens=False)[IM_END] == b"<|im_end|>"
    assert tokenizer.token_bytes(skip_special_tokens=True)[IM_END] == b""


@pytest.mark.parametrize("text", ["a\ud800b", None, 5, b"x", ["x"]])
def test_a_prompt_that_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(RequestError, match="prompt must be"):
        tokenizer.encode(text)


def test_a_bos_is_never_doubled(tmp_path):
    template = "<|endoftext|>{{ messages[0].content }}"
    folder = save_tiny_tokenizer(tmp_path, chat_template=template, bos_token="<|endoftext|>")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", ENDOFTEXT)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a") == tokenizer.encode("<|endoftext|>a") == [ENDOFTEXT, 97]
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == [ENDOFTEXT, 97]


def test_a_folder_without_a_tokenizer_names_the_path(tmp_path):
    with pytest.raises(ModelLoadError, match=tmp_path.name):
        Tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------------------------- chat


def test_render_chat_is_that_of_transformers(tokenizer):
    reference = AutoTokenizer.from_pretrained(tokenizer._hf.name_or_path)
    messages = [{"role": "system", "content": "S"}, *HELLO, {"role": "assistant", "content": "世"}]
    for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
        ids = tokenizer.render_chat(messages, **options)
        expected = reference.apply_chat_template(
            messages, **{"add_generation_prompt": True, "return_dict": False} | options
        )
        assert ids == expected
    assert tokenizer.decode(tokenizer.render_chat(HELLO)).count("assistant") == 1


def test_thinking_changes_the_prompt_only_when_false(tokenizer):
    plain = tokenizer.render_chat(HELLO)
    assert tokenizer.render_chat(HELLO, enable_thinking=True) == plain
    assert tokenizer.render_chat(HELLO, enable_thinking=False) == plain + list(b"NOTHINK")
    for wrong in ("false", 0, None):
        with pytest.raises(RequestError, match="enable_thinking must be true or false"):
            tokenizer.render_chat(HELLO, enable_thinking=wrong)
    with pytest.raises(RequestError, match="chat_template_kwargs.enable_thinkng: .* it has enable_thinking"):
        tokenizer.render_chat(HELLO, enable_thinkng=False)
    with pytest.raises(RequestError, match="tools: the chat template has no place"):
        tokenizer.render_chat(HELLO, tools=[{"name": "x"}])


def test_of_several_templates_the_one_that_renders_says_what_it_reads(tokenizer, monkeypatch):
    templates = {
        "default": "{%+ generation %}{{ messages[0].content }}{% endgeneration %}",
        "tool_use": "{{ tools }}{% if brief %}!{% endif %}{{ documents }}",
    }
    monkeypatch.setattr(tokenizer._hf, "chat_template", templates)
    plain, tools = tokenizer.render_chat(HELLO), [{"type": "function", "function": {"name": "x"}}]
    with_tools = tokenizer.render_chat(HELLO, tools=tools, brief=True, documents=[{"text": "d"}])
    assert tokenizer.decode(plain) == HELLO[0]["content"] and "!" in tokenizer.decode(with_tools)
    with pytest.raises(RequestError, match="chat_template_kwargs.brief: .* it has none"):
        tokenizer.render_chat(HELLO, brief=True)
    for template in ({"tool_use": "x"}, "{% if %}"):
        monkeypatch.setattr(tokenizer._hf, "chat_template", template)
        with pytest.raises(RequestError, match="the chat template cannot be read"):
            tokenizer.render_chat(HELLO, enable_thinking=False)


@pytest.mark.parametrize(
    ("in_config", "in_file", "used"),
    [("A", None, "A"), (None, "B", "B"), ("A", "B", "B")],
    ids=["config", "file", "both"],
)
def test_where_the_template_stands(tmp_path, in_config, in_file, used):
    """C35 (a) to (c): a template in its own file is found and wins, as in transformers."""
    folder = save_tiny_tokenizer(tmp_path, chat_template=in_config)
    if in_file:
        (folder / "chat_template.jinja").write_text(in_file)
    reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(HELLO, return_dict=False)
    assert Tokenizer(folder).render_chat(HELLO) == reference == list(used.encode())


def test_no_template_is_a_plain_error(tmp_path):
    """C35 (d)."""
    tokenizer = Tokenizer(save_tiny_tokenizer(tmp_path))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat(HELLO)
    assert tokenizer.encode("x") == [120]


def test_content_as_text_parts(tokenizer):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(HELLO)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    empty = {"role": "assistant", "content": ""}
    assert tokenizer.render_chat([*HELLO, call]) == tokenizer.render_chat([*HELLO, empty])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([*HELLO, {"role": "alien", "content": "x"}], r"messages\[1\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
    ],
)
def test_malformed_messages_are_refused_by_name(tokenizer, messages, named):
    with pytest.raises(RequestError, match=named):
        tokenizer.render_chat(messages)


def test_what_the_template_refuses_is_the_callers_error(tmp_path):
    folder = save_tiny_tokenizer(tmp_path, chat_template="{{ raise_exception('one message only') }}")
    with pytest.raises(RequestError, match="one message only"):
        Tokenizer(folder).render_chat(HELLO)


def test_the_tokenizer_configs_truncation_is_not_applied(tmp_path):
    folder = save_tiny_tokenizer(tmp_path, model_max_length=4)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert Tokenizer(folder).encode("abcdefgh") == list(b"abcdefgh")
