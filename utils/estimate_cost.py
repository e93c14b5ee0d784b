"""
What training a denoiser costs, from formulas: operations and memory per token, and the time of the papers' trainings.

    python utils/estimate_cost.py

The formulas are those of docs/source/en/scaling.md; tests hold them to what small models take.
"""

import argparse
from typing import NamedTuple

from benchmark_sampling import print_table


class Size(NamedTuple):
    """An encoder: ModernBERT's layers have a gated feed-forward and no biases."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    positions: int  # learned position embeddings
    is_gated: bool = False


SIZES = [
    Size("MiniLM-L6", 6, 384, 1536, 30522, 12, 512),
    Size("BERT-base", 12, 768, 3072, 30522, 12, 512),
    Size("BERT-large", 24, 1024, 4096, 30522, 16, 512),
    Size("ModernBERT-large", 28, 1024, 2624, 50368, 16, 0, is_gated=True),
]
# The trainings of the papers: steps, rows of a step, tokens of a row.
TRAININGS = {"LM1B (DiffusionBERT)": (1_900_000, 32, 128), "OpenWebText (MDLM)": (1_000_000, 512, 1024)}
MASKED = 0.5  # of the tokens, on average over uniform times
# Operations per second that are reached: on two CPU cores as measured, on GPUs 40% of the peak in bfloat16.
DEVICES = {"2 CPU cores": 1.7e11, "A100": 0.4 * 312e12, "H100": 0.4 * 989e12, "64 H100": 64 * 0.4 * 989e12}


def parameters(size: Size) -> int:
    """Parameters of the encoder and its masked-LM head, whose decoder is the word embedding."""
    h, i, v = size.hidden, size.intermediate, size.vocab
    if size.is_gated:
        # The first layer has no norm before its attention, the embedding has one.
        return v * h + h + size.layers * (4 * h * h + 3 * h * i + 2 * h) - h + h + (h * h + h) + v
    layer = 4 * h * h + 2 * h * i + 5 * h + i + 4 * h
    embeddings = (v + size.positions + 2) * h + 2 * h
    head = h * h + h + 2 * h + v
    return embeddings + size.layers * layer + head


def operations_per_token(size: Size, length: int, masked: float = MASKED) -> float:
    """
    Floating-point operations per token of a training step: each multiplication by a weight costs 2 forward and 4
    backward, the scores and sums of attention the same by `length`; the head, and in BERT what follows the last
    attention, run at the `masked` share of tokens only.
    """
    h, i = size.hidden, size.intermediate
    attention, after = 6 * h * h + 4 * length * h, 2 * h * h + (6 if size.is_gated else 4) * h * i
    head = 2 * h * h + 2 * h * size.vocab
    last = after * (1.0 if size.is_gated else masked)
    return 3 * (size.layers * attention + (size.layers - 1) * after + last + masked * head)


def state_bytes(size: Size, ema: bool = True) -> int:
    """Weights, gradients, Adam's two moments and the average, in float32."""
    return parameters(size) * (4 + 4 + 8 + 4 * ema)


def activation_bytes_per_token(size: Size) -> float:
    """What a layer keeps for the backward pass, in float32, without dropout, with fused attention, over all layers."""
    h, i = size.hidden, size.intermediate
    kept = 10 * h + 4 * i if size.is_gated else 8 * h + 2 * i
    return 4 * size.layers * (kept + size.heads + 4)  # the log-normalisers of attention, two norms' statistics


def logits_bytes_per_token(size: Size, masked: float = MASKED) -> float:
    """Logits in float32 at the masked share of tokens; their gradient takes their place."""
    return 4 * size.vocab * masked


def days(size: Size, steps: int, rows: int, length: int, operations_per_second: float) -> float:
    """Days that a training takes."""
    return steps * rows * length * operations_per_token(size, length) / operations_per_second / 86400


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print_table(
        [
            {
                "model": size.name,
                "parameters M": parameters(size) / 1e6,
                "MFLOP/token, 128": operations_per_token(size, 128) / 1e6,
                "MFLOP/token, 1024": operations_per_token(size, 1024) / 1e6,
                "state GB": state_bytes(size) / 1e9,
                "activations kB/token": activation_bytes_per_token(size) / 1e3,
                "logits kB/token": logits_bytes_per_token(size) / 1e3,
            }
            for size in SIZES
        ]
    )
    print("\nDays of training, BERT-base")
    base = next(size for size in SIZES if size.name == "BERT-base")
    print_table(
        [
            {"training": name, **{device: days(base, *training, speed) for device, speed in DEVICES.items()}}
            for name, training in TRAININGS.items()
        ]
    )


if __name__ == "__main__":
    main()
