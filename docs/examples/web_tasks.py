"""MiniWoB++'s web pages as BrowserGym plays them: the page's elements as text, a screenshot as an image.

Train on it: fleetbus up --environment pool:web_tasks.py:MiniWob --environment-images --tasks web_tasks.json
"""

import importlib.util
import os
import re
from pathlib import Path

from fleetbus import Action, ChatMessage, Start, Step, Task, Verdict

HINT = """Answer with one action: click('ID'), fill('ID', 'TEXT'), keyboard_press('KEY'), keyboard_type('TEXT'),
mouse_click(X, Y), scroll(X, Y), noop(). An element's ID stands in brackets before it."""


class MiniWob:
    """One episode. The task's config has `id`, as in click-button, and may have `kwargs` of BrowserGym's environment, as
    {"timeout": 60000}, and `action_timeout`, the milliseconds of an action; its seed selects the page."""

    replayable = False  # the same actions need not show the same picture: a caret blinks, a page takes its time

    def open(self, task: Task) -> None:
        pages = Path(str(importlib.util.find_spec("miniwob").origin)).parent / "html/miniwob"
        os.environ.setdefault("MINIWOB_URL", f"{pages.as_uri()}/")
        import browsergym.miniwob  # noqa: F401 - registers the tasks
        import gymnasium
        from browsergym.core.action.highlevel import HighLevelActionSet

        actions = HighLevelActionSet("miniwob_all")
        patience = f"timeout={task.config.get('action_timeout', 500)}"  # BrowserGym's own is written into its actions
        self.seed, self.total = task.seed, 0.0
        arguments = {"action_mapping": lambda text: actions.to_python_code(text).replace("timeout=500", patience)}
        arguments |= task.config.get("kwargs", {})
        self.page = gymnasium.make(f"browsergym/miniwob.{task.config['id']}", **arguments)

    def reset(self) -> Start:
        shown = self.page.reset(seed=self.seed)[0]
        text = f"{shown['goal']}\n{HINT}\n{self.describe(shown)}"
        return Start(messages=(ChatMessage(role="user", content=text),), images=(shown["screenshot"],))

    def step(self, action: Action) -> Step:
        shown, reward, terminated, truncated, _ = self.page.step(action.text.strip())
        self.total += float(reward)
        message = ChatMessage(role="user", content=self.describe(shown))
        return Step(
            messages=(message,),
            images=(shown["screenshot"],),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            tool_errors=int(bool(shown["last_action_error"])),
        )

    def describe(self, shown: dict[str, object]) -> str:
        from browsergym.utils.obs import flatten_axtree_to_str

        error = str(shown["last_action_error"])
        lines = flatten_axtree_to_str(shown["axtree_object"]).splitlines()
        elements = "\n".join(re.sub(r", url='[^']*'", "", line) for line in lines if "InlineTextBox" not in line)
        return f"Error: {error}\n{elements}" if error else elements

    def state(self) -> dict[str, object]:
        return {"reward": self.total}

    def verify(self) -> Verdict:
        return Verdict(reward=self.total)

    def close(self) -> None:
        if hasattr(self, "page"):
            self.page.close()
