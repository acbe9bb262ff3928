"""Plugin loading: one bad plugin harms nobody else, and every message names plugin and distribution (C48, C49)."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nanoserve.contracts.errors import ConfigError, PluginError
from nanoserve.contracts.observer import EngineInfo, Observer
from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerLimits, SchedulerSpec
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import PluginWarning, Registry
from tests.helpers.distributions import SCHEDULER, Distributions
from tests.helpers.distributions import distributions as distributions

INFO = EngineInfo("tiny", {}, "bf16", "decode_first", "auto", 16, 8, 256)
BUILT_IN = {
    "attention": {"sdpa"},
    "kvcache": {"bf16", "int8"},
    "scheduler": {"decode_first", "prefill_first"},
    "policy": {"auto"},
    "grammar": {"llguidance"},
}


@dataclass(frozen=True)
class Options:
    limit: int = 3


class Idle(Scheduler):
    def schedule(self) -> Schedule:
        return Schedule()


def spec(name: str = "mine", **changes: Any) -> SchedulerSpec:
    return SchedulerSpec(**{"name": name, "summary": "", "config": Options, "factory": Idle, **changes})


def plugin(*specs: Any) -> types.SimpleNamespace:
    """An inline plugin object that registers schedulers."""

    @hookimpl
    def nanoserve_scheduler(register: Any) -> None:
        for one in specs:
            register(one)

    return types.SimpleNamespace(nanoserve_scheduler=nanoserve_scheduler)


@pytest.fixture(autouse=True)
def only_expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        yield


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_ins_are_found_and_load(kind: str) -> None:
    registry = Registry.discover()
    assert set(registry.names(kind)) >= BUILT_IN[kind]
    for name in BUILT_IN[kind]:
        assert registry.get(kind, name).name == name


# --- C48: broken plugins -------------------------------------------------------------------------------------------

BROKEN = {
    "ImportError": "import no_such_module",
    "SystemExit": "import sys; sys.exit(3)",
    "syntax": "def (",
    "extra argument": SCHEDULER.format(name="bad").replace("(register)", "(register, more)"),
    "hook raises": SCHEDULER.format(name="bad").replace("register(SPEC)", "raise KeyError('x')"),
    "wrong type": SCHEDULER.format(name="bad").replace("register(SPEC)", "register('bad')"),
    "no marker": SCHEDULER.format(name="bad").replace("@hookimpl", ""),
    "option without default": SCHEDULER.format(name="bad").replace("limit: int = 3", "limit: int"),
    "config is no dataclass": SCHEDULER.format(name="bad").replace("Options, Mine", "dict, Mine"),
    "name with a comma": SCHEDULER.format(name="a,b"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_leaves_the_others_working(distributions: Distributions, fault: str) -> None:
    """C48: one by one: the plugins before and after it are active; one warning names plugin, distribution and error."""
    distributions.install("acme-one", {"ok1": "acme_one"}, acme_one=SCHEDULER.format(name="one"))
    distributions.install("broken-dist", {"faulty": "broken_mod"}, broken_mod=BROKEN[fault])
    distributions.install("zeta-two", {"ok2": "zeta_two"}, zeta_two=SCHEDULER.format(name="two"))
    with pytest.warns(PluginWarning) as caught:
        registry = Registry.discover()
    (warning,) = caught
    (broken,) = registry.broken
    assert "'faulty'" in str(warning.message) and "broken-dist 1.5" in str(warning.message)
    assert type(broken.error).__name__ in str(warning.message)
    assert registry.get("scheduler", "one").summary == registry.get("scheduler", "two").summary == "a test"
    with pytest.raises(PluginError, match="unknown scheduler 'bad'.*'faulty' of distribution broken-dist"):
        registry.get("scheduler", "bad")


@pytest.mark.parametrize("fault", BROKEN)
def test_strict_mode_makes_it_an_error(
    distributions: Distributions, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """C48: the strict switch."""
    distributions.install("broken-dist", {"scheduler.bad": "broken_mod"}, broken_mod=BROKEN[fault])
    monkeypatch.setenv("NANOSERVE_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="broken-dist"):
        Registry.discover(paths=[str(distributions.root)])


def test_ctrl_c_is_no_broken_plugin(distributions: Distributions) -> None:
    distributions.install("slow-dist", {"slow": "slow_mod"}, slow_mod="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry.discover()


def test_a_misspelt_hook_is_found(distributions: Distributions) -> None:
    """C48: pluggy accepts it in silence; check_pending is called, and the near hook is named."""
    source = SCHEDULER.format(name="mine") + "\n@hookimpl\ndef nanoserve_attenton(register): ...\n"
    distributions.install("typo-dist", {"typo": "typo_mod"}, typo_mod=source)
    with pytest.warns(PluginWarning, match="typo-dist.*nanoserve_attenton.*did you mean 'nanoserve_attention'"):
        registry = Registry.discover()
    assert registry.get("scheduler", "mine").name == "mine"


def test_a_named_entry_point_is_imported_when_chosen(distributions: Distributions) -> None:
    """``KIND.NAME`` costs nothing until somebody wants it, broken or not."""
    distributions.install("lazy-dist", {"scheduler.lazy": "lazy_mod"}, lazy_mod=SCHEDULER.format(name="lazy"))
    distributions.install("sick-dist", {"scheduler.sick": "sick_mod"}, sick_mod="import no_such_module")
    registry = Registry.discover()
    assert {"lazy", "sick"} <= set(registry.names("scheduler"))
    registry.get("scheduler", "decode_first")
    assert "lazy_mod" not in sys.modules and not registry.broken
    registry.get("scheduler", "lazy")
    assert "lazy_mod" in sys.modules


def test_choosing_a_broken_plugin_raises_with_its_cause(distributions: Distributions) -> None:
    distributions.install("sick-dist", {"scheduler.sick": "sick_mod"}, sick_mod="import no_such_module")
    registry = Registry.discover()
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match="sick-dist.*no_such_module") as error:
        registry.get("scheduler", "sick")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    assert "sick" not in registry.names("scheduler")


@pytest.mark.parametrize(
    ("entry_points", "reason"),
    [
        ({"scheduler.promised": "some_mod"}, "also registers scheduler.other, which no entry point of that name"),
        ({"scheduler.other": "some_mod", "kvcache.other": "some_mod"}, "does not register kvcache 'other'"),
    ],
)
def test_an_entry_point_keeps_its_promise(distributions: Distributions, entry_points: Any, reason: str) -> None:
    distributions.install("odd-dist", entry_points, some_mod=SCHEDULER.format(name="other"))
    kind, _, name = list(entry_points)[-1].partition(".")
    registry = Registry.discover()
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match=reason):
        registry.get(kind, name)


def test_a_factory_that_returns_the_wrong_type_is_named(distributions: Distributions) -> None:
    source = SCHEDULER.format(name="mine").replace("Options, Mine)", "Options, lambda *_: 42)")
    distributions.install("wrong-dist", {"scheduler.mine": "wrong_mod"}, wrong_mod=source)
    factory = Registry.discover().get("scheduler", "mine").factory
    with pytest.raises(PluginError, match="'mine'.*wrong-dist.*returned int, not a Scheduler"):
        factory(Options(), SchedulerLimits(1, 1, 1), None)


def test_observers_fail_alone() -> None:
    """C48: a hook that raises, or answers nonsense, costs a warning; the other plugins' observers are there."""

    def observed(answer: Any) -> types.SimpleNamespace:
        @hookimpl
        def nanoserve_observer(engine_info: EngineInfo) -> Any:
            assert engine_info is INFO
            if isinstance(answer, Exception):
                raise answer
            return answer

        return types.SimpleNamespace(nanoserve_observer=nanoserve_observer)

    good = Observer()
    registry = Registry(extra=[observed(good), observed(None), observed(OSError("disk full")), observed("text")])
    with pytest.warns(PluginWarning) as caught:
        assert registry.observers(INFO) == [good]
    assert sorted("disk full" in str(w.message) for w in caught) == [False, True]


