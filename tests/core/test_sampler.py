"""The sampler against transformers' logits processors, chi-square, and itself in other company."""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve.engine.sampler import UNIFORM, Sampler, child_seed, edited_logits
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams


class Rows:
    """A sampler whose table rows 0 … n - 1 belong to one sequence per entry of ``params``."""

    def __init__(
        self, params, seeds=None, vocab_size=64, prompts=None, outputs=None, stop_ids=frozenset(), device="cpu"
    ):
        self.sampler = Sampler(vocab_size, device)
        self.seqs = []
        for row, p in enumerate(params):
            prompt, output = prompts[row] if prompts else [0], outputs[row] if outputs else []
            seq = Sequence("r", prompt, p, max_num_tokens=1000, stop_ids=frozenset(stop_ids))
            seq.token_ids += output
            self.seqs.append(seq)
            self.sampler.set_row(row, p, seeds[row] if seeds else row, seq)

    def plan(self, rows=None, positions=0):
        rows = np.arange(len(self.seqs), dtype=np.int32) if rows is None else np.array(rows, np.int32)
        positions = np.broadcast_to(np.array(positions, np.int64), rows.shape)
        return self.sampler.prepare(rows, positions, [self.seqs[r] for r in rows])

    def __call__(self, logits, rows=None, positions=0):
        return self.sampler(logits, self.plan(rows, positions))

    def tokens(self, logits, rows=None, positions=0):
        return self(logits, rows, positions).token_ids.tolist()


# ------------------------------------------------------------------------------------------------------ distribution

COMBINATIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 3.0, "top_p": 0.8, "min_p": 0.3},
]


@pytest.mark.parametrize("vocab_size", [50, 300])
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_distribution_is_that_of_transformers(options, vocab_size):
    """vLLM's order: temperature, min_p, top_k, top_p. 300 > MAX_TOPK takes the path that sorts."""
    torch.manual_seed(0)
    logits = torch.randn(1, vocab_size) * 2
    params = SamplingParams(**options)
    expected = logits / params.temperature
    for warper in (
        TemperatureLogitsWarper(params.temperature),
        MinPLogitsWarper(params.min_p) if params.min_p else None,
        TopKLogitsWarper(params.top_k) if params.top_k > 0 else None,
        TopPLogitsWarper(params.top_p) if params.top_p < 1 else None,
    ):
        if warper is not None:
            expected = warper(None, logits if isinstance(warper, TemperatureLogitsWarper) else expected)
    expected = expected.softmax(-1)[0].double()

    n = 4000
    tokens = Rows([params] * n, vocab_size=vocab_size)(logits.expand(n, -1)).token_ids
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert counts[expected == 0].sum() == 0
    seen = expected * n >= 5
    rest = (counts[~seen].sum() - n * expected[~seen].sum()) ** 2 / (n * expected[~seen].sum()).clamp(1)
    chi2 = ((counts - n * expected) ** 2 / (n * expected))[seen].sum() + rest
    freedom = int(seen.sum())
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


def test_successive_positions_of_one_request_are_independent():
    logits = torch.zeros(1, 4).expand(4000, -1)
    rows = Rows([SamplingParams(seed=5)], vocab_size=4)
    tokens = rows(logits, rows=[0] * 4000, positions=np.arange(4000)).token_ids
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    assert ((pairs - 3999 / 16) ** 2 / (3999 / 16)).sum() < 15 + 4 * 30**0.5


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_extreme_random_numbers_give_the_outermost_possible_tokens(vocab_size):
    """Rounding never yields a token of probability 0, and the ends of the vocabulary are reached."""
    logits = torch.linspace(0, 1, vocab_size).repeat(2, 1)
    if vocab_size > 1:
        logits[:, [0, -1]] = -torch.inf
    rows = Rows([SamplingParams()] * 2, vocab_size=vocab_size)
    plan = rows.plan()
    plan.params[UNIFORM] = torch.tensor([2.0**-24, 1 - 2.0**-24])
    first, last = (1, vocab_size - 2) if vocab_size > 1 else (0, 0)
    assert rows.sampler(logits, plan).token_ids.tolist() == [first, last]


