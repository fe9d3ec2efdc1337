"""Model folders without weights: a chat template and a small tokenizer that has the template's own tokens."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<\|[^\s|<>']{2,40}\|>|<｜[^\s｜]{2,40}｜>|\[/?[A-Z_]{3,20}\]")  # noqa: RUF001 - DeepSeek's bars
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
_ENDS = (
    ("<|im_start|>", "<|im_end|>"),
    ("<|begin_of_text|>", "<|eot_id|>"),
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    ("[gMASK]", "<|endoftext|>"),
)


def write_template_folder(folder: Path, template: str) -> Path:
    """A folder whose tokenizer knows every token that the template writes, with the ends that such models declare."""
    begin, end = next((ends for ends in _ENDS if ends[1] in template or ends[0] in template), ("<s>", "</s>"))
    special = sorted({*_SPECIAL.findall(template), begin, end})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant system tool\n\n think about the price of a bolt\n"] * 5, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sorted(set(_PLAIN.findall(template)))])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, chat_template=template, additional_special_tokens=special
    ).save_pretrained(folder)
    return folder
