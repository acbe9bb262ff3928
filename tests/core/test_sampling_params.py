"""SamplingParams: what is refused, with the field's name in the message (C23, C25, C28, C34, C43)."""

import math

import pytest

from nanoserve.contracts.errors import RequestError
from nanoserve.contracts.grammar import StructuredOutput
from nanoserve.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
WRONG = {
    "n": [0, -1, 10**6, 1.5, "2", True, None],
    "temperature": [-1, -1e-9, NAN, INF, "hot", "0.5", True, None, 10**400],
    "top_p": [0, -0.1, 7, 1.0001, NAN, "0.9"],
    "top_k": [-2, 1.5, "5", True],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, "1"],
    "logit_bias": [[5], {"x": 1.0}, {-1: 1.0}, {1.5: 1.0}, {3: NAN}, {3: INF}, {3: "1"}],
    "seed": [2**64, -(2**63) - 1, 1.0, "42", True],
    "stop": ["", ["a", ""], 5, [5]],
    "stop_token_ids": [5, "5", [-1], [1.5], ["5"], {5: 1}],
    "include_stop_str_in_output": [1, "yes", None],
    "max_tokens": [0, -1, 1.5, "16", True],
    "min_tokens": [-1, 17, 1.5],
    "ignore_eos": [0, "true"],
    "logprobs": [-1, 21, 10**6, 1.0, True],
    "skip_special_tokens": [1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_every_64_bit_seed_is_legal(seed):
    assert SamplingParams(seed=seed).seed == seed


def test_stored_forms():
    params = SamplingParams(stop="x", stop_token_ids=(7,), logit_bias={"600": 5, 3: -1}, temperature=1)
    assert params.stop == params.stop_strings == ["x"]
    assert params.stop_token_ids == [7]
    assert params.logit_bias == {600: 5.0, 3: -1.0}
    stops = ["a"]
    params = SamplingParams(stop=stops, max_tokens=None, min_tokens=100)
    stops.append("b")
    assert params.stop == ["a"]


def test_ids_outside_the_model_are_refused():
    """C34: an index that would read or write another row's logits never reaches a tensor."""
    SamplingParams(stop_token_ids=[511], logit_bias={511: 1.0}).validate_for(512)
    with pytest.raises(RequestError, match="stop_token_ids.*512"):
        SamplingParams(stop_token_ids=[512]).validate_for(512)
    with pytest.raises(RequestError, match="logit_bias.*600"):
        SamplingParams(logit_bias={"600": 5}).validate_for(512)


def test_greedy_and_history():
    assert [SamplingParams(temperature=t).greedy for t in (0, 1e-12, 1e-3, 0.01)] == [True, True, True, False]
    penalties = ({"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1})
    history = [
        SamplingParams(**kw).needs_history for kw in ({}, *penalties, {"structured": StructuredOutput(regex="a")})
    ]
    assert history == [False, True, True, True, True]
