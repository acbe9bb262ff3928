"""What a request may ask of the sampler: vLLM's names and meanings, checked when the object is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from nanoserve.contracts.errors import RequestError
from nanoserve.contracts.grammar import StructuredOutput

MAX_N = 128
MAX_LOGPROBS = 20
MAX_BIAS = 1e9
#: Temperatures up to this one are greedy: what they add to argmax is chance among exact ties, and overflow.
GREEDY_TEMPERATURE = 1e-3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters. A wrong value raises :class:`RequestError`, which names the field.

    n: completions per prompt, 1 … 128. With a seed they are reproducible and differ from each other.
    temperature: >= 0; 0 is greedy, as is anything up to ``GREEDY_TEMPERATURE``.
    top_p: in (0, 1]: the smallest set of most likely tokens whose mass reaches it (Holtzman et al. 2019); 1 is off.
    top_k: the k most likely tokens; -1 and 0 are off.
    min_p: in [0, 1]: drops tokens less likely than min_p times the most likely one; 0 is off.
    repetition_penalty: > 0: positive logits of tokens seen in prompt or output are divided by it, negative multiplied.
    presence_penalty, frequency_penalty: in [-2, 2]: subtracted once, or per occurrence, for tokens seen in the output.
    logit_bias: {token id: number in [-1e9, 1e9] added to its logit}; JSON's ids, decimal strings, are taken too.
    seed: any integer in [-2**63, 2**64); 0 is a seed like any other. None: the engine draws one.
    stop: a string or several: the text ends where the earliest match begins. Stored as a list.
    stop_token_ids: tokens that end the output, beside the model's EOS ids. Stored as a list.
    include_stop_str_in_output: keep the matched stop string in the text.
    max_tokens: >= 1, cropped to the room left in the context. None: as many as there is room for.
    min_tokens: neither EOS nor a stop token or string ends the output before it has so many tokens.
    ignore_eos: the model's EOS ids do not end the output; ``stop`` and ``stop_token_ids`` still do.
    logprobs: report the log-probability of the chosen token and of so many most likely ones, 0 … 20. They are the
        log-softmax of the model's own logits, before bias, penalties and temperature. None: no logprobs.
    skip_special_tokens: leave special tokens out of the text.
    structured: the form the output must have. It ends with "stop" where the form is complete and cannot go on, even
        before min_tokens and with ignore_eos; cut by max_tokens or by a stop string or token it is a beginning of it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._store("n", _integer("n", self.n, 1, MAX_N))
        self._store("temperature", _real("temperature", self.temperature, low=0.0))
        self._store("top_p", _real("top_p", self.top_p, low=0.0, high=1.0, above_low=True))
        self._store("top_k", _integer("top_k", self.top_k, -1, None, "; -1 and 0 switch it off"))
        self._store("min_p", _real("min_p", self.min_p, low=0.0, high=1.0))
        self._store("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, low=0.0, above_low=True))
        self._store("presence_penalty", _real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0))
        self._store("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0))
        if self.logit_bias is not None:
            self._store("logit_bias", _logit_bias(self.logit_bias))
        if self.seed is not None:
            self._store("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            self._store("max_tokens", _integer("max_tokens", self.max_tokens, 1, None, ", or null for all the room"))
        self._store("min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)"))
        if self.logprobs is not None:
            self._store("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.structured, StructuredOutput | None):
            raise RequestError(f"structured must be a StructuredOutput, not {self.structured!r}")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that the seed does not matter."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """Whether a token depends on the values of all tokens before it: such a step cannot be prepared early."""
        return self.has_penalties or self.structured is not None

    @property
    def has_penalties(self) -> bool:
        """Whether logits are changed by which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as the list it is stored as."""
        return self.stop  # type: ignore[return-value]

    def validate_for(self, vocab_size: int) -> None:
        """Check ids against a model of ``vocab_size`` logits; RequestError names the field and the id."""
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(f"{name}: token id {token_id} is outside the vocabulary 0 … {vocab_size - 1}")


def _integer(name: str, value: Any, low: int, high: int | None, remark: str = "") -> int:
    wanted = f"an integer >= {low}" if high is None else f"an integer in {low} … {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be {wanted}{remark}, not {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise RequestError(f"{name} must be {wanted}{remark}, not {value}")
    return number


def _real(name: str, value: Any, low: float, high: float = math.inf, *, above_low: bool = False) -> float:
    wanted = f"a finite number {'>' if above_low else '>='} {low:g}" + ("" if high == math.inf else f" and <= {high:g}")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be {wanted}, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        raise RequestError(f"{name} must be {wanted}, not {value}")
    return number


def _stop_strings(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop must be a string or a list of strings, none of them empty, not {stop!r}")
    return list(strings)


def _token_ids(name: str, ids: Any) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"{name} must be a list of token ids, not {ids!r}")
    return [_integer(name, token_id, 0, None) for token_id in ids]


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {bias!r}")
    checked = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token_id = _integer("logit_bias: a token id", token_id, 0, None)
        checked[token_id] = _real(f"logit_bias[{token_id}]", value, low=-MAX_BIAS, high=MAX_BIAS)
    return checked
