"""Corpora of words apart, written as people write them."""

import re
from collections.abc import Callable

# In this order: what a mark is replaced with. Patterns take the space that the corpus put there.
_QUOTATION = (r'(?<!\S)" ([^"]*?) "(?!\w)', r'"\1"')  # an opening mark stands alone, as none does in clean text
_WIKITEXT = [
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" ([.,:;!?%])(?= |$)", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
    _QUOTATION,
    (r"(?<=\S) '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r"(?<=s) '(?= )", "'"),
    (r"= (?==)", "="),  # headings
]
_PTB = [
    (r" n't\b", "n't"),
    (r" '(s|re|ve|ll|d|m)\b", r"'\1"),
    (r"\$ (?=[\dN])", "$"),
    (r" ([.,:;!?%])(?= |$)", r"\1"),
    (r"# (?=[\dN])", "#"),
    (r" \\/ ", "/"),
    (r"\\/", "/"),
    (r"-lrb- ", "("),
    (r" -rrb-", ")"),
    (r"`` ?", '"'),
    (r" ?''", '"'),
]
_LM1B = [
    (r" n't\b", "n't"),
    (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r" ([.,:;!?%])(?= |$)", r"\1"),
    (r"\$ (?=\d)", "$"),
    (r"£ (?=\d)", "£"),
    (r"\( ", "("),
    (r" \)", ")"),
    _QUOTATION,
]
_LAMBADA = [
    ("[\u201c\u201d]", '"'),  # curly quotation marks
    ("[\u2018\u2019]", "'"),
    (r"`` ?", '"'),
    (r" ?''", '"'),
    (r" n't\b", "n't"),
    (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
    (r' ([.,:;!?])(?=[ "]|$)', r"\1"),
]
RULES = {"wikitext": _WIKITEXT, "ptb": _PTB, "lm1b": _LM1B, "lambada": _LAMBADA}


def detokenizer(name: str | None) -> Callable[[str], str]:
    r"""
    What undoes the spacing of a corpus.

    Args:
        name (`str`, *optional*): `"wikitext"`, `"ptb"`, `"lm1b"` or `"lambada"`; None changes nothing.

    Raises:
        ValueError: another name.

    Example:

    ```python
    >>> from diffusers_text.evaluation.detokenizers import detokenizer

    >>> detokenizer("wikitext")("the 1 @,@ 200 well @-@ known ones ( of 1990 ) .")
    'the 1,200 well-known ones (of 1990).'
    ```
    """
    if name is None:
        return lambda text: text
    if name not in RULES:
        raise ValueError(f"`detokenizer` must be one of {sorted(RULES)} or None, got {name!r}.")
    rules = [(re.compile(pattern), replacement) for pattern, replacement in RULES[name]]

    def detokenize(text: str) -> str:
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        return text

    return detokenize


__all__ = ["detokenizer"]
