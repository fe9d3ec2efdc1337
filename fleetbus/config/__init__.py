"""Settings: one definition for TOML, flags and environment variables."""
