"""A run seen from outside, folded from its log and the server's figures: what `top`, `monitor` and `metrics` share."""
