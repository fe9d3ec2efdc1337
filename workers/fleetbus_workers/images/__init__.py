"""Images on their way to a model: read by their hash, processed as the model's own processor does, put in the place of tokens.

Shared by inference and learner, which must not import each other. `processing` and `embedding` need transformers and torch.
"""