def test_rounding_never_leads_beyond_the_last_possible_token():
    torch.manual_seed(8)
    logits = torch.randn(500, 128)
    logits[:, -1] = -torch.inf
    rows = Rows([SamplingParams()] * 500, vocab_size=128)
    plan = rows.plan()
    plan.params[UNIFORM] = 1 - 2.0**-24
    assert set(rows.sampler(logits, plan).token_ids.tolist()) == {126}


def test_top_k_keeps_a_tail_that_rounding_would_lose():
    logits = torch.cat([torch.linspace(0, 1, 299), torch.tensor([25.0, -50.0])])[None]
    rows = Rows([SamplingParams(top_k=300)], vocab_size=301)
    plan = rows.plan()
    plan.params[UNIFORM] = 1e-20
    assert rows.sampler(logits, plan).token_ids.tolist() == [0]


def test_top_k_is_exact_among_equal_logits():
    rows = Rows([SamplingParams(top_k=k) for k in (1, 3) for _ in range(200)], vocab_size=400)
    tokens = rows.tokens(torch.zeros(400, 400))
    assert set(tokens[:200]) == {0}
    assert set(tokens[200:]) == {0, 1, 2}


# ------------------------------------------------------------------------------------------------------ greedy, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 100, 128, 4096])
def test_greedy_is_argmax(dtype, vocab_size):
    torch.manual_seed(1)
    logits = torch.randn(9, vocab_size).to(dtype)
    greedy = Rows([SamplingParams(temperature=0)] * 9, vocab_size=vocab_size)
    assert greedy.tokens(logits) == logits.float().argmax(-1).tolist()
    assert greedy.plan().params is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiny_temperatures_take_the_most_likely_token(dtype):
    """C23: also beside a neighbour at temperature 1, with finite log-probabilities, whatever the seed."""
    torch.manual_seed(2)
    temperatures = [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 2e-3, 1.0, 1e300]
    logits = (torch.randn(1, 512).clamp(-3, 3) * 3.5).to(dtype)
    logits[0, 77] = 11.06
    rows = Rows([SamplingParams(temperature=t, logprobs=1) for t in temperatures], vocab_size=512)
    hottest = set()
    for position in range(20):
        output = rows(logits.expand(len(temperatures), -1), positions=position)
        assert output.token_ids[:7].tolist() == [77] * 7
        assert output.logprobs.chosen.isfinite().all()
        assert (output.token_ids >= 0).all()
        hottest.add(int(output.token_ids[-1]))
    assert len(hottest) > 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_broken_row_is_reported_and_harms_no_other(bad):
    """C41: never an endless token 0."""
    torch.manual_seed(3)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5)]
    logits = torch.randn(12, 300)
    rows = Rows(params * 3, vocab_size=300)
    good = rows.tokens(logits)
    broken = logits.clone()
    if bad is None:
        broken[4:8] = -torch.inf
    else:
        broken[4:8, 299] = bad
    assert rows.tokens(broken) == good[:4] + [-1] * 4 + good[8:]
    only_greedy = Rows(params[:1] * 12, vocab_size=300)
    assert only_greedy.tokens(broken)[4:8] == [-1] * 4


def test_an_empty_step():
    rows = Rows([SamplingParams()], vocab_size=50)
    assert rows.tokens(torch.empty(0, 50), rows=[]) == []


# ------------------------------------------------------------------------------------------------------ independence


