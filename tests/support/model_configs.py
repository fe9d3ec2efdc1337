"""The sizes of models on the Hub, as their `config.json` says them."""

from typing import Any

SHARED = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": SHARED
    | {"model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "intermediate_size": 6144, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": SHARED
    | {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 12288},
    "Qwen/Qwen3-32B": SHARED
    | {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "intermediate_size": 25600},
    "Qwen/Qwen3-30B-A3B": SHARED
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8},
}
