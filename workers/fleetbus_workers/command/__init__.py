"""The edges that programs share: terminal, event loop and exit statuses."""
