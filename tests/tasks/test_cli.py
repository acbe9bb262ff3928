"""The command line: free text, strictness, exit codes, sweeps (C46, C47). In process; real engines come last."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nanoserve.cli import quote, rewrite
from nanoserve.contracts.errors import RequestError
from nanoserve.engine import build as engine_build
from nanoserve.sampling_params import SamplingParams
from nanoserve.tasks import Job
from nanoserve.tasks.chat import reply
from tests.helpers.distributions import SCHEDULER, Distributions
from tests.helpers.distributions import distributions as distributions
from tests.tasks.conftest import Cli, EchoLLM

REAL_LLM = Job.llm

# --- free text -----------------------------------------------------------------------------------------------------

TEXTS = [
    "def f(x, y): return {x: 1}",
    "",
    "a,b",
    "a=b==c",
    "${engine.seed} $HOME $5 ${",
    r"\${x} C:\dir\ \\",
    "'single' \"double\" `back`",
    "line\nbreak\ttab",
    "你好，世界：{}",
    "[1, 2] (x) ~!@#%^&*",
    "null",
    "None",
    "true",
    "???",
    " spaces ",
    "choice(a,b)",
]


@given(st.text(alphabet=st.one_of(st.sampled_from("\\'\"${},=:[]() \n\tab?"), st.characters(codec="utf-8"))))
@example("???")
@example("\\${a}'\\")
def test_any_text_survives_hydra_and_omegaconf(text: str) -> None:
    parser = OverridesParser.create()
    once = parser.parse_override(f"prompt={quote(text)}")
    assert not once.is_sweep_override()
    again = parser.parse_override(f"prompt={once.get_value_element_as_str()}")  # a sweep prints and parses it once more
    config = OmegaConf.create({"prompt": None})
    OmegaConf.update(config, "prompt", again.value())
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True) == {"prompt": text}


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_arrives_as_typed(cli: Cli, text: str) -> None:
    run = cli(f"prompt={text}")
    assert run.code == 0 and run.out == text[::-1] + "\n"
    assert os.listdir() == []  # C46: a plain run leaves nothing behind


@pytest.mark.parametrize("text", ["def f(x, y): return {x: 1}", "a,b=${c}\\"])
def test_a_prompt_never_sweeps(cli: Cli, text: str) -> None:
    assert cli("-m", f"prompt={text}", "kv=bf16,int8").code == 0
    assert [llm.requests[0][0] for llm in cli.llms] == [text, text]


def test_model_paths_need_no_quoting(cli: Cli) -> None:
    """C46: "=" and "," in a path; a path quoted for Hydra, as people have learnt to do, is right too."""
    for argument in ("model=ckpt/epoch=9,x.ckpt", "model.path=ckpt/epoch=9,x.ckpt", "model.path='ckpt/epoch=9,x.ckpt'"):
        assert cli(argument, "prompt=a").code == 0
        model = cli.llms[-1].job.config.model
        assert (model.path, model.config) == ("ckpt/epoch=9,x.ckpt", None)


def test_prompt_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import json\n"))
    assert cli("prompt=-").out == "\nnosj tropmi\n"
    for errors in ("strict", "surrogateescape"):  # the second is Python's choice in the locale C
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
        refused = cli("prompt=-")
        assert refused.code == 1 and "standard input is not UTF-8: byte 0xe9 after 'caf'" in refused.err


def test_rewriting_leaves_flags_and_other_values_alone() -> None:
    arguments = ["-m", "--config-dir=a=b", "kv=int8", "sampling.stop=['x','y']", "prompts=null"]
    assert rewrite(arguments) == arguments


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "task=bench_kernels engine.max_num_seqs=4",
            "task=bench_kernels does not use engine.max_num_seqs; leave it out",
        ),
        ("task=tune engine.enforce_eager=true", "task=tune does not use engine.enforce_eager"),
        ("task=capacity attention=sdpa", "task=capacity does not use attention; leave it out"),
        ("task=plugins kv=int8", "task=plugins does not use kv; leave it out"),
        ("task=new_plugin kind=policy name=x engine.seed=1", "task=new_plugin does not use engine; leave it out"),
    ],
)
def test_what_a_task_would_ignore_is_refused(cli: Cli, words: str, message: str) -> None:
    run = cli(*words.split())
    assert run.code == 2 and message in run.err


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_policy_table_that_was_given_stays_where_there_is_a_preset(cli: Cli, plus: str) -> None:
    assert cli(f"{plus}policy.table=[{{phase: decode, use: [paged_v1]}}]", "prompt=a").code == 0
    assert cli.llms[-1].job.config.policy_on("NVIDIA H200").options["table"][0]["use"] == ["paged_v1"]
    assert cli("prompt=a").code == 0
    assert len(cli.llms[-1].job.config.policy_on("NVIDIA H200").options["table"]) > 1


def test_verbose_tells_what_is_built() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "nanoserve", "prompt=a", "sampling.max_tokens=1", "hydra.verbose=[nanoserve]"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "KV cache: " in run.stderr and "bytes = 2 (K and V)" in run.stderr
    assert re.search(r"(?m)^attention: prefill .*; decode .*; policy auto \(policy/auto.yaml\)$", run.stderr)
    assert "· policy auto (policy/auto.yaml)]" in run.stderr


# --- C46: strictness -----------------------------------------------------------------------------------------------

WRONG = [
    ([], "give either prompt="),
    (["prompt=a", "prompts=b.jsonl"], "give either prompt="),
    (["prompt=a", "output=b.jsonl"], "output: only the results of prompts="),
    (["prompt=a", "max_num_seq=4"], "unknown option 'max_num_seq'.*did you mean 'engine.max_num_seqs'"),
    (["prompt=a", "max_tokens=4"], "unknown option 'max_tokens'.*did you mean 'sampling.max_tokens'"),
    (["prompt=a", "+max_num_seq=4"], "max_num_seq: unknown option"),
    (["prompt=a", "engine.max_num_seq=4"], "unknown option 'engine.max_num_seq'.*did you mean"),
    (["prompt=a", "+engine.max_num_seq=4"], "engine.max_num_seq: unknown option.*did you mean 'max_num_seqs'"),
    (["prompt=a", "+engine.block_size=4"], "write engine.block_size=VALUE without the \\+"),
    (["prompt=a", "hydra.foo=4"], "unknown option 'hydra.foo'"),
    (["prompt=a", "engine.max_num_seqs=abc"], "engine.max_num_seqs: expected int, got 'abc'"),
    (["prompt=a", "engine.max_num_seqs=4.0"], "engine.max_num_seqs: expected int, got 4.0"),
    (["prompt=a", "engine.max_num_seqs=4.5"], "engine.max_num_seqs: expected int, got 4.5"),
    (["prompt=a", "engine.max_num_seqs=0"], "engine.max_num_seqs must be 1 to 65536, not 0"),
    (["prompt=a", "engine.block_size=0"], "engine.block_size must be a power of two"),
    (["prompt=a", "engine.block_size=15"], "engine.block_size must be a power of two"),
    (["prompt=a", "engine.gpu_memory_utilization=1.5"], "engine.gpu_memory_utilization must be"),
    (["prompt=a", "sampling.seed=None"], "sampling.seed: 'None' is a word here; write null"),
    (["prompts=None"], "prompts: 'None' is a word here; write null"),
    (["prompt=a", "sampling.temperature=-1"], "sampling.temperature must be"),
    (["prompt=a", "sampling.logprobs=many"], "sampling.logprobs: expected int or null"),
    (["prompt=a", "model=tiny,qwen3_8b"], "model=tiny,qwen3_8b: several values need -m$"),
    (["prompt=a", "sampling.stop=a,b"], r"several values need -m, and a list is written sampling.stop=\[a,b\]"),
    (["prompt=a", "scheduler=1e3"], r"scheduler=1e3: expected a name \(decode_first.*scheduler.OPTION=VALUE"),
    (["prompt=a", "engine=null"], "engine=null: expected a name"),
    (["prompt=a", "attention=null"], r"attention=null: expected a name \(auto,.* paged_v1,.* sdpa,"),
    (["prompt=a", "--config-name=foo"], "--config-name=foo: there is no foo.yaml in the folders that are searched"),
    (["prompt=a", "--config-name=foo.yaml"], "--config-name=foo: there is no foo.yaml in"),
    (["prompt=a", "engine=[1,[2]]"], r"engine=\[1,\[2\]\]: expected a name"),
    (["prompt=a", "~policy=1"], "policy: this group is required"),
    (["prompt=a", "+kv=int8"], "write kv=NAME without the \\+"),
    (["prompt=a", "hydra.verbose=null"], "hydra.verbose=null: expected true, false"),
    (["prompt=a", "hydra=null"], "Hydra cannot use hydra=null"),
    (["prompt=a", "prompt=b"], "prompt is given twice"),
    (["prompt=a", "bench.repeat=3"], "it belongs to task=bench"),
    (["task=bench", "bench.batches=[1]"], "unknown option 'bench.batches' here: it belongs to bench=latency$"),
    (["task=simulate", "simulate.requests=-1"], "unknown option 'simulate.requests' .*did you mean 'num_requests'"),
    (["task=plugins", "prompt=a"], "unknown option 'prompt' of this task: it belongs to task=generate"),
    (["prompt=a", "--foo"], "unknown flag '--foo'"),
    (["prompt=a", "sampling.logprobs=2"], "sampling.logprobs: only prompts="),
    (["task=chat", "sampling.n=2"], "sampling.n: a chat shows one reply"),
    (["kv.blok_size=4"], "kv.blok_size: unknown option of kv=bf16"),
    (["engine.max_num_seqs=0"], "engine.max_num_seqs must be"),
    (["prompt=a", "engine.num_kv_blocks=3000000000"], r"num_kv_blocks must be 1 to 2\^31 - 1, or null"),
    (["prompt=a", "model=tinny"], "unknown model 'tinny'.*did you mean 'tiny'"),
    (["prompt=a", "attention=sdpaa"], "unknown attention 'sdpaa'.*did you mean 'sdpa'"),
    (["prompt=a", "kv=int7"], "unknown kv 'int7'.*did you mean 'int8'"),
    (["task=generat"], "unknown task 'generat'.*did you mean 'generate'"),
    (["prompt=a", "model=path"], "model.path: a value is required"),
    (["prompt=a", "~kv"], "kv: this group is required"),
    (["prompt=a", "engine.seed=${nothing}"], "nothing"),
    (["hello"], "cannot read 'hello': write KEY=VALUE"),
    (["prompts=missing.jsonl"], "cannot open 'missing.jsonl': No such file"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_wrong_command_is_one_line_and_code_2(cli: Cli, arguments: list[str], message: str) -> None:
    """C46. No engine is built, and no traceback is shown."""
    run = cli(*arguments)
    assert (run.code, run.out, cli.llms) == (2, "", [])
    assert run.err.count("\n") == 1 and run.err.startswith("nanoserve: error: ")
    assert re.search(message, run.err), run.err


def test_null_is_none(cli: Cli) -> None:
    """C46: ``seed=null`` on an optional field."""
    assert cli("prompt=a", "sampling.seed=null", "sampling.max_tokens=null").code == 0
    params = cli.llms[-1].job.sampling
    assert (params.seed, params.max_tokens) == (None, None)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("kv.dtype=int7", "kv.dtype.*int7"),
        ("attention.blok_m=4", "attention.blok_m: unknown option of attention=sdpa"),
        ("attention=auto attention.block_m=4", "attention.block_m: attention=auto has no options"),
        ("scheduler.max_nothing=4", "scheduler.max_nothing: unknown option of scheduler=decode_first"),
        ("policy.tabel=4", "policy.tabel: unknown option of policy=auto"),
        ("engine.max_model_len=999", "engine.max_model_len.*256"),
    ],
)
def test_plugin_options_are_refused_before_any_weight_is_read(
    cli: Cli, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, argument: str, message: str
) -> None:
    """C46, with the real engine builder."""

    def read_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(engine_build, "load_model", read_weights)
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    given = argument if argument.startswith("attention=") else f"attention=sdpa {argument}"
    run = cli(f"model={tiny_checkpoint}", "prompt=a", *given.split())
    assert run.code == 2 and re.search(message, run.err), run.err


def test_a_failure_is_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; the traceback comes with HYDRA_FULL_ERROR=1 only."""
    long = "prompt=" + "x" * 50
    run = cli(long)
    assert (run.code, run.err) == (1, "nanoserve: error: the prompt has more than 40 tokens\n")
    monkeypatch.setattr(Job, "llm", lambda job: 1 / 0)
    run = cli("prompt=a")
    assert run.code == 1 and "Traceback" not in run.err
    assert run.err == "nanoserve: error: ZeroDivisionError: division by zero (HYDRA_FULL_ERROR=1 shows the traceback)\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    run = cli("prompt=a")
    assert run.code == 1 and "Traceback" in run.err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_cfg_and_version(cli: Cli) -> None:
    """C47: ``--cfg job`` prints and runs nothing; it refuses what a run would refuse."""
    run = cli("--cfg", "job", "prompt=def f(x): {}", "kv=int8")
    config = OmegaConf.create(run.out)
    assert (run.code, config.prompt, config.kv.name, cli.llms) == (0, "def f(x): {}", "int8", [])
    assert cli("--cfg", "job", "max_num_seq=4").code == 2
    assert cli("--version").out.startswith("nanoserve 0.")


