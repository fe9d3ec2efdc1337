"""Log-probabilities and entropies in chunks: what whole logits give, in a fraction of their memory."""

import json
import subprocess
import sys

import pytest
import torch

from fleetbus_workers.learner.torch.token_scores import score_logits, score_tokens

PEAK = r"""
import json, re, sys
from pathlib import Path
import torch
from fleetbus_workers.learner.torch.token_scores import score_logits, score_tokens
tokens, vocabulary, width, chunked = int(sys.argv[1]), int(sys.argv[2]), 64, sys.argv[3] == "chunked"
torch.set_num_threads(1)
hidden = torch.randn(tokens, width, requires_grad=True)
head = torch.nn.Linear(width, vocabulary, bias=False)
head.weight.grad = torch.zeros_like(head.weight)
targets = torch.randint(vocabulary, (tokens,))
def read_peak():  # getrusage also counts the process that this one was forked from
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
before = read_peak()
if chunked:
    scores = score_tokens(head, hidden, targets, vocabulary=vocabulary)[0]
else:
    scores = score_logits(head(hidden), targets, 1.0)[0]
scores.sum().backward()
print(json.dumps(1024 * (read_peak() - before)))
"""


def measure_peak(tokens: int, vocabulary: int, kind: str) -> int:
    """Bytes beyond hidden states, head and its gradient, of one pass forward and back."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tokens), str(vocabulary), kind], capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
def test_chunks_give_what_the_whole_gives(temperature: float | str, entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64)
    head = torch.nn.Linear(16, 101).double()
    targets = torch.randint(101, (37,))
    divisor = torch.rand(37).double() + 0.5 if temperature == "each" else temperature
    found = []
    for chunk in (5 * 4 * 101, 1 << 30):
        given = hidden.clone().requires_grad_()
        head.zero_grad()
        scores = score_tokens(
            head,
            given,
            targets,
            vocabulary=101,
            temperature=divisor,  # type: ignore[arg-type]
            entropy_gradient=entropy_gradient,
            chunk_bytes=chunk,
        )
        loss = (scores.logprobs * torch.linspace(-1, 1, 37)).sum() + (scores.entropies.sum() if entropy_gradient else 0.0)
        loss.backward()
        assert scores.entropies.requires_grad == entropy_gradient
        found.append((scores.logprobs, scores.entropies, given.grad, head.weight.grad.clone(), head.bias.grad.clone()))
    for chunked, whole in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chunks_need_a_fraction_of_the_memory_of_whole_logits() -> None:
    """2,048 tokens of a vocabulary of 32,000: 262 MB of logits, and whole four times that."""
    whole, chunked = (measure_peak(2048, 32_000, kind) for kind in ("whole", "chunked"))
    assert whole > 3 * 2048 * 32_000 * 4
    assert chunked < 0.5 * whole, "a chunk is 64 MiB here too"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_thousand_tokens_of_a_large_vocabulary_stay_within_a_seventh() -> None:
    """The whole would be 4.13 times 5 GB, measured at a sixteenth of the tokens."""
    whole = 16 * measure_peak(512, 152_064, "whole")
    chunked = measure_peak(8192, 152_064, "chunked")
    print({"whole": whole, "chunked": chunked, "share": chunked / whole})
    assert chunked <= 0.15 * whole


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = torch.randn(4, 9).bfloat16()
    logprobs, entropies = score_logits(logits, torch.arange(4), 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
