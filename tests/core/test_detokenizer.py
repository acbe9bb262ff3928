"""Streamed text equals one-shot text (C29), and a stop string is never half sent (C31)."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from nanoserve.engine.detokenizer import IncrementalDetokenizer, OutputText
from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizer import ENDOFTEXT, IM_END, save_tiny_tokenizer

TEXTS = ["a😀b é 世", " leading", "x  .", "e\u0301n\u0303o", "real \ufffd stays \ufffd", "", "👨‍👩‍👧", "\n\t "]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A Llama-like tokenizer: "▁" is a space, the first one is dropped, and unknown characters are bytes."""
    folder = tmp_path_factory.mktemp("spaced")
    words = ["▁", "▁a", "▁lead", "ing", "x", ".", "b", "\ufffd"]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer(folder)


def deltas_of(tokenizer, ids, skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


# ------------------------------------------------------------------------------------------------------- characters


@pytest.mark.parametrize("text", TEXTS)
def test_only_whole_characters_are_sent(tokenizer, text):
    """C29: every character arrives with its last byte, none twice, none as U+FFFD unless it is one."""
    deltas = deltas_of(tokenizer, tokenizer.encode(text))
    assert "".join(deltas) == text
    assert [d for d in deltas if d] == list(text)


@given(
    ids=st.lists(st.one_of(st.integers(0, 261), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xB8, ENDOFTEXT, 400]))),
    skip=st.booleans(),
    chunk=st.integers(1, 5),
)
@settings(max_examples=400, deadline=None)
def test_any_ids_stream_to_their_one_shot_decode(tokenizer, ids, skip, chunk):
    """C29: also broken UTF-8, special tokens inside a character, ids outside the tokenizer, and a cut at the end."""
    expected = tokenizer._hf.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas_of(tokenizer, ids, skip)) == expected
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    chunks = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    assert "".join(chunks) + detokenizer.flush() == expected


def test_broken_bytes_do_not_stall(tokenizer):
    assert deltas_of(tokenizer, [0xFF, 0x80, 0xF0, 0x9F, 97])[:-1] == ["\ufffd", "\ufffd", "", "", "\ufffda"]


def test_an_output_cut_inside_a_character(tokenizer):
    assert deltas_of(tokenizer, list("é世".encode())[:-1]) == ["", "é", "", "", "\ufffd"]


def test_tokens_that_depend_on_their_neighbours(spaced):
    """The window drops the first space only, and waits for the last byte of a character."""
    names = ["▁a", "▁lead", "ing", "▁", "▁a", *[f"<0x{b:02X}>" for b in "😀é".encode()], ".", "▁", "▁", "\ufffd", "b"]
    vocab = spaced._hf.get_vocab()
    deltas = deltas_of(spaced, [vocab[name] for name in names])
    assert deltas == ["a", " lead", "ing", " ", " a", *["", "", "", "😀"], "", "é", ".", " ", " ", "", "\ufffdb", ""]


def test_windowed_work_is_bounded(spaced, monkeypatch):
    lengths = []
    decode = spaced.decode
    monkeypatch.setattr(spaced, "decode", lambda ids, skip: lengths.append(len(ids)) or decode(ids, skip))
    vocab = spaced._hf.get_vocab()
    r = random.Random(0)
    deltas_of(spaced, [r.choice([vocab["<0xFF>"], vocab["▁"], vocab["x"], 5000]) for _ in range(300)])
    assert max(lengths) <= 8


# ----------------------------------------------------------------------------------------------------- stop strings