NEIGHBOURS = {
    "all kinds": [{}, {"temperature": 0}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"presence_penalty": 1}],
    "narrow": [{"top_k": 3}, {"top_k": 7, "top_p": 0.5}],
}
REQUESTS = [
    {},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "logit_bias": {3: 4.0}, "min_tokens": 5},
]


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_a_request_does_not_depend_on_its_neighbours(options, neighbours):
    """C25: alone, first, in the middle, last, twice, whatever path through the sampler the others take."""
    torch.manual_seed(4)
    request, others = SamplingParams(temperature=0.9, seed=42, **options), NEIGHBOURS[neighbours]
    logits = torch.randn(20, 10, 700) * 3

    def run(places, num_rows):
        params = [SamplingParams(**others[i % len(others)]) for i in range(num_rows)]
        seeds = [100 + i for i in range(num_rows)]
        for place in places:
            params[place], seeds[place] = request, request.seed
        rows, outputs = Rows(params, seeds, 700, stop_ids={9}), []
        for step, x in enumerate(logits[:, :num_rows].clone()):
            x[list(places)] = logits[step, 0]
            tokens = rows.tokens(x, positions=step)
            for seq, token in zip(rows.seqs, tokens, strict=True):
                seq.token_ids.append(token)
            outputs.append([tokens[place] for place in places])
        return [list(stream) for stream in zip(*outputs, strict=True)]

    (alone,) = run([0], 1)
    assert len(set(alone)) > 5
    for place in (0, 4, 9):
        assert run([place], 10) == [alone]
    assert run([2, 7], 9) == [alone, alone]


def test_seeds_differ_and_repeat():
    """C25: 0 is a seed, the family of n completions has distinct members, and all of it is reproducible."""
    logits = torch.zeros(1, 4096)
    seeds = [0, 1, -1, 2**63, 42, *(child_seed(42, i) for i in range(4)), *(child_seed(0, i) for i in range(4))]
    rows = Rows([SamplingParams()] * len(seeds), seeds, vocab_size=4096)
    streams = [[rows.tokens(logits, [r], p)[0] for p in range(3)] for r in range(len(seeds))]
    assert len({tuple(s) for s in streams}) == len(seeds)
    again = Rows([SamplingParams()] * len(seeds), seeds, vocab_size=4096)
    assert again.tokens(logits.expand(len(seeds), -1)) == [s[0] for s in streams]


def test_a_row_forgets_its_former_owner():
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    heavy = SamplingParams(logit_bias={2: 100.0}, min_tokens=3, repetition_penalty=9.0, logprobs=2)
    rows = Rows([heavy], vocab_size=4, prompts=[[1]], stop_ids={1})
    assert rows.tokens(logits) == [2]
    plain = SamplingParams(temperature=0)
    rows.sampler.set_row(0, plain, 0, Sequence("b", [1], plain, max_num_tokens=9))
    output = rows(logits)
    assert output.token_ids.tolist() == [1]
    assert output.logprobs is None


# ------------------------------------------------------------------------------------------------------ edited logits


def test_penalties_by_hand():
    """C26: once per token over prompt and output; presence and frequency over the output only."""
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])

    def edited(output, **options):
        rows = Rows([SamplingParams(**options)], vocab_size=4, prompts=[[0, 0, 0, 2]], outputs=[output])
        return edited_logits(logits, rows.plan(positions=len(output)))[0].tolist()

    assert edited([], repetition_penalty=2.5) == pytest.approx([0.8, 1.0, -2.5, 0.5])
    assert edited([], presence_penalty=0.5, frequency_penalty=0.5) == [2.0, 1.0, -1.0, 0.5]
    assert edited([1, 1], frequency_penalty=0.5) == [2.0, 0.0, -1.0, 0.5]
    assert edited([1, 1], presence_penalty=0.5) == [2.0, 0.5, -1.0, 0.5]
    assert edited([1, 1], repetition_penalty=2.0, frequency_penalty=0.5) == [1.0, -0.5, -2.0, 0.5]
    rows = Rows([SamplingParams(temperature=0, repetition_penalty=2.5)], vocab_size=4, prompts=[[0, 0, 0, 2]])
    assert rows.tokens(logits) == [1]


