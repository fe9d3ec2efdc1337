"""What programs share at their edges: terminal, event loop and exit statuses."""
