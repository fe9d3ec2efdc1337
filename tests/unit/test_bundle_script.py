"""The page's modules joined to one script, and the page that names it; what cannot be joined is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetbus_workers.observe.bundle.folder import ANSWERS, PAGE, BundleFolder
from fleetbus_workers.observe.bundle.page_script import build_index, join_modules


def test_modules_are_joined_in_the_order_in_which_they_need_each_other() -> None:
    modules = {
        "app.js": 'import { add, ONE } from "./sums.js";\nimport { say } from "./words.js";\nsay(add(ONE, ONE));\n',
        "words.js": 'import { ONE } from "./sums.js";\nexport async function say(value) { return value + ONE; }\n',
        "sums.js": "export const ONE = 1;\nexport function add(a, b) { return a + b; }\n",
        "unused.js": "export const NEVER = 1;\n",
    }
    script = join_modules(modules, "app.js")
    assert script.index("'sums.js'] = (") < script.index("'words.js'] = (") < script.index("'app.js'] = (")
    assert "const { add, ONE } = modules['sums.js'];" in script and "return { ONE, add };" in script
    assert "unused" not in script and "import " not in script and "export " not in script


@pytest.mark.parametrize(
    "text",
    [
        'import add from "./sums.js";',
        'import "./sums.js";',
        "export default 1;",
        "export { ONE };",
        'import { a } from "/b.js";',
    ],
)
def test_an_import_or_export_of_another_form_is_refused_by_its_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"app\.js of the page has a line that cannot be joined"):
        join_modules({"app.js": f"{text}\n", "sums.js": ""}, "app.js")


def test_modules_in_a_circle_are_refused() -> None:
    with pytest.raises(ValueError, match="import each other"):
        join_modules({"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}, "a.js")


def test_the_page_itself_can_be_joined_and_names_no_file_of_a_server() -> None:
    script = join_modules({file.name: file.read_text() for file in PAGE.glob("*.js")}, "app.js")
    for file in PAGE.glob("*.js"):
        assert f"modules['{file.name}'] = (" in script
    index = build_index((PAGE / "index.html").read_text(), scripts=("page/page.js",))
    assert '<script defer src="page/page.js"></script>' in index and '="/' not in index
    with pytest.raises(ValueError, match=r"index\.html"):
        build_index("<html></html>", scripts=())


def test_what_a_transcript_names_keys_of_a_copy_are_texts_and_no_part_of_its_script(tmp_path: Path) -> None:
    value = {"arguments": {"__proto__": {"path": "/etc/passwd"}, "</script>": "\u2028"}, "files": {"__proto__": "e000001"}}
    folder = BundleFolder(tmp_path)
    folder.add_data("e000001", value)
    script = (tmp_path / "data" / "e000001.js").read_text()
    before, after = 'fleetbus.give("e000001",', ");\n"
    assert script.startswith(before) and script.endswith(after)
    text = json.loads(script[len(before) : -len(after)])
    assert json.loads(text) == value
    assert "JSON.parse(text)" in ANSWERS.read_text()
