"""Output ids to output text while they arrive: whole characters, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer import Tokenizer

MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most four bytes to a character, and a token holds at least one


class IncrementalDetokenizer:
    """Text deltas of one output; all deltas and ``flush()`` together are ``tokenizer.decode`` of all its ids.

    A delta never ends inside a character: bytes are kept back until the character is complete or known to be broken,
    in which case U+FFFD takes their place exactly as in the one-shot decode. With a byte-level tokenizer a token costs
    one look-up and one run of a UTF-8 decoder.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = tokenizer.token_bytes(skip_special_tokens)
        self._unfinished = b""  # the beginning of a character
        self._window: list[int] = []  # ids whose text is known, as context, then ids whose text is not complete
        self._num_context = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; "" while they end inside a character."""
        table = self._bytes
        if table is not None:
            return self._decode(b"".join([table[token_id] for token_id in ids]))
        return "".join([self._push_to_window(token_id) for token_id in ids])

    def push_one(self, token_id: int) -> str:
        table = self._bytes
        return self._push_to_window(token_id) if table is None else self._decode(table[token_id])

    def _decode(self, data: bytes, final: bool = False) -> str:
        if self._unfinished:
            data = self._unfinished + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[num_decoded:]
        return text

    def flush(self) -> str:
        """The end of the text once no token follows: U+FFFD for a character that was cut."""
        return self._decode(b"", final=True) if self._bytes is not None else self._window_delta()

    def _push_to_window(self, token_id: int) -> str:
        """For tokenizers whose tokens look different alone than in a row (a space before a word, say).

        A window of the last complete ids is decoded with and without the new ones; the difference is the delta.
        """
        self._window.append(token_id)
        delta = self._window_delta()
        num_new = len(self._window) - self._num_context
        if num_new < MAX_TOKENS_PER_CHARACTER and (not delta or delta.endswith("\ufffd")):
            return ""
        del self._window[: self._num_context]
        self._num_context = num_new
        return delta

    def _window_delta(self) -> str:
        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, self._skip_special_tokens)

        return decode(self._window)[len(decode(self._window[: self._num_context])) :]


class OutputText:
    """The text of one output as its reader may see it.

    stopped_by: the stop string that ended the output, None while none has.
    Of several stop strings the one that is complete first wins, and of those the one that begins first, so that the
    result does not depend on how the text is cut into tokens. One that is complete within the first ``min_tokens``
    tokens is ordinary text. The prompt is never looked at.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._released: list[str] = []
        self._held = ""  # the longest end of the text that may still grow into a stop string
        self._tokens_before_stop = params.min_tokens

    @property
    def text(self) -> str:
        """All that has been released."""
        return "".join(self._released)

    def append(self, token_id: int) -> str:
        """Take one output token; returns the text it releases, "" once ``stopped_by`` is set."""
        if self._stops:
            return self._append_checked(token_id)
        delta = self._detokenizer.push_one(token_id)
        self._released.append(delta)
        return delta

    def append_many(self, ids: Sequence[int]) -> str:
        """Take output tokens, in order. Without stop strings, all at once is much cheaper than one by one."""
        if not self._stops:
            delta = self._detokenizer.push(ids)
            self._released.append(delta)
            return delta
        return "".join([self._append_checked(token_id) for token_id in ids])

    def finish(self) -> str:
        """The output ends for another reason than a stop string: release what was held back."""
        if self.stopped_by is not None:
            return ""
        delta = self._held + self._detokenizer.flush()
        self._held = ""
        self._released.append(delta)
        return delta

    def _append_checked(self, token_id: int) -> str:
        if self.stopped_by is not None:
            return ""
        seen = len(self._held)
        text = self._held + self._detokenizer.push_one(token_id)
        if self._tokens_before_stop > 0:
            self._tokens_before_stop -= 1
            match = None
        else:
            match = self._first_match(text, seen)
        if match is not None:
            begin, end = match
            self.stopped_by = text[begin:end]
            delta, self._held = text[: end if self._include_stop else begin], ""
        else:
            cut = len(text) - self._num_held(text)
            delta, self._held = text[:cut], text[cut:]
        self._released.append(delta)
        return delta

    def _first_match(self, text: str, seen: int) -> tuple[int, int] | None:
        """(begin, end) in ``text`` of the match that ends first among those that end after ``seen`` characters."""
        found = [(stop, text.find(stop, max(0, seen + 1 - len(stop)))) for stop in self._stops]
        end, begin = min(((begin + len(stop), begin) for stop, begin in found if begin >= 0), default=(0, 0))
        return (begin, end) if end else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins (and does not end)."""
        longest = 0
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
            while begin >= 0 and not stop.startswith(text[begin:]):
                begin = text.find(stop[0], begin + 1)
            if begin >= 0:
                longest = max(longest, len(text) - begin)
        return longest
