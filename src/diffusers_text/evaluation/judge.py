"""The causal language model that judges texts."""

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_judge(
    model_name_or_path: str = "gpt2", gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A causal language model and its tokenizer, for [`generative_perplexity`].

    Args:
        model_name_or_path (`str`, defaults to `"gpt2"`): folder or Hub id; most papers take GPT-2.
        gguf_file (`str`, *optional*): name of a GGUF file in it, where it is one; needs the package `gguf`.
    """
    model = AutoModelForCausalLM.from_pretrained(model_name_or_path, gguf_file=gguf_file).eval()
    return model, AutoTokenizer.from_pretrained(model_name_or_path, gguf_file=gguf_file)
