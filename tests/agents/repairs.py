"""Five small repositories with one fault each, as tasks of an agent: the files, the right edit, a wrong one, and a verifier.

A verifier reads the file that the agent left, calls its function in a sandbox of its own, and compares the values by itself
(`docs/environments.md`, "A verifier that cannot be forged").
"""

from __future__ import annotations

import msgspec

from fleetbus_schemas import Task

TEST = "test_it.py"
PROMPT = "The tests of this repository fail (python {test}). Repair {file}; keep its names. Repository: {name}."

VERIFIER = """
CASES = {cases!r}

async def verify(env):
    code = await env.call_tool("read_file", {{"path": {file!r}}})
    asked = {{"code": code, "function": {function!r}, "arguments": [case for case, _ in CASES]}}
    answer = await env.call_tool("python_call", asked)
    return float(all(got["value"] == right for got, (_, right) in zip(answer["results"], CASES)))
"""

Case = tuple[list[object], object]


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """``old`` stands once in the source of ``file``; with ``right`` in its place all ``cases`` hold (arguments of ``function``
    and its value), with ``wrong`` some do not. The repository's own test knows the first of them."""

    name: str
    file: str
    source: str
    function: str
    cases: tuple[Case, ...]
    old: str
    right: str
    wrong: str

    def build_task(self) -> Task:
        """What is laid out stands in the config, where the one that starts the agent finds it."""
        prompt = PROMPT.format(test=TEST, file=self.file, name=self.name)
        module, (arguments, value) = self.file.removesuffix(".py").replace("/", "."), self.cases[0]
        test = f"from {module} import {self.function}\nassert {self.function}(*{arguments!r}) == {value!r}\nprint('OK')\n"
        verifier = VERIFIER.format(cases=list(self.cases), file=self.file, function=self.function)
        return Task(key=self.name, prompt=prompt, config={"files": {self.file: self.source, TEST: test}}, verifier=verifier)


REPAIRS = (
    Repair(
        name="median",
        file="median.py",
        source="def median(values):\n    ordered = sorted(values)\n    return ordered[len(values) // 2]\n",
        function="median",
        cases=(([[1, 2, 3, 10]], 2.5), ([[5, 1, 3]], 3), ([[2, 4]], 3.0)),
        old="    return ordered[len(values) // 2]\n",
        right="    middle = len(ordered) // 2\n    if len(ordered) % 2:\n        return ordered[middle]\n"
        "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
        wrong="    return ordered[(len(values) - 1) // 2]\n",
    ),
    Repair(
        name="leap-years",
        file="calendars/years.py",
        source="def is_leap(year):\n    return year % 4 == 0\n",
        function="is_leap",
        cases=(([1900], False), ([2000], True), ([2024], True), ([2023], False)),
        old="    return year % 4 == 0\n",
        right="    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        wrong="    return year % 4 == 0 and year % 100 != 0\n",
    ),
    Repair(
        name="csv-quotes",
        file="table.py",
        source='def split_line(line):\n    """Fields of a line; a field may stand in quotes."""\n    return line.split(",")\n',
        function="split_line",
        cases=((['a,"b,c",d'], ["a", "b,c", "d"]), (["a,b"], ["a", "b"]), (['"x ""y""",z'], ['x "y"', "z"])),
        old='    return line.split(",")\n',
        right="    import csv\n\n    return next(csv.reader([line]))\n",
        wrong='    return line.replace(\'"\', "").split(",")\n',
    ),
    Repair(
        name="stock",
        file="shop/stock.py",
        source="def remove(stock, name, count):\n    stock[name] = stock[name] - count\n    return stock\n",
        function="remove",
        cases=(
            ([{"apple": 1}, "apple", 3], {"apple": 1}),
            ([{"apple": 3}, "apple", 1], {"apple": 2}),
            ([{"apple": 1}, "pear", 1], {"apple": 1}),
        ),
        old="    stock[name] = stock[name] - count\n    return stock\n",
        right="    if stock.get(name, 0) >= count:\n        stock[name] -= count\n    return stock\n",
        wrong="    stock[name] = max(1, stock[name] - count)\n    return stock\n",
    ),
    Repair(
        name="roman",
        file="roman.py",
        source="VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100}\n\n\n"
        "def read_roman(text):\n    return sum(VALUES[letter] for letter in text)\n",
        function="read_roman",
        cases=((["IV"], 4), (["XIV"], 14), (["XC"], 90), (["LII"], 52)),
        old="    return sum(VALUES[letter] for letter in text)\n",
        right="    values = [VALUES[letter] for letter in text]\n"
        "    following = [*values[1:], 0]\n"
        "    return sum(-value if value < after else value for value, after in zip(values, following))\n",
        wrong="    return 4 if text == 'IV' else sum(VALUES[letter] for letter in text)\n",
    ),
)
