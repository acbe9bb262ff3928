"""Log-probabilities of prompts (``echo`` with ``logprobs``) between the steps of a running engine.

A round scores whole prompts: as many as fit into one launch, or one long prompt chunk by chunk. A round gives its
blocks back before the next step, since a scheduler may rely on being the only one who hands out blocks; so a prompt
delays the other requests by its own prefill at most, and the next round comes after a step of theirs. The prefix cache
stays out of it: what is found there has no logits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from nanoserve.contracts.scheduling import Schedule
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.server.messages import Score, Scores, TokenLogprobs

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import ModelRunner

CHUNK = 512  # tokens per launch: fp32 logits of 150,000 words take 0.3 GB


class Scorer:
    """The queue of prompts to score, and the scoring."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: deque[Score] = deque()
        self._limits = engine.scheduler.limits
        self._chunk = min(CHUNK, self._limits.max_num_batched_tokens)

    def add(self, job: Score) -> None:
        """Raises RequestError for a prompt that no engine could run."""
        self._engine.check(job.prompt_token_ids, SamplingParams())
        self._queue.append(job)

    def abort(self, request_id: str) -> None:
        self._queue = deque(job for job in self._queue if job.request_id != request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def take(self) -> list[Score]:
        """What the next round scores: the head of the queue and what fits behind it; nothing while the pool is full."""
        blocks = self._engine.blocks
        jobs: list[Score] = []
        num_tokens, num_free = 0, blocks.num_free
        while self._queue and len(jobs) < self._limits.max_num_seqs:
            n = len(self._queue[0].prompt_token_ids)
            num_free -= -(-n // blocks.block_size)
            if num_free < 0 or (jobs and num_tokens + n > self._chunk):
                break
            num_tokens += n
            jobs.append(self._queue.popleft())
        return jobs

    def score(self, jobs: list[Score]) -> list[Scores]:
        """One round over what ``take`` gave. The engine must have no step in flight."""
        found: list[list[TokenLogprobs]] = [[] for _ in jobs]
        sequences = [
            Sequence(job.request_id, job.prompt_token_ids, SamplingParams(), max_num_tokens=self._engine.max_model_len)
            for job in jobs
        ]
        blocks = self._engine.blocks
        caching, blocks.enable_prefix_caching = blocks.enable_prefix_caching, False
        try:
            while any(seq.num_computed_tokens < seq.num_prompt_tokens for seq in sequences):
                self._launch(jobs, sequences, found)
        finally:
            for seq in sequences:
                blocks.release(seq)
            blocks.enable_prefix_caching = caching
        return [Scores(job.request_id, logprobs) for job, logprobs in zip(jobs, found, strict=True)]

    def _launch(self, jobs: list[Score], sequences: list[Sequence], found: list[list[TokenLogprobs]]) -> None:
        """One launch; appends to ``found``. The logits after token i are the prediction of token i + 1."""
        runner: ModelRunner = self._engine.runner  # type: ignore[assignment]
        blocks = self._engine.blocks
        prefill = [(seq, blocks.grant(seq, self._chunk)) for seq in sequences]
        try:
            logprobs = runner.prompt_logits(Schedule(prefill=list(prefill))).log_softmax(-1)
        finally:
            for seq, _ in prefill:
                blocks.commit(seq, [])
        row = 0
        for job, (seq, n), own in zip(jobs, prefill, found, strict=True):
            targets = job.prompt_token_ids[len(own) + 1 : seq.num_computed_tokens + 1]
            own += _token_logprobs(logprobs[row : row + len(targets)], targets, job.num_top)
            row += n


def _token_logprobs(logprobs: torch.Tensor, targets: list[int], num_top: int) -> list[TokenLogprobs]:
    """logprobs ``[n, vocab_size]`` fp32; one ``{token_id: logprob}`` per target, most likely first, target in it."""
    chosen = logprobs.gather(1, torch.tensor(targets, device=logprobs.device)[:, None]).squeeze(1).tolist()
    top_values, top_ids = logprobs.topk(num_top, dim=-1)
    return [
        {**dict(zip(ids, values, strict=True)), target: own}
        for ids, values, target, own in zip(top_ids.tolist(), top_values.tolist(), targets, chosen, strict=True)
    ]