# --- C49: two plugins with one name --------------------------------------------------------------------------------


def test_a_name_claimed_twice(distributions: Distributions) -> None:
    """C49: the first is kept, a warning names both distributions, "later" is still loaded; strict mode refuses."""
    for i, name in enumerate(("dup-one", "dup-two")):
        distributions.install(name, {"dup": f"dup_{i}"}, **{f"dup_{i}": SCHEDULER.format(name="dup")})
    distributions.install("later-dist", {"later": "later_mod"}, later_mod=SCHEDULER.format(name="later"))
    registry = Registry.discover()
    with pytest.warns(PluginWarning, match="(?=.*dup-one)(?=.*dup-two)"):
        kept = registry.get("scheduler", "dup")
    assert registry.get("scheduler", "later").name == "later"
    assert [r.spec for r in registry.registrations("scheduler") if r.spec.name == "dup"] == [kept]
    with pytest.raises(PluginError, match="(?=.*dup-one)(?=.*dup-two)"):
        Registry.discover(paths=[str(distributions.root)], strict=True)


def test_a_clash_of_entry_points_is_seen_without_an_import(distributions: Distributions) -> None:
    """C49: when the kind is looked up, whichever name is chosen; the message says how to silence it."""
    for i, name in enumerate(("dup-one", "dup-two")):
        distributions.install(name, {"scheduler.dup": f"dup_{i}"}, **{f"dup_{i}": SCHEDULER.format(name="dup")})
    with pytest.warns(PluginWarning) as caught:
        Registry.discover().get("scheduler", "decode_first")
    assert not {"dup_0", "dup_1"} & set(sys.modules)
    remedy = re.search(r"NANOSERVE_DISABLE_PLUGINS=(\S+) silences", str(caught[0].message))
    assert remedy and Registry.discover(disable=[remedy[1]]).get("scheduler", "dup").name == "dup"