def run(tokenizer, text, **options):
    """Push ``text`` byte by byte until it stops: (released deltas, OutputText, tokens taken)."""
    output = OutputText(tokenizer, SamplingParams(max_tokens=None, **options))
    deltas = []
    for taken, token_id in enumerate(tokenizer.encode(text), start=1):
        deltas.append(output.append(token_id))
        if output.stopped_by is not None:
            return deltas, output, taken
    deltas.append(output.finish())
    return deltas, output, len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped_by"),
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br", "own fox"),
        ("The quick brown fox", "own fox", "The quick br", "own fox"),
        ("an ENDING", ["ENDING", "END"], "an ", "END"),
        ("aab", ["ab"], "a", "ab"),
        ("aaab", ["aab"], "a", "aab"),
        ("café!", ["é"], "caf", "é"),
        ("x 世 y", ["世 y"], "x ", "世 y"),
        ("abcd", ["bcd", "c"], "ab", "c"),
        ("no match own fo", ["own fox"], "no match own fo", None),
        ("own f own fox", ["own fox"], "own f ", "own fox"),
    ],
)
def test_stop_strings(tokenizer, text, stop, expected, stopped_by):
    """C31: streamed and not, with the match left out or kept."""
    deltas, output, _ = run(tokenizer, text, stop=stop)
    assert output.stopped_by == stopped_by
    assert "".join(deltas) == output.text == expected
    deltas, output, _ = run(tokenizer, text, stop=stop, include_stop_str_in_output=True)
    assert "".join(deltas) == output.text == expected + (stopped_by or "")


def test_generation_stops_with_the_token_that_completes_the_match(tokenizer):
    _, _, taken = run(tokenizer, "The quick brown fox jumps", stop=["own fox"])
    assert taken == len("The quick brown fox")


def test_text_is_held_back_only_as_long_as_it_may_become_a_stop_string(tokenizer):
    deltas, _, _ = run(tokenizer, "br own fog!", stop=["own fox"])
    assert deltas == ["b", "r", " ", *[""] * 6, "own fog", "!", ""]


def test_a_match_inside_one_token_drops_the_rest_of_it(tokenizer):
    """Tokens of several characters: here the text of a special token, kept by skip_special_tokens=False."""
    output = OutputText(tokenizer, SamplingParams(stop=["im_"], skip_special_tokens=False))
    assert [output.append(i) for i in (97, IM_END, 98)] == ["a", "<|", ""]
    assert output.stopped_by == "im_"
    assert output.finish() == ""
    assert output.text == "a<|"


def test_min_tokens_lets_early_matches_pass(tokenizer):
    """A match that is complete within the first min_tokens tokens is text, one that is complete later stops."""
    for min_tokens, expected in ((0, ""), (1, ""), (2, "abc"), (4, "abc"), (5, "abcab")):
        _, output, _ = run(tokenizer, "abcab", stop=["ab"], min_tokens=min_tokens)
        assert output.text == expected
    deltas, output, _ = run(tokenizer, "abx", stop=["ab", "abcd"], min_tokens=2)
    assert (deltas, output.stopped_by) == (["", "", "abx", ""], None)
    deltas, _, _ = run(tokenizer, "abx", stop=["ab"], min_tokens=2)
    assert deltas == ["", "ab", "x", ""]


def test_the_end_releases_a_held_text_and_a_cut_character(tokenizer):
    output = OutputText(tokenizer, SamplingParams(stop=["xyz"]))
    assert output.append_many([*b"axy", 0xC3]) == "a"
    assert output.finish() == "xy\ufffd"


def test_append_many_is_append(tokenizer):
    ids = tokenizer.encode("naïve 😀 END of it")
    for options in ({}, {"stop": ["END"]}):
        one_by_one = OutputText(tokenizer, SamplingParams(**options))
        deltas = [one_by_one.append(i) for i in ids]
        at_once = OutputText(tokenizer, SamplingParams(**options))
        assert at_once.append_many(ids) == "".join(deltas)
        assert at_once.finish() == one_by_one.finish()
        assert (at_once.text, at_once.stopped_by) == (one_by_one.text, one_by_one.stopped_by)


@given(text=st.text("ab\u00e9", max_size=30), stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=3))
@settings(max_examples=400, deadline=None)
def test_stop_strings_against_a_search_of_every_prefix(tokenizer, text, stops):
    end, begin = min(
        ((i + len(s), i) for s in stops for i in range(len(text)) if text.startswith(s, i)), default=(None, None)
    )
    expected = text if end is None else text[:begin]
    output = OutputText(tokenizer, SamplingParams(stop=stops))
    for token_id in tokenizer.encode(text):
        output.append(token_id)
        assert expected.startswith(output.text)
        if output.stopped_by is not None:
            assert output.stopped_by == text[begin:end]
            break
    output.finish()
    assert output.text == expected
