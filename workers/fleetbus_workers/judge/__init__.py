"""A model that grades: any OpenAI-compatible server, a rubric, and transcripts. `client` asks, `prompts` is what is asked."""
