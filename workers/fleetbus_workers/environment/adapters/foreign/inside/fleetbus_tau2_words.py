"""Words to the two seats of `fleetbus_tau2`: what the agent and the user are told beside tau2's policies and scenarios."""

from __future__ import annotations

from typing import Any

ENDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What a user writes to end the conversation: done, handed to a human, or beyond what the scenario says."""

GREETING = "Hello, this is customer service. What can I do for you?"
FOR_AGENT = """You work in customer service and help one user, by the rules of the policy below and nothing else. An answer \
either calls tools or is a message to the user, never both.

"""
FOR_USER = f"""You play a customer who writes to customer service. What you are told below is your situation; whoever answers \
you is the agent, who does not know it.

- Write one message at a time, in your own words, and only the customer's.
- Keep to your situation. What it does not say you do not know: invent nothing.
- Say things when they are asked for, not all at once.
- When all that you want is settled, write {ENDS[0]}. When you are handed to another agent, write {ENDS[1]}. When your \
situation does not say how to go on, write {ENDS[2]}.

"""

HEADS = {
    "persona": "Who you are",
    "reason_for_call": "Why you write",
    "known_info": "What you know",
    "unknown_info": "What you do not know",
    "task_instructions": "How you behave",
}


def describe_user(scenario: dict[str, Any]) -> str:
    """A task's ``user_scenario`` as the user reads it."""
    told = {"persona": scenario.get("persona"), **scenario["instructions"]}
    return "\n\n".join(f"{head}:\n{told[key]}" for key, head in HEADS.items() if told.get(key))
