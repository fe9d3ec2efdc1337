"""The starter policy: a tiny model that plays the default task badly enough to learn, and the recipe that builds it.

It needs torch, transformers and tokenizers; the shipped policy itself is in ``policy/``.
"""
