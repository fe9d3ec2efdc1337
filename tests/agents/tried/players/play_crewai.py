"""CrewAI: a crew of one, with its own loop."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from common import KEY, PROMPT, URL
from common import look as look_at
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("look")
def look(at: int) -> str:
    """Looks at a place and says what is there."""
    return look_at(at)


model = LLM(model="openai/policy", base_url=URL, api_key=KEY)
agent = Agent(role="Looker", goal="Look", backstory="You look at places.", tools=[look], llm=model)
task = Task(description=PROMPT, expected_output="The sum.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