def test_repetition_penalty_is_that_of_transformers():
    torch.manual_seed(5)
    logits = torch.randn(6, 200)
    prompts = torch.randint(200, (6, 30)).tolist()
    outputs = torch.randint(200, (6, 10)).tolist()
    penalties = [0.7, 1.3, 1.0, 2.0, 1.05, 1e300]
    rows = Rows([SamplingParams(repetition_penalty=p) for p in penalties], None, 200, prompts, outputs)
    got = edited_logits(logits, rows.plan(positions=10))
    for i, penalty in enumerate(penalties[:5]):
        history = torch.tensor([prompts[i] + outputs[i]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[i : i + 1])
        torch.testing.assert_close(got[i : i + 1], expected)
    assert got.isfinite().all()


def test_penalties_refuse_to_guess_tokens_that_have_not_arrived():
    rows = Rows([SamplingParams(presence_penalty=1.0)], prompts=[[1]], outputs=[[2]])
    with pytest.raises(RuntimeError, match="before all its tokens have arrived"):
        rows.plan(positions=2)


def test_min_tokens_masks_every_end_until_then():
    """C33: with min_tokens 4 no end among the first four tokens, one possible as the fifth; ids beyond the model are
    never used as an index."""
    logits = torch.tensor([[9.0, 1.0, 8.0, 5.0]]).repeat(2, 1)
    rows = Rows(
        [SamplingParams(temperature=0, min_tokens=4), SamplingParams(temperature=0)],
        vocab_size=4,
        stop_ids={0, 2, 4, 600},
    )
    assert [rows.tokens(logits, positions=p) for p in range(5)] == [[3, 0]] * 4 + [[0, 0]]


def test_logit_bias_before_everything_else():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])
    params = SamplingParams(temperature=0, logit_bias={3: 10.0, 2: -100.0}, repetition_penalty=3.0)
    rows = Rows([params], vocab_size=4, prompts=[[3]])
    assert edited_logits(logits, rows.plan())[0].tolist() == [1.0, 2.0, -97.0, 3.0]
    assert rows.tokens(logits) == [3]
    assert logits.tolist() == [[1.0, 2.0, 3.0, -1.0]]


def test_logprobs_are_those_of_the_model():
    """Raw log-softmax, whatever bias, penalty and temperature did to the choice."""
    torch.manual_seed(6)
    logits = torch.randn(3, 50).bfloat16()
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=0),
        SamplingParams(temperature=0.5, seed=1),
    ]
    output = Rows(params, vocab_size=50)(logits)
    raw = logits.float().log_softmax(-1)
    assert output.token_ids[1] == 4
    torch.testing.assert_close(output.logprobs.chosen, raw.gather(1, output.token_ids[:, None])[:, 0])
    top = raw.topk(3)
    assert output.logprobs.top_ids.tolist() == top.indices.tolist()
    torch.testing.assert_close(output.logprobs.top_values, top.values)
    chosen_only = Rows([SamplingParams(logprobs=0)], vocab_size=50)(logits[:1]).logprobs
    assert chosen_only.top_ids.shape == (1, 0)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_tokens_without_a_synchronisation():
    torch.manual_seed(7)
    vocab_size, options = 151_936, [*COMBINATIONS, {"temperature": 0}, {"min_tokens": 2, "logit_bias": {5: 3.0}}]
    params = [SamplingParams(**o) for o in options] + [SamplingParams(presence_penalty=1.0, logprobs=3)]
    logits = torch.randn(len(params), vocab_size) * 3
    on_cpu, on_gpu = (Rows(params, vocab_size=vocab_size, stop_ids={5}, device=d) for d in ("cpu", "cuda"))
    expected, x = on_cpu(logits), logits.cuda()
    on_gpu(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = on_gpu(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(output.logprobs.chosen.cpu(), expected.logprobs.chosen)