# --- C47: sweeps ---------------------------------------------------------------------------------------------------


def test_a_sweep_runs_every_job_and_names_the_failing_one(cli: Cli) -> None:
    """C47: ``-m max_num_seqs=4,0,2``: jobs 0 and 2 run, the code is 1, the override and the reason are named."""
    run = cli("-m", "prompt=ab", "engine.max_num_seqs=4,0,2")
    assert run.code == 1
    assert [llm.job.config.engine.max_num_seqs for llm in cli.llms] == [4, 2]
    assert all(llm.closed for llm in cli.llms)
    reason = "engine.max_num_seqs must be 1 to 65536, not 0"
    assert f"job 1 failed with engine.max_num_seqs=0: {reason}" in run.err
    table = [line for line in run.out.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].split()[0] for line in table] == ["0", "1", "2"]
    assert reason in table[1] and reason not in table[0] + table[2]
    assert "ba" in table[0] and "ba" in table[2]


def test_a_sweep_that_goes_well(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run = cli("-m", "prompt=ab", "kv=bf16,int8", "scheduler=decode_first,prefill_first", "hydra.sweep.dir=sweep")
    assert run.code == 0
    assert [(llm.job.config.kv.name, llm.job.config.scheduler.name) for llm in cli.llms] == [
        (kv, scheduler) for kv in ("bf16", "int8") for scheduler in ("decode_first", "prefill_first")
    ]
    results = [json.loads((Path("sweep") / str(i) / "result.json").read_text()) for i in range(4)]
    assert [result["overrides"]["kv"] for result in results] == ["bf16", "bf16", "int8", "int8"]
    assert all(result["figures"]["text"] == "ba" for result in results)
    files = {str(file.relative_to("sweep")) for file in Path("sweep").rglob("*") if file.is_file()}
    assert files == {"multirun.yaml", "sweep.csv", "sweep.html", *(f"{i}/result.json" for i in range(4))}
    assert not any("hf_secret" in (Path("sweep") / file).read_text() for file in files)  # C47: no token on disk
    header = run.out.splitlines()[6]
    assert "kv" in header and "scheduler" in header and "prompt " not in header.replace("prompt tokens", "")


def test_a_failed_job_leaves_its_traceback_in_its_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "llm", lambda job: 1 / 0)
    run = cli("-m", "prompt=ab", "hydra.sweep.dir=sweep")
    assert run.code == 1 and "Traceback" not in run.err and "ZeroDivisionError" in run.err
    assert "1 / 0" in json.loads(Path("sweep/0/result.json").read_text())["traceback"]


