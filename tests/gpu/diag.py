import sys, warnings, random, time
warnings.simplefilter("ignore")
import torch
from nanoserve import LLM, SamplingParams
G = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
T = ["def read_json(path):\n", "import json\n", "class Stack:\n", "for name in names:\n    "] * 4
def run(rows, **o):
    with LLM("tiny", device="cuda", num_kv_blocks=2000, **o) as llm:
        if isinstance(rows[0], str):
            enc = [llm.tokenizer.encode(t) for t in rows]
            out = llm.generate(enc, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
            full = [a + b.token_ids for a, b in zip(enc, out)]
            return [f[:c] for f in full for c in range(len(f) - 20, len(f))]
        return [o.logprobs for o in llm.generate(rows, G)]
def err(a, b, i):
    e = [abs(x[i][t] - y[i][t]) for x, y in zip(a, b) for t in x[i].keys() & y[i].keys()]
    return f"{sum(e)/len(e):.4f}/{max(e):.3f}"
rows = run(T, attention="sdpa", enforce_eager=True, overlap=False, dtype="float32")
ref = run(rows, attention="sdpa", enforce_eager=True, overlap=False, dtype="float32", enable_prefix_caching=False)
def show(name, **o):
    try:
        got = run(rows, **o)
        print(f"{name:60} prefill {err(ref, got, 0)} decode {err(ref, got, 1)}", flush=True)
    except Exception as e:
        print(name, "FAILED", repr(e)[:200], flush=True)
for dt in ("bfloat16", "float32"):
    for kv in ("bf16", "int8"):
        for a in ("sdpa", "triton_varlen", "triton_flash", "hopper_flash", "paged_v2_split", "paged_v2", "hopper_decode", "auto"):
            if dt == "float32" and a.startswith("hopper"): continue
            show(f"{dt} kv={kv} {a} eager nocache", dtype=dt, kv=kv, attention=a, enforce_eager=True, overlap=False, enable_prefix_caching=False)
        show(f"{dt} kv={kv} auto eager cache", dtype=dt, kv=kv, enforce_eager=True, overlap=False)
        show(f"{dt} kv={kv} auto graph nocache", dtype=dt, kv=kv, overlap=False, enable_prefix_caching=False)
        show(f"{dt} kv={kv} auto graph overlap cache", dtype=dt, kv=kv)
