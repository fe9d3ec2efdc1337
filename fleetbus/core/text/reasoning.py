"""Reasoning in the policy's text: the marks that models write around it, and the text without it. Pure, and it never raises."""

REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""What models write around their reasoning: Qwen, DeepSeek, GLM, Kimi and most others; Mistral; Command; Seed."""


def split_reasoning(text: str, marks: tuple[str, str]) -> tuple[str, str]:
    """The reasoning at the beginning of ``text``, and what follows it. The opening mark may be missing, where the prompt wrote
    it; without the closing mark a text that begins with the opening one is reasoning alone."""
    opening, closing = marks
    before, closed, after = text.partition(closing)
    head = before.lstrip()
    if closed:
        return head.removeprefix(opening).strip(), after.lstrip("\n")
    if head.startswith(opening):
        return head.removeprefix(opening).strip(), ""
    return "", text


def remove_reasoning(text: str) -> str:
    """``text`` without the reasoning at its beginning, whichever marks are around it."""
    for marks in REASONING_MARKS:
        text = split_reasoning(text, marks)[1]
    return text