@pytest.mark.parametrize("entry_point", ["scheduler.decode_first", "eager", "scheduler.other"])
def test_a_built_in_is_not_replaced_by_accident(distributions: Distributions, entry_point: str) -> None:
    """C49: although the newcomer stands before it on ``sys.path``, and whenever it is imported."""
    source = SCHEDULER.format(name="decode_first")
    promises = {entry_point: "thief_mod"}
    if entry_point == "scheduler.other":  # a module that is imported for another of its names
        source += "\n    register(SchedulerSpec('other', 'a test', Options, Mine))\n"
        promises["scheduler.decode_first"] = "thief_mod"
    distributions.install("thief", promises, thief_mod=source)
    registry = Registry.discover()
    with pytest.warns(PluginWarning, match="(?=.*thief)(?=.*distribution nanoserve)"):
        if entry_point == "scheduler.other":
            assert registry.get("scheduler", "other").summary == "a test"
        assert registry.get("scheduler", "decode_first").summary != "a test"
    kept = {r.spec.name: r.source.distribution for r in registry.registrations("scheduler")}
    assert kept["decode_first"] == "nanoserve"


def test_one_plugin_through_two_channels_is_benign(distributions: Distributions) -> None:
    """C49: the same object, from two distributions or under two names."""
    source = SCHEDULER.format(name="mine")
    distributions.install("chan-one", {"mine": "mine_mod", "scheduler.mine": "mine_mod"}, mine_mod=source)
    distributions.install("chan-two", {"scheduler.mine": "mine_mod"})
    registry = Registry.discover()
    assert registry.get("scheduler", "mine").name == "mine"
    assert [r.spec.name for r in registry.registrations("scheduler")].count("mine") == 1
    assert not registry.broken


def test_blocked_names_are_skipped(distributions: Distributions, monkeypatch: pytest.MonkeyPatch) -> None:
    """C49: by entry-point name, eager and lazy; the error says that it was blocked."""
    distributions.install("bad-dist", {"bad": "bad_mod"}, bad_mod="raise OSError")
    monkeypatch.setenv("NANOSERVE_DISABLE_PLUGINS", "bad, scheduler.prefill_first")
    registry = Registry.discover()
    assert "prefill_first" not in registry.names("scheduler")
    with pytest.raises(PluginError, match="scheduler=prefill_first is disabled by NANOSERVE_DISABLE_PLUGINS"):
        registry.get("scheduler", "prefill_first")


def test_of_two_strangers_with_one_name_the_distributions_name_decides(distributions: Distributions) -> None:
    """Not the order in which a file system lists them."""
    for name in ("b-dist", "a-dist", "c-dist"):
        module = name.replace("-", "_")
        distributions.install(name, {"scheduler.dup": module}, **{module: SCHEDULER.format(name="dup")})
    with pytest.warns(PluginWarning, match="'dup' of plugin .*[bc]-dist.* is not used: plugin .*a-dist"):
        (registration,) = Registry.discover().registrations("scheduler", ["dup"])
    assert registration.source.distribution == "a-dist"


