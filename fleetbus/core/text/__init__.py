"""Prompts, tool calls, reasoning and answers as text."""
