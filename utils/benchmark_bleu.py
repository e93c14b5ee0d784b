"""
The time of BLEU-4 and self-BLEU of 1,000 texts against 1,000 references, and that of nltk for the same values.

    python utils/benchmark_bleu.py
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

from benchmark_sampling import print_table
from nltk.translate import bleu_score

from diffusers_text.evaluation.ngrams import mean_bleu, self_bleu
from diffusers_text.evaluation.quality import split_words

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from quickstart import QuickstartArguments, load_texts


def timed(function, *args):
    """The result and the seconds of a call."""
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def nltk_mean_bleu(texts, references):
    """[`mean_bleu`] by nltk, which counts the references anew for every text."""
    return sum(bleu_score.corpus_bleu([references], [text]) for text in texts) / len(texts)


def nltk_self_bleu(texts):
    """[`self_bleu`] by nltk."""
    others = [texts[:i] + texts[i + 1 :] for i in range(len(texts))]
    return sum(bleu_score.corpus_bleu([rest], [text]) for rest, text in zip(others, texts)) / len(texts)


def main():
    """Measures both on texts of the quickstart's corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_texts", type=int, default=1000, help="texts, and as many references")
    num_texts = parser.parse_args().num_texts
    warnings.filterwarnings("ignore", message=r"\s*The hypothesis contains 0 counts")
    train, held_out, corpus = load_texts(QuickstartArguments())
    texts, references = ([split_words(text) for text in part[:num_texts]] for part in (train, held_out))
    rows = []
    for name, ours, theirs, args in (
        ("bleu", mean_bleu, nltk_mean_bleu, (texts, references)),
        ("self_bleu", self_bleu, nltk_self_bleu, (texts,)),
    ):
        (value, seconds), (expected, nltk_seconds) = timed(ours, *args), timed(theirs, *args)
        if abs(value - expected) > 1e-9:
            raise AssertionError(f"{name} is {value}, nltk has {expected}.")
        rows.append({"measure": name, "value": value, "seconds": seconds, "nltk": nltk_seconds})
        rows[-1]["nltk/ours"] = nltk_seconds / seconds
    print(f"{len(texts)} texts and {len(references)} references of {corpus}")
    print_table(rows)


if __name__ == "__main__":
    main()
