"""DSPy's ReAct: its own loop, in which calls are fields of a text."""

import dspy
from common import KEY, PROMPT, URL, look

dspy.configure(lm=dspy.LM("openai/policy", api_base=URL, api_key=KEY))
print(dspy.ReAct("question -> answer", tools=[look])(question=PROMPT).answer)
