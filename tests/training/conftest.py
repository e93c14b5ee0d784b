import pytest
from run_training import WORDS, model, texts
from toys import toy_tokenizer


@pytest.fixture(scope="module")
def example_inputs(tmp_path_factory):
    """A folder with a model and texts for the example script."""
    folder = tmp_path_factory.mktemp("example")
    model().save_pretrained(folder / "model")
    toy_tokenizer(words=WORDS).save_pretrained(folder / "model")
    (folder / "train.txt").write_text("\n".join(texts(120)))
    (folder / "validation.txt").write_text("\n".join(texts(24, seed=1)))
    return folder
