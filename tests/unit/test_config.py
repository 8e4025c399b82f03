"""Settings: one table in C, one text form."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyalloc import Config, ConfigError, cli, planning
from pyalloc.common.config import option_text
from pyalloc.errors import PlanError


def value(config: Config, name: str) -> str:
    return next(option.value for option in config.options if option.name == name)


def test_defaults_have_names_values_and_help() -> None:
    options = Config("").options
    names = [option.name for option in options]
    assert "memory" in names and "limit" in names
    assert len(set(names)) == len(names)
    assert all(option.value and option.help for option in options)


def test_text_is_parsed() -> None:
    config = Config("memory:tight,limit:2GiB")
    assert value(config, "memory") == "tight"
    assert value(config, "memory") != value(Config(""), "memory")
    assert value(config, "limit") != value(Config(""), "limit")


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="memory"):
        Config("memroy:tight")


@pytest.mark.parametrize(
    "text",
    [
        "memory",
        "memory:",
        "memory:enormous",
        "limit:many",
        "limit:-1",
        "limit:5 bits",
        "limit:0.5",
        "limit:0.0001KB",
        ":",
        "vmm:maybe",
        "trim_after:-1",
        "trim_after:soon",
        "garbage_collection_threshold:1.5",
        "max_split_size_mb:64KB",
        "max_split_size_mb:99999999999999",
        "soft_limit:nan",
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(text)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memory:tigt", "option 'memory' cannot be 'tigt': it takes tight|balanced|fast: how much"),
        (
            "limit:2 parsec",
            "it takes a size such as 512MB or 20GiB; it is: maximum bytes to reserve",
        ),
        ("vmm:maybe", "option 'vmm' cannot be 'maybe': it takes True or False; it is: use the"),
        (
            "trim_after:-1",
            "it takes a number of seconds from 0 to 1000000000; it is: seconds after",
        ),
        (
            "max_split_size_mb:20MB",
            "cannot be '20MB': it takes a number of MiB; it is: without vmm",
        ),
        ("memory:" + 200 * "a", "'memory:" + 53 * "a" + "...' is longer than any option or value"),
        (200 * "a" + ":1", 60 * "a" + "...' is longer than any option or value"),
        ("mappings_per_page:-1", "cannot be '-1': it takes a whole number up to 1048576; it is:"),
    ],
)
def test_a_wrong_value_is_told_with_what_the_option_takes_and_is(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(text)
    assert told in str(caught.value)


def test_a_size_may_have_a_space_before_its_unit() -> None:
    assert value(Config("limit:1.5 GiB"), "limit") == str(3 << 29)
    for wrong in ("limit:1 000", "limit:1 G iB", "limit: GiB"):
        with pytest.raises(ConfigError, match="a size such as"):
            Config(wrong)


def test_a_keyword_is_one_setting() -> None:
    """With limit="2GiB,vmm:False" nobody would notice what became of vmm."""
    with pytest.raises(
        ConfigError, match=r"option 'limit' cannot be '2GiB,vmm:False'.*must not contain commas"
    ):
        Config.of(limit="2GiB,vmm:False")


@pytest.mark.parametrize("plan", [3, b"out.plan", ["out.plan"]])
def test_what_is_no_plan_s_file_is_said_by_name(plan: str) -> None:
    with pytest.raises(ConfigError, match="plan must name a file that `pyalloc plan` wrote, not"):
        Config.of(plan=plan)


def test_a_name_too_long_for_a_file_is_said_where_the_plan_is_read() -> None:
    """It was an OSError, of install()."""
    plan = Config.of(plan="x" * 300).plan
    with pytest.raises(PlanError, match="File name too long; --plan, install"):
        planning.check(Path(plan))


def test_no_plan_may_be_asked_for_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYALLOC_PLAN", "out.plan")
    assert Config.of().plan.endswith("/out.plan")
    assert Config.of(plan="").plan == ""


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Config("nonsense:1")


def test_torch_settings_with_a_meaning_here_are_understood() -> None:
    split = value(Config("max_split_size_mb:64"), "max_split_size")
    assert split != value(Config(""), "max_split_size")
    threshold = value(Config("garbage_collection_threshold:0.8"), "garbage_collection_threshold")
    assert float(threshold) == 0.8


def test_seconds_may_be_fractions_and_many() -> None:
    assert float(value(Config("trim_after:0.25"), "trim_after")) == 0.25
    assert float(value(Config("trim_after:86400"), "trim_after")) == 86400


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "expandable_segments_reserve_by_class:True",
        "backend:native",
        "pinned_use_cuda_host_register:True",
        "pinned_max_cached_size_mb:64",
        "throw_on_cudamalloc_oom:True",
    ],
)
def test_torch_settings_without_a_meaning_here_are_accepted(text: str) -> None:
    Config(text)


def test_keywords_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYALLOC_CONF", "memory:fast")
    assert value(Config.of(), "memory") == "fast"
    assert value(Config.of(memory="tight"), "memory") == "tight"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("zzz", "PYALLOC_CONF: 'zzz' is not of the form key:value, such as memory:tight"),
        (
            "memroy:tight",
            "PYALLOC_CONF: unknown option 'memroy'; did you mean 'memory'? "
            "`pyalloc doctor` lists all options",
        ),
        (
            "nothing_like_it:1",
            "PYALLOC_CONF: unknown option 'nothing_like_it'; `pyalloc doctor` lists all options",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_said_to_be_there(
    text: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYALLOC_CONF", text)
    for command in (["doctor"], ["run", "--conf", "memory:tight", sys.executable, "-V"]):
        assert cli.main(command) == 2
        assert " ".join(capsys.readouterr().err.split()) == f"pyalloc {command[0]}: {told}"
    monkeypatch.delenv("PYALLOC_CONF")
    assert cli.main(["run", "--conf", text, sys.executable, "-V"]) == 2
    assert "PYALLOC_CONF" not in capsys.readouterr().err


def test_doctor_lists_the_options_when_one_in_the_environment_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYALLOC_CONF", "nothing_like_it:1")
    assert cli.main(["doctor"]) == 2
    told = capsys.readouterr()
    assert "`pyalloc doctor` lists all options" in told.err
    for option in Config().options:
        assert f"  {option.name}:{option.value}\n" in told.out


def test_same_settings_written_differently() -> None:
    tight = Config("memory:tight")
    assert tight.is_same(Config(" memory : tight "))
    assert tight.is_same(Config("memory:fast,memory:tight"))
    assert not tight.is_same(Config("memory:fast"))
    assert tight.differences(Config("memory:fast")) == ["memory: tight, not fast"]
    planned = Config("memory:tight", "/a.plan")
    assert not tight.is_same(planned)
    assert tight.differences(planned) == ["plan: none, not /a.plan"]


def test_booleans_are_written_as_the_table_reads_them() -> None:
    assert option_text({"vmm": False, "memory": "tight"}) == "vmm:false,memory:tight"
    assert value(Config(option_text({"vmm": False})), "vmm") != value(Config(""), "vmm")


IN_A_LOCALE = """
import locale
locale.setlocale(locale.LC_NUMERIC, "comma")
assert locale.localeconv()["decimal_point"] == ","
from pyalloc import Config
options = {option.name: option.value for option in Config("limit:1.5GiB,trim_after:0.25").options}
print(options["limit"], options["trim_after"])
"""


NUMERIC = """LC_CTYPE
copy "POSIX"
END LC_CTYPE
LC_NUMERIC
decimal_point ","
thousands_sep ""
grouping -1
END LC_NUMERIC
"""


@pytest.mark.skipif(shutil.which("localedef") is None, reason="needs localedef to make a locale")
def test_a_program_s_locale_changes_no_number(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text(NUMERIC)
    made = subprocess.run(
        ["localedef", "-c", "-i", str(source), "-f", "UTF-8", str(tmp_path / "comma")],
        capture_output=True,
        text=True,
        check=False,
    )
    if not (tmp_path / "comma" / "LC_NUMERIC").exists():
        pytest.skip(f"localedef makes no locale here: {made.stderr}")
    env = os.environ | {"LOCPATH": str(tmp_path)}
    program = [sys.executable, "-c", IN_A_LOCALE]
    run = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert run.stdout.split() == [str(3 << 29), "0.25"], run.stderr