def test_no_job_of_a_sweep_writes_over_another(cli: Cli, tmp_path: Path) -> None:
    run = cli("task=capacity", "-m", "kv=bf16,int8", f"output={tmp_path}/x.json", "hydra.sweep.dir=sweep")
    assert run.code == 1 and run.err.count("every job of a sweep would write there") == 2
    assert cli("task=capacity", "-m", "kv=bf16,int8", "output=x.json", "hydra.sweep.dir=sweep").code == 0
    assert Path("sweep/0/x.json").is_file() and Path("sweep/1/x.json").is_file()


def test_older_results_in_the_same_folder_are_not_shown(cli: Cli) -> None:
    assert cli("-m", "prompt=ab", "engine.seed=1,2,3", "hydra.sweep.dir=sweep").code == 0
    old = Path("sweep/2/result.json")
    os.utime(old, (0, 0))
    assert cli("-m", "prompt=ab", "engine.seed=1,2", "hydra.sweep.dir=sweep").out.count("│ ba") == 2


def test_a_sweep_where_nothing_can_be_written(cli: Cli) -> None:
    """It runs all the same and says where its results are; a folder that was asked for is not replaced."""
    Path("multirun").touch()  # a file in the way: a read-only folder stops no test that runs as root
    run = cli("-m", "prompt=ab", "kv=bf16,int8")
    said = re.search(r"multirun/ cannot be written .* go to (\S+) \(hydra.sweep.dir=FOLDER", run.err)
    assert run.code == 0 and run.out.count("│ ba") == 2 and said
    assert (Path(said[1]) / "1" / "result.json").is_file()
    shutil.rmtree(said[1])
    run = cli("-m", "prompt=ab", "hydra.sweep.dir=multirun/mine")
    assert (run.code, run.err.count("\n")) == (2, 1) and "hydra.sweep.dir" in run.err


