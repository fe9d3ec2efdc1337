"""Configuration: precedence of the sources, and one helpful line for whatever is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.config.fields import list_settings, tables
from fleetbus.config.load import dump_configuration, find_default_file, load_configuration, read_tables, strip_credentials
from fleetbus.config.run_folder import read_earlier_configuration
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError


def write(folder: Path, text: str, name: str = "fleetbus.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def refusal(**sources: object) -> str:
    with pytest.raises(UserError) as caught:
        load_configuration(**sources)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_any_source_the_defaults_hold() -> None:
    assert load_configuration().configuration == Configuration()


def test_flags_beat_variables_beat_the_file_beat_the_runs_earlier_configuration(tmp_path: Path) -> None:
    file = write(tmp_path, "[learner]\nsteps = 2\ngroups = 2\ngroup_size = 4\n")
    loaded = load_configuration(
        earlier=lambda run: {"learner": {"steps": 1, "groups": 1, "group_size": 3, "threads": 2}},
        file=file,
        variables={"FLEETBUS_LEARNER_STEPS": "3", "FLEETBUS_LEARNER_GROUPS": "3", "PATH": "/bin"},
        flags={"learner.steps": "4"},
    )
    learner = loaded.configuration.learner
    assert (learner.steps, learner.groups, learner.group_size, learner.threads) == (4, 3, 4, 2)
    assert loaded.given == {
        "learner.steps": "--learner-steps",
        "learner.groups": "FLEETBUS_LEARNER_GROUPS",
        "learner.group_size": "fleetbus.toml: learner.group_size",
    }


def test_an_earlier_configuration_is_of_the_run_in_whose_folder_it_is(tmp_path: Path) -> None:
    for name in ("copy", "default"):
        (tmp_path / name).mkdir()
        tables = {"run": {"name": "origin", "folder": "/elsewhere", "seed": 7}}
        (tmp_path / name / "config.json").write_bytes(msgspec.json.encode(tables))
    for name, named in (("copy", {"run.name": "copy"}), ("default", {})):
        flags = {**named, "run.folder": str(tmp_path)}
        run = load_configuration(flags=flags, earlier=read_earlier_configuration).configuration.run
        assert (run.name, run.folder, run.seed) == (name, str(tmp_path), 7)
    recipe = {"run": {"name": "copy", "folder": str(tmp_path)}}
    run = load_configuration(recipe=recipe, earlier=read_earlier_configuration).configuration.run
    assert (run.name, run.folder, run.seed) == ("copy", str(tmp_path), 7)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[learner]\nstep = 5", ["fleetbus.toml", "unknown key step", "did you mean steps?"]),
        ("[lerner]\nsteps = 5", ["unknown table [lerner]", "did you mean [learner]?"]),
        ("steps = 5", ["fleetbus.toml", "did you mean steps in [learner]?"]),
        ('"a\\nb" = 5', ["unknown table", "the tables are run, nats"]),
        ("[learner]\nmax_num_seqs = 5", ["unknown key max_num_seqs in [learner]", "inference.max_num_seqs"]),
        ("learner = 3", ["learner is a table", "[learner]"]),
        ("[learner]\nsteps = 0", ["fleetbus.toml: learner.steps = 0", "a whole number, at least 1"]),
        ('[learner]\nsteps = "5"', ['learner.steps = "5"', "a whole number"]),
        ("[learner]\nsteps = 2.5", ["learner.steps = 2.5", "a whole number"]),
        ("[learner]\nsteps = true", ["learner.steps = True", "a whole number"]),
        ('[learner]\nstale_groups = "sometimes"', ["learner.stale_groups", "one of drop, keep"]),
        ("[episode]\ntop_p = 1.5", ["episode.top_p = 1.5", "a number, above 0, at most 1"]),
        ("[limits]\nopen = inf", ["limits.open = inf", "a number, above 0"]),
        ("[limits]\nopen = nan", ["limits.open = nan", "a number, above 0"]),
        ("[evaluation]\ngreedy = 1", ["evaluation.greedy = 1", "true or false"]),
        ("[learner\nsteps = 5", ["fleetbus.toml cannot be parsed", "line 1"]),
        ("[run]\nname = 'a.b'", ["run.name", "letters, digits"]),
        ("[learner]\ngroup_size = 4\nmin_group_size = 5", ["learner.min_group_size = 5", "learner.group_size = 4"]),
        ("[weights]\nfull_every = 101", ["weights.full_every", "101", "100"]),
        ("[environment]\nworkers = 17", ["environment.workers = 17", "nats.lanes = 16"]),
        ("[episode]\nmax_episode_tokens = 4096", ["episode.max_episode_tokens = 4096", "inference.max_model_len = 1024"]),
    ],
)
def test_a_wrong_file_is_refused_by_one_line_that_names_key_value_and_what_is_right(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    message = refusal(file=write(tmp_path, text))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("FLEETBUS_LEARNER_STEP", "5", ["FLEETBUS_LEARNER_STEP", "did you mean FLEETBUS_LEARNER_STEPS?"]),
        ("FLEETBUS_LERNER_STEPS", "5", ["did you mean FLEETBUS_LEARNER_STEPS?"]),
        ("FLEETBUS_LEARNER_QQQQQQQQQQQQQQ", "5", ["unknown variable FLEETBUS_LEARNER_QQQQQQQQQQQQQQ"]),
        ("FLEETBUS_LEARNER_STEPS", "many", ["FLEETBUS_LEARNER_STEPS = many", "a whole number, at least 1"]),
        ("FLEETBUS_EPISODE_TEMPERATURE", "nan", ["FLEETBUS_EPISODE_TEMPERATURE = nan", "a number"]),
    ],
)
def test_a_wrong_variable_is_refused_by_one_line(variable: str, value: str, parts: list[str]) -> None:
    message = refusal(variables={variable: value})
    for part in parts:
        assert part in message


def test_variables_that_are_no_settings_are_left_alone() -> None:
    variables = {"FLEETBUS_NATS_SERVER": "/usr/bin/nats-server", "FLEETBUS_HOME": "x", "LEARNER_STEPS": "x"}
    assert load_configuration(variables=variables).configuration == Configuration()


def test_a_value_of_a_flag_is_refused_under_the_flags_name() -> None:
    assert "--learner-steps = 0 is not allowed" in refusal(flags={"learner.steps": "0"})


@pytest.mark.parametrize("text", ["9" * 23, str((1 << 53) + 1)])
def test_a_whole_number_that_no_message_can_carry_is_refused(text: str) -> None:
    assert "a whole number, at least 1, at most 9007199254740992" in refusal(flags={"learner.steps": text})
    assert load_configuration(flags={"run.seed": str((1 << 63) - 1)}).configuration.run.seed == (1 << 63) - 1


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_booleans_are_spelled_in_variables(text: str, value: bool) -> None:
    loaded = load_configuration(variables={"FLEETBUS_EVALUATION_GREEDY": text})
    assert loaded.configuration.evaluation.greedy is value


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "nowhere.toml" in refusal(file=tmp_path / "nowhere.toml")


def test_the_default_file_is_the_one_in_the_folder_if_any(tmp_path: Path) -> None:
    assert find_default_file(tmp_path) is None
    assert find_default_file(tmp_path.parent / "missing") is None
    assert find_default_file(write(tmp_path, "").parent) == tmp_path / "fleetbus.toml"


def test_a_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    loaded = load_configuration(flags={"learner.steps": 7, "run.name": "b", "evaluation.greedy": False})
    file = tmp_path / "config.json"
    file.write_bytes(dump_configuration(loaded.configuration))
    assert load_configuration(file=file).configuration == loaded.configuration


@pytest.mark.parametrize("urls", ["http://ada:hunter2@one", "http://one,https://ada@two:8000/v1"])
def test_addresses_of_engines_hold_no_password(urls: str) -> None:
    shown = refusal(flags={"inference.engine": "openai", "inference.urls": urls})
    assert "OPENAI_API_KEY" in shown and "ada" not in shown and "hunter2" not in shown


def test_no_password_is_ever_written_or_shown(tmp_path: Path) -> None:
    loaded = load_configuration(flags={"nats.url": "nats://ada:hunter2@one:4222,nats://token@two"})
    assert loaded.configuration.nats.url == "nats://ada:hunter2@one:4222,nats://token@two"
    written = dump_configuration(loaded.configuration).decode()
    assert "hunter2" not in written and "ada" not in written and "token@" not in written
    assert "nats://one:4222,nats://two" in written
    assert "hunter2" not in refusal(flags={"nats.port": "nats://ada:hunter2@one"})


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4222",
        "https://host:8000/data@v0.2",
        "https://host/data@v0.2",
        "data@v0.2",
        "127.0.0.1:4222,127.0.0.1:4223",
        "wrong address: ask bob@example.com",
    ],
)
def test_urls_without_credentials_stay_as_they_are(url: str) -> None:
    assert strip_credentials(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://u:s3@cret@host:4222", "nats://host:4222"),
        ("nats://u:s3/cret@host:4222", "nats://host:4222"),
        ("nats://u:s/3@cret@host:4222", "nats://host:4222"),
        ("nats://token@host:4222", "nats://host:4222"),
        ("u:s3cret@host:4222", "host:4222"),
        ("nats://a:s3cret@one,b:s3cret@two", "nats://one,two"),
        ("https://u:s3@cret@host/data@v0.2", "https://host/data@v0.2"),
    ],
)
def test_no_password_is_shown_whatever_characters_it_has(url: str, shown: str) -> None:
    assert strip_credentials(url) == shown


def test_every_setting_has_help_and_a_default_that_it_allows() -> None:
    for setting in list_settings():
        assert setting.limits.description, setting.name
        assert setting.convert(setting.default, text=False) == setting.default
        assert re.fullmatch(r"--[a-z-]+", setting.flag)
        assert re.fullmatch(r"FLEETBUS_[A-Z_]+", setting.variable)


def test_no_two_settings_share_a_flag_or_a_variable() -> None:
    settings = list_settings()
    assert len({setting.flag for setting in settings}) == len(settings)
    assert len({setting.variable for setting in settings}) == len(settings)


_any_setting = st.sampled_from(list_settings())


@given(setting=_any_setting, value=st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.none()))
def test_any_value_is_either_taken_or_refused_in_one_line(setting: object, value: object) -> None:
    try:
        load_configuration(flags={setting.name: value})  # type: ignore[attr-defined]
    except UserError as error:
        assert len(str(error).splitlines()) == 1


def test_an_error_quotes_no_line_break_and_no_terminal_command() -> None:
    assert str(UserError("store = a\rb\n\x1b[2Jä")) == r"store = a\rb\n\x1b[2Jä"


def test_the_json_of_another_file_type_is_not_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no tables"):
        read_tables(write(tmp_path, "[1, 2]", "config.json"))


def test_tables_are_those_of_the_configuration() -> None:
    assert tuple(tables()) == Configuration.__struct_fields__
