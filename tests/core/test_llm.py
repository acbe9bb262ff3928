"""The offline API: what a Python user types."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import nanoserve
from nanoserve import LLM, ConfigError, ModelLoadError, PluginError, RequestError, SamplingParams
from tests.helpers.oracle import greedy
from tests.helpers.tiny_model import TINY, build_tiny_model
from tests.helpers.tiny_tokenizer import save_tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CPU = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64}


def test_public_names_exist():
    for name in nanoserve.__all__:
        assert getattr(nanoserve, name) is not None


def test_import_is_light():
    """Neither torch nor hydra is imported until something needs it; LLM never imports hydra."""
    code = (
        "import sys, nanoserve; light = not {'torch', 'transformers', 'triton', 'hydra'} & set(sys.modules);"
        "nanoserve.LLM; print(light, 'hydra' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "False"]


@pytest.mark.parametrize("prompts", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_one_prompt_in_every_form(tiny_folder, prompts):
    folder, oracle = tiny_folder
    with LLM(str(folder), **CPU) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [greedy(oracle, [97, 98], 6)]
    assert outputs[0].text == llm.tokenizer.decode(outputs[0].token_ids)
    assert 0 <= outputs[0].metrics.ttft <= outputs[0].metrics.finished_time - outputs[0].metrics.arrival_time


def test_no_prompts_give_no_outputs(tiny_folder):
    with LLM(str(tiny_folder[0]), **CPU) as llm:
        assert llm.generate([], GREEDY) == []


def test_params_one_for_all_or_one_each(tiny_folder):
    with LLM(str(tiny_folder[0]), **CPU) as llm:
        outputs = llm.generate(["a", "b"], [GREEDY, replace(GREEDY, max_tokens=2)])
        assert [len(o.token_ids) for o in outputs] == [6, 2]
        with pytest.raises(RequestError, match="3 SamplingParams for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY] * 3)


def test_a_second_thread_is_refused_and_changes_nothing(tiny_folder):
    prompts = ["a", "bc", "def", "gh"]
    with LLM(str(tiny_folder[0]), **CPU) as llm:
        alone = {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts}

        def ask(prompt):
            try:
                return prompt, llm.generate(prompt, GREEDY)[0].token_ids
            except RequestError as error:
                return prompt, str(error)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, prompts * 10))
        assert any(answer == alone[prompt] for prompt, answer in answers)
        assert all(answer == alone[prompt] or "another thread" in answer for prompt, answer in answers)
        assert {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts} == alone


def test_a_stream_is_of_one_prompt(tiny_folder):
    with LLM(str(tiny_folder[0]), **CPU) as llm, pytest.raises(RequestError, match="one prompt"):
        llm.stream(["a", "b"], GREEDY)


def test_streams_may_be_interleaved(tiny_folder):
    folder, oracle = tiny_folder
    with LLM(str(folder), **CPU) as llm:
        one, two = llm.stream("abc", GREEDY), llm.stream([1, 2], GREEDY)
        ids = ([], [])
        for a, b in zip(one, two, strict=True):
            ids[0].extend(a.token_ids)
            ids[1].extend(b.token_ids)
    assert list(ids) == [greedy(oracle, [97, 98, 99], 6), greedy(oracle, [1, 2], 6)]


def test_chat_goes_through_the_template(tmp_path):
    folder = tmp_path / "chat"
    oracle = build_tiny_model(folder)
    template = "{% for m in messages %}{{ m.content }};{% endfor %}{% if enable_thinking is false %}!{% endif %}"
    save_tiny_tokenizer(folder, chat_template=template)
    with LLM(str(folder), **CPU) as llm:
        messages = [{"role": "user", "content": "hi"}]
        plain, marked = llm.chat(messages, GREEDY)[0], llm.chat(messages, GREEDY, enable_thinking=False)[0]
        assert plain.prompt_token_ids == [*b"hi;"] and marked.prompt_token_ids == [*b"hi;!"]
        assert marked.num_cached_tokens <= 3
        assert plain.token_ids == greedy(oracle, [*b"hi;"], 6)
        both = llm.chat([messages, messages], GREEDY)
        assert [o.token_ids for o in both] == [plain.token_ids] * 2


def test_c33_eos_of_generation_config_ends_a_request(tmp_path):
    folder = tmp_path / "eos"
    oracle = build_tiny_model(folder)
    trajectory = greedy(oracle, [5, 6, 7], 12)
    end = trajectory.index(trajectory[5])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, trajectory[5]]}))
    with LLM(str(folder), **CPU) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12))[0]
        assert (output.token_ids, output.finish_reason) == (trajectory[: end + 1], "stop")
        assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize(
    "options, origin",
    [({"policy": "rtx3060"}, "policy/rtx3060.yaml"), ({"policy": "rtx3060", "attention": "sdpa"}, "has no choice")],
)
def test_the_policy_table_that_serves_is_named(tiny_folder, options, origin):
    with LLM(str(tiny_folder[0]), **CPU, **options) as llm:
        assert llm.engine.info.policy_origin == origin


def test_a_policy_that_names_what_can_never_serve_is_told(tiny_folder, caplog, monkeypatch):
    monkeypatch.setenv("NANOSERVE_DISABLE_PLUGINS", "attention.hopper_decode")
    with LLM(str(tiny_folder[0]), **CPU):
        assert "the policy names" not in caplog.text
    table = [{"phase": "decode", "use": ["sdqa", "triton_flash", "sdpa"]}]
    with LLM(str(tiny_folder[0]), **CPU, policy={"name": "auto", "table": table}):
        assert "the policy names sdqa for decode, which is not installed; did you mean 'sdpa'?" in caplog.text
        assert "the policy names triton_flash for decode, which has no decode" in caplog.text


def test_dummy_weights_need_no_checkpoint():
    shape = {"model_type": "qwen3", **TINY}
    model = {"name": "mine", "path": None, "load_format": "dummy", "config": shape}
    outputs = []
    for seed in (0, 0, 1):
        with LLM(model, seed=seed, **CPU) as llm:
            assert llm.tokenizer is None
            outputs.append(llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=4, logprobs=0))[0])
            with pytest.raises(RequestError, match="no tokenizer"):
                llm.generate("text", GREEDY)
            with pytest.raises(RequestError, match="stop strings need a tokenizer"):
                llm.generate([[1]], replace(GREEDY, stop="x"))
    assert outputs[0].logprobs == outputs[1].logprobs != outputs[2].logprobs


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"max_num_seq": 4}, ConfigError, "max_num_seqs"),
        ({"block_size": 0}, ConfigError, "engine.block_size"),
        ({"max_num_seqs": "4"}, ConfigError, "engine.max_num_seqs"),
        ({"kv": "int7"}, PluginError, "int8"),
        ({"attention": "spda"}, PluginError, "sdpa"),
        ({"kv": {"name": "int8", "scale": 1}}, ConfigError, "kv.scale"),
        ({"attention": "paged_v1", "kv": "int8"}, PluginError, "cannot read KV format 'int8'"),
        ({"device": "cuda:99"}, ConfigError, "engine.device"),
        ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size"),
    ],
)
def test_a_wrong_keyword_is_named_before_any_weight_is_read(tiny_folder, keywords, error, message, monkeypatch):
    monkeypatch.setattr("nanoserve.engine.build.load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        LLM(str(tiny_folder[0]), **{"device": "cpu"} | keywords)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(str(tmp_path))