def test_flags_may_stand_anywhere(cli: Cli) -> None:
    assert cli("prompt=ab", "-m", "kv=bf16,int8").out.count("│ ba") == 2
    out = cli("prompt=ab", "-m").out
    assert "1 job" in out and "1 jobs" not in out


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("kv=bf16,int7", "unknown kv 'int7'.*did you mean 'int8'"), ("model=tiny,tyni", "unknown model 'tyni'")],
)
def test_a_name_that_does_not_exist_is_a_row_of_the_sweep(cli: Cli, choice: str, reason: str) -> None:
    run = cli("-m", "prompt=ab", choice)
    assert (run.code, len(cli.llms), run.out.count("│ ba")) == (1, 1, 1)
    assert re.search(f"job 1 failed with {choice.partition('=')[0]}=.*{reason}", run.err), run.err
    assert "unknown" in run.out
    wrong = choice.replace(",", "=").split("=")[2]
    assert cli("prompt=ab", f"{choice.partition('=')[0]}={wrong}").code == 2  # without -m it is a wrong command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=profile", "output=file"], "output=file: there is a file of that name; give the name of a folder"),
        (["task=bench", "output=folder"], "output=folder: there is a folder of that name; give the name of a file"),
        (["task=bench", "report=file/a.html"], "report=file/a.html: file is a file, so nothing can be written inside"),
        (["task=bench_kernels", "output=folder"], "there is a folder of that name"),
        (["task=eval", "output=folder"], "there is a folder of that name"),
        (["task=compare", "report=folder"], "there is a folder of that name"),
        (["task=capacity", "output=folder"], "there is a folder of that name"),
        (["task=simulate", f"output={'x' * 300}"], "File name too long"),
        (["task=simulate", "simulate.plot=a.foo"], r"simulate.plot=a.foo: the file's name must end in .svg or .png"),
        (["task=simulate", "output=/proc/x.json"], "output=/proc/x.json: /proc cannot be written"),
        (["task=plugins", "check=true", "record=file"], "record=file: it holds no results"),
        (["task=tune", "plot=a.foo"], r"plot=a.foo: the file's name must end in .svg or .png"),
        (["task=tune", "record=folder"], "there is a folder of that name"),
        (["task=plugins", "check=true", "record=folder"], "there is a folder of that name"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(cli: Cli, arguments: list[str], message: str) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    run = cli(*arguments)
    assert (run.code, run.out, run.err.count("\n"), cli.llms) == (2, "", 1, [])
    assert re.search(message, run.err), run.err


# --- plugins of others ---------------------------------------------------------------------------------------------


def test_a_third_party_plugin_and_its_yaml(cli: Cli, distributions: Distributions) -> None:
    """A plugin needs no YAML; if it brings some, the files join our groups, --help and sweeps."""
    paths = "\n@hookimpl\ndef nanoserve_config_paths():\n    return ['pkg://acme_conf']\n"
    source = SCHEDULER.format(name="acme") + paths
    distributions.install("acme-dist", {"scheduler.acme": "acme_mod"}, acme_mod=source)
    folder = distributions.root / "acme_conf" / "scheduler"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "acme_big.yaml").write_text("name: acme\nlimit: 99\n")

    assert cli("prompt=a", "scheduler=acme", "scheduler.limit=7").code == 0
    assert cli.llms[-1].job.config.scheduler.options == {"limit": 7}
    assert cli("-m", "prompt=a", "scheduler=acme_big,decode_first").code == 0
    assert cli.llms[-2].job.config.scheduler.options == {"limit": 99}
    assert "acme, acme_big, *decode_first, prefill_first" in cli("--help").out
    assert cli("prompt=a", "scheduler=acme_bg").code == 2


