"""A run seen from outside: live table, web page, metrics and traces, all folded from its log."""
