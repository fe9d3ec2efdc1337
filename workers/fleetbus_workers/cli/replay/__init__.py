"""Commands that export and replay recordings."""