def test_only_plugins_that_are_needed_are_imported(cli: Cli, distributions: Distributions) -> None:
    """As ``nanoserve.hookspecs`` promises: neither our choices nor a third party's import a plugin beside them."""
    distributions.install("acme-dist", {"scheduler.acme": "acme_mod"}, acme_mod=SCHEDULER.format(name="acme"))
    distributions.install("sick-dist", {"scheduler.sick": "sick_mod"}, sick_mod="import no_such_module")
    assert "sick" not in cli("prompt=a", "kv=int8").err and "acme_mod" not in sys.modules
    assert "sick" not in cli("-m", "prompt=a", "scheduler='acme',decode_first").err and "acme_mod" in sys.modules
    assert "warning: plugin 'scheduler.sick'" in cli("prompt=a", "policy=presett").err


def test_a_broken_third_party_plugin_is_one_line(cli: Cli, distributions: Distributions) -> None:
    """C48: a warning, once, while the command works; strict mode refuses to start."""
    distributions.install("sick-dist", {"sick": "sick_mod"}, sick_mod="import no_such_module")
    run = cli("-m", "prompt=ab", "kv=bf16,int8")
    assert run.code == 0
    assert [line for line in run.err.splitlines() if "sick-dist" in line] == [
        "nanoserve: warning: plugin 'sick' of distribution sick-dist 1.5 does not work: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOSERVE_STRICT_PLUGINS", "1")
        run = cli("prompt=ab")
    assert run.code == 2


