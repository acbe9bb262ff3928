"""Clients that other people wrote, against a server of our own. Each runs as its users run it: as a program."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.metrics import Objectives, RequestTimeline, summarise
from tests.clients.conftest import HERE, program_of, python_with, run
from tests.helpers.serving import Server

pytestmark = pytest.mark.slow
TOKENIZER = Path(__file__).parents[2] / "nanoserve" / "assets" / "tiny"


def test_openai(server: Server) -> None:
    run([python_with("openai"), str(HERE / "openai_client.py"), server.url], timeout=120)


# --- lm-eval --------------------------------------------------------------------------------------------------------

CLOZE = [  # contexts that end where a token ends
    ("import os\nimport", [" sys", " %", " return"]),
    ("def f(x):\n    return", [" x", "]]", " class"]),
    ("for i in", [" while", " range(10):", "=="]),
    ("try:\n    x = 1\nexcept", ["++", " import", " ValueError:"]),
    ("class A:\n    def", [" __init__(self):", " yield", "}"]),
    ("from collections", [" ==", " import namedtuple", ")"]),
]
LINES = ["def main(", "x = [1, 2, 3", "print('hello'", "if __name__ == '__main__'", "class Stack(", "import "]


def log_likelihood(llm: LLM, context: str, continuation: str) -> float:
    """As lm-eval splits it: what the whole text has in tokens beyond the context's."""
    from nanoserve.tasks.eval.scoring import score

    assert llm.tokenizer is not None
    whole, start = llm.tokenizer.encode(context + continuation), len(llm.tokenizer.encode(context))
    logprobs = score(llm.engine, whole[:start], whole[start:], 512).log_softmax(-1)
    return sum(float(row[token]) for row, token in zip(logprobs, whole[start:], strict=True))


def test_lm_eval_finds_what_the_offline_engine_finds(server: Server, tmp_path: Path) -> None:
    """Its scores are 1 where our engine, without a server, is the judge: of log-likelihoods and of greedy texts."""
    python = python_with("lm_eval, transformers, datasets, tenacity")
    with LLM("tiny", enable_prefix_caching=False) as llm:
        outputs = llm.generate(LINES, SamplingParams(temperature=0, max_tokens=16, stop="\n"))
        lines = [{"text": text, "target": output.text} for text, output in zip(LINES, outputs, strict=True)]
        cloze = []
        for text, choices in CLOZE:
            values = [log_likelihood(llm, text, choice) for choice in choices]
            cloze.append({"text": text, "choices": choices, "answer": values.index(max(values)), "values": values})
    for name, rows in (("lines", lines), ("cloze", cloze)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(TOKENIZER),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 2048,
    }
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--tasks", "nanoserve_cloze,nanoserve_lines"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--include_path", str(HERE / "lm_eval_tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    run(command, timeout=240, cwd=tmp_path, env=os.environ | offline)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    assert found["nanoserve_cloze"]["acc,none"] == 1 and found["nanoserve_lines"]["exact_match,none"] == 1
    (samples,) = (tmp_path / "out").rglob("samples_nanoserve_cloze_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        assert theirs == pytest.approx(sample["doc"]["values"], abs=2e-3)


# --- aiperf ---------------------------------------------------------------------------------------------------------

#: Their name, ours, and how far apart they may be, relatively.
SAME = [
    ("time_to_first_token", "TTFT", 0.05),
    ("inter_token_latency", "TPOT", 0.05),
    ("inter_chunk_latency", "ITL", 0.05),
    ("request_latency", "E2E", 0.05),
]


def histogram_mean(text: str, name: str) -> tuple[float, float]:
    return tuple(float(re.search(rf"^vllm:{name}_{part}{{.*}} (\S+)$", text, re.M)[1]) for part in ("sum", "count"))  # type: ignore[index,return-value]


def test_aiperf_measures_what_we_measure(server: Server, tmp_path: Path) -> None:
    """Its figures of a run, ours from the times at which its own connections saw the tokens, and the server's."""
    program, requests = program_of("aiperf", "aiperf"), 60
    before = server.http.get("/metrics").text
    options = {
        "-m": "tiny",
        "-u": server.url,
        "--endpoint-type": "completions",
        "--tokenizer": TOKENIZER,
        "--synthetic-input-tokens-mean": 64,
        "--output-tokens-mean": 32,
        "--concurrency": 4,
        "--request-count": requests,
        "--random-seed": 1,
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
        "--export-level": "raw",
        "--output-artifact-dir": tmp_path,
    }
    command = [program, "profile", "--streaming", "--use-server-token-count"]
    command += [str(word) for pair in options.items() for word in pair]
    run(command, timeout=240, cwd=tmp_path)
    theirs = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    timelines = [timeline(json.loads(line)) for line in (tmp_path / "profile_export_raw.jsonl").open()]
    ours = summarise(timelines, Objectives())
    assert ours["completed"] == requests == theirs["request_count"]["avg"]
    for name, our_name, tolerance in SAME:
        for quantile, suffix in (("avg", "mean"), ("p50", "p50"), ("p95", "p95")):
            figure = ours[f"{our_name} {suffix} ms"]
            assert figure == pytest.approx(theirs[name][quantile], rel=tolerance), (name, quantile)
    assert ours["output tok/s"] == pytest.approx(theirs["output_token_throughput"]["avg"], rel=0.05)
    assert ours["QPS"] == pytest.approx(theirs["request_throughput"]["avg"], rel=0.05)

    after = server.http.get("/metrics").text
    for name, their_name in (
        ("request_time_per_output_token_seconds", "inter_token_latency"),
        ("e2e_request_latency_seconds", "request_latency"),
    ):
        (sum_before, count_before), (total, count) = histogram_mean(before, name), histogram_mean(after, name)
        assert count - count_before == requests
        seen = theirs[their_name]["avg"]
        # The server cannot see what its client needs to read: on a machine that both share, that is a part of it.
        assert 0.8 * seen < 1e3 * (total - sum_before) / requests < 1.05 * seen, name


def timeline(record: dict) -> RequestTimeline:
    """A request as our metrics see it, from the raw export. Every event carries one token here."""
    seen = []
    for response in record["responses"]:
        for packet in response["packets"]:
            event = {} if packet["value"] == "[DONE]" else json.loads(packet["value"])
            if any(choice["text"] for choice in event.get("choices", [])):
                seen.append(response["perf_ns"] * 1e-9)
            if usage := event.get("usage"):
                tokens, prompt = usage["completion_tokens"], usage["prompt_tokens"]
    deliveries = [(time, 1) for time in seen]
    deliveries[-1] = (seen[-1], 1 + tokens - len(seen))
    return RequestTimeline(
        record["metadata"]["x_request_id"],
        record["start_perf_ns"] * 1e-9,
        prompt,
        deliveries,
        finished=seen[-1],
        finish_reason="length",
    )


# --- schemathesis ---------------------------------------------------------------------------------------------------

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    """On a short context: what it makes up may ask for 128 completions without an end."""
    program = program_of("schemathesis", "st")
    server = Server(tmp_path, "log_level=warning", "engine.max_model_len=64", "engine.num_kv_blocks=256")
    command = [program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--request-timeout", "60"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--continue-on-failure"]
    command += ["--suppress-health-check", "all", "--no-color"]
    run(command, timeout=240, cwd=tmp_path)
    server.wait_idle()
    assert server.stop() == 0


# --- soak -----------------------------------------------------------------------------------------------------------


def test_soak() -> None:
    """The ten minutes of ``soak.py`` in a third of one."""
    run([sys.executable, str(HERE / "soak.py"), "--minutes", "0.33", "--connections", "100"], timeout=200)
