"""The starter policy: a tiny model that plays the default task badly enough to learn, and the recipe that builds it.

It needs torch, transformers and tokenizers; whoever wants only the folder of the shipped policy finds it in ``policy/``.
"""