# --- files of prompts, chat ----------------------------------------------------------------------------------------

LINES = """\
"one"
{"prompt": "two", "temperature": 0, "logit_bias": {"5": 1}}

oops
{"text": "no prompt"}
{"prompt": "three", "max_tokns": 3}
{"prompt": "three", "max_tokens": 0}
"far more than the forty characters that would fit"
[1, 2, 3]
"最后"
"""


def test_a_bad_line_takes_no_other_down(cli: Cli, tmp_path: Path) -> None:
    Path("in.jsonl").write_text(LINES, encoding="utf-8")
    run = cli("prompts=in.jsonl", "output=out.jsonl", "sampling.max_tokens=9")
    rows = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [row.get("text") for row in rows] == ["eno", "owt", *[None] * 5, "]3 ,2 ,1[", "后最"]
    for row, word in zip(rows[2:7], ["not JSON", '"prompt"', "max_tokens", "max_tokens", "40 tokens"], strict=True):
        assert word in row["error"]
    (_, first), (_, second), *_ = cli.llms[-1].requests
    assert (first.temperature, first.max_tokens) == (0.6, 9)
    assert (second.temperature, second.logit_bias) == (0.0, {5: 1.0})
    assert run.code == 1 and "5 of 9 prompts failed, first line 4" in run.err


BYTES = b'\xef\xbb\xbf"one"\n"b\xff"\n{"prompt": "\\ud800"}\n"last"\n'


@pytest.mark.parametrize("prompts", ["in.jsonl", "-"])
def test_bytes_that_are_no_text_are_an_error_of_their_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, prompts: str
) -> None:
    """A byte-order mark, a byte that is not UTF-8, and half a surrogate pair, in a file and from a pipe."""
    Path("in.jsonl").write_bytes(BYTES)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BYTES), encoding="utf-8"))
    monkeypatch.setattr("tests.tasks.conftest.EchoLLM.check", lambda self, prompt, params: encode(prompt))
    assert cli(f"prompts={prompts}", "output=out.jsonl").code == 1
    rows = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row.get("text") for row in rows] == ["eno", None, None, "tsal"]
    assert "not UTF-8: byte 0xff after '\"b'" in rows[1]["error"]
    assert (rows[2]["prompt"], rows[2]["error"]) == ("\ud800", "no surrogates")


