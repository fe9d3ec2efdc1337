"""Settings that changed between two lineages, by name; what one side does not know is no change."""

from fleetbus.config.settings import Configuration, LearnerSettings
from fleetbus_workers.learner.changed_settings import list_changed_settings
from fleetbus_workers.learner.resume import select_lineage_settings


def test_a_changed_setting_is_named_with_both_values() -> None:
    before = select_lineage_settings(Configuration())
    after = select_lineage_settings(Configuration(learner=LearnerSettings(groups=before["learner"]["groups"] + 1)))  # type: ignore[arg-type, operator]
    old = before["learner"]["groups"]
    assert list_changed_settings(before, after) == {"learner.groups": f"{old} -> {after['learner']['groups']}"}
    assert list_changed_settings(before, before) == {}


def test_what_only_one_side_knows_is_no_change() -> None:
    before, after = {"learner": {"groups": 4}, "gone": {"x": 1}}, {"learner": {"groups": 4, "new": 1}, "made": {"y": 1}}
    assert list_changed_settings(before, after) == {} == list_changed_settings({}, after)


def test_settings_of_the_profile_are_named_as_they_are() -> None:
    assert list_changed_settings({"profile": {"run.profile": "cpu"}}, {"profile": {"run.profile": "gpu"}}) == {
        "run.profile": "cpu -> gpu"
    }