def test_a_blocked_name_that_nobody_has_is_told() -> None:
    with pytest.warns(
        PluginWarning, match="no plugin is skipped as 'scheduler.prefil_first'.*'scheduler.prefill_first'"
    ):
        registry = Registry.discover(disable=["scheduler.prefil_first"])
    assert "prefill_first" in registry.names("scheduler")
    with warnings.catch_warnings(action="error"):
        Registry.discover(disable=["scheduler.prefill_first@nanoserve"])


def test_of_two_plugins_in_one_module_one_can_be_blocked(distributions: Distributions) -> None:
    source = SCHEDULER.format(name="one") + "\n    register(SchedulerSpec('two', 'a test', Options, Mine))\n"
    distributions.install("pair-dist", {"scheduler.one": "pair_mod", "scheduler.two": "pair_mod"}, pair_mod=source)
    registry = Registry.discover(disable=["scheduler.one"])
    assert registry.get("scheduler", "two").name == "two"
    assert "one" not in registry.names("scheduler")


# --- names, options, paths -----------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(PluginError, match="unknown scheduler 'decode_frst'.*did you mean 'decode_first'"):
        Registry.discover().get("scheduler", "decode_frst")
    with pytest.raises(PluginError, match="unknown scheduler 'int8'.*there is kv=int8"):
        Registry.discover().get("scheduler", "int8")
    with pytest.raises(PluginError, match="unknown kind 'kv'"):
        Registry.discover().get("kv", "int8")


def test_registries_share_nothing() -> None:
    first, second = Registry(extra=[plugin(spec())]), Registry()
    assert first.names("scheduler") == ["mine"] and second.names("scheduler") == []


def test_paths_replace_the_search_path(distributions: Distributions) -> None:
    distributions.install("lone-dist", {"scheduler.lone": "lone_mod"}, lone_mod=SCHEDULER.format(name="lone"))
    assert Registry.discover(paths=[str(distributions.root)]).names("scheduler") == ["lone"]


def test_options_are_strict_and_named_as_on_the_command_line() -> None:
    registry = Registry(extra=[plugin(spec())])
    mine = registry.get("scheduler", "mine")
    assert registry.make_options("scheduler", mine, {"limit": 5}) == Options(5)
    with pytest.raises(ConfigError, match="scheduler.limt: unknown option of scheduler=mine.*did you mean 'limit'"):
        registry.make_options("scheduler", mine, {"limt": 5})
    with pytest.raises(ConfigError, match="scheduler.limit: expected int, got 'abc'"):
        registry.make_options("scheduler", mine, {"limit": "abc"})


def test_config_paths_of_third_parties(distributions: Distributions) -> None:
    """A lazy plugin's paths count too; an answer of the wrong type is a warning."""
    hook = "\n@hookimpl\ndef nanoserve_config_paths():\n    return {}\n"
    for name, answer in (("path-one", ["pkg://one.conf"]), ("path-two", "pkg://two.conf")):
        module = name.replace("-", "_")
        source = SCHEDULER.format(name=module) + hook.format(repr(answer))
        distributions.install(name, {f"scheduler.{module}": module}, **{module: source})
    registry = Registry.discover(paths=[str(distributions.root)])
    with pytest.warns(PluginWarning, match="path-two"):
        assert registry.config_paths() == ["pkg://one.conf"]


def test_the_yaml_of_a_choice_is_looked_for_no_farther_than_needed(distributions: Distributions) -> None:
    """Nothing for a choice of ours, the plugin itself for its name, everybody for a name that none registers."""
    hook = "\n@hookimpl\ndef nanoserve_config_paths():\n    return ['file:///{0}']\n"
    for name in ("alpha", "beta"):
        source = SCHEDULER.format(name=name) + hook.format(name)
        distributions.install(f"{name}-dist", {f"scheduler.{name}": f"{name}_mod"}, **{f"{name}_mod": source})
    registry = Registry.discover(paths=[str(distributions.root)])
    assert registry.config_paths_for("scheduler", "decode_first") == [] and "alpha_mod" not in sys.modules
    assert registry.config_paths_for("scheduler", "alpha") == ["file:///alpha"] and "beta_mod" not in sys.modules
    assert registry.config_paths_for("model", "preset") == ["file:///alpha", "file:///beta"]