def encode(prompt: str) -> None:
    if "\ud800" in prompt:
        raise RequestError("no surrogates")


def test_the_results_do_not_overwrite_the_prompts(cli: Cli) -> None:
    Path("in.jsonl").write_text('"one"\n')
    run = cli("prompts=in.jsonl", "output=./in.jsonl")
    assert run.code == 2 and "would be overwritten" in run.err
    assert Path("in.jsonl").read_text() == '"one"\n'


@pytest.mark.parametrize(("task", "hint"), [("generate", r"prompts=FILE.jsonl.*\[1, 2, 3\]"), ("chat", "cannot chat")])
def test_a_model_without_a_tokenizer(cli: Cli, monkeypatch: pytest.MonkeyPatch, task: str, hint: str) -> None:
    monkeypatch.setattr("tests.tasks.conftest.EchoLLM.tokenizer", None, raising=False)
    run = cli(f"task={task}", *(["prompt=a"] if task == "generate" else []))
    assert run.code == 1 and re.search(hint, run.err)


def test_the_jobs_of_a_sweep_do_not_overwrite_each_others_output(cli: Cli) -> None:
    Path("in.jsonl").write_text('"one"\n')
    assert cli("-m", "prompts=in.jsonl", "output=out.jsonl", "kv=bf16,int8", "hydra.sweep.dir=sweep").code == 0
    assert sorted(map(str, Path().rglob("out.jsonl"))) == ["sweep/0/out.jsonl", "sweep/1/out.jsonl"]


def test_prompts_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('"one"\n{"prompt": "two", "n": 2}\n'))
    run = cli("prompts=-")
    assert run.code == 0
    assert [json.loads(line).get("texts", [json.loads(line)["text"]]) for line in run.out.splitlines()] == [
        ["eno"],
        ["owt", "owt"],
    ]


def test_several_completions_are_told_apart(cli: Cli) -> None:
    assert cli("prompt=ab", "sampling.n=2").out == "--- 1/2\nba\n--- 2/2\nba\n"


def test_chat(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is refused is no end of the conversation."""
    lines = ["hello", "", "far more than the forty characters that would fit", "/reset", "bye", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    seen: list[list[tuple[str, str]]] = []

    def render(self: Any, messages: Any, **template: Any) -> str:
        seen.append([(m["role"], m["content"]) for m in messages])
        assert template == {"enable_thinking": False}
        return str(messages[-1]["content"])

    monkeypatch.setattr("tests.tasks.conftest.EchoLLM.render_chat", render)
    run = cli("task=chat", "system=be brief, {x}", "enable_thinking=false")
    assert (run.code, run.out) == (0, "olleh\neyb\n")
    assert seen[1] == [
        ("system", "be brief, {x}"),
        ("user", "hello"),
        ("assistant", "olleh"),
        ("user", "far more than the forty characters that would fit"),
    ]
    assert seen[2] == [("system", "be brief, {x}"), ("user", "bye")]
    assert "more than 40 tokens; /reset" in run.err
    assert cli.llms[-1].job.sampling.max_tokens == 1024


def test_ctrl_c_stops_a_reply_between_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """What has come so far is the answer, the request is aborted, and the old handler is back."""

    class Stream(EchoLLM):
        def __init__(self) -> None:
            self.aborted = False

        def stream(self, prompt: Any, params: Any) -> Any:
            try:
                for i, character in enumerate("abcdef"):
                    if i == 2:
                        signal.raise_signal(signal.SIGINT)
                    yield self._output(prompt, character, 1)
            finally:
                self.aborted = True

    before = signal.getsignal(signal.SIGINT)
    llm: Any = Stream()
    assert reply(llm, [{"role": "user", "content": "x"}], SamplingParams()) == "abc"
    assert llm.aborted and signal.getsignal(signal.SIGINT) is before
