"""Every Python snippet of the README, the guides and the public docstrings runs."""

import doctest
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from toys import COUNTS, toy_model, toy_tokenizer
from transformers import AutoTokenizer

import diffusers_text

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.fixture
def saved_pipeline(tmp_path):
    """A pipeline under the name that pages use for the reader's own."""
    scheduler = diffusers_text.AbsorbingStateScheduler(schedule="spindle", token_counts=COUNTS, gen_length=6)
    pipe = diffusers_text.TextDiffusionPipeline(toy_model(max_position_embeddings=128), toy_tokenizer(), scheduler)
    pipe.save_pretrained(tmp_path / "outputs" / "quickstart")
    pipe.save_pretrained(tmp_path / "user" / "my-text-diffusion")
    return tmp_path


@pytest.fixture
def real_tokenizer():
    from importlib.util import find_spec

    return AutoTokenizer.from_pretrained(Path(find_spec("cognition").submodule_search_locations[0], "model"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_of_a_page_run_in_order(page, saved_pipeline, real_tokenizer, monkeypatch):
    monkeypatch.chdir(saved_pipeline)
    names = {"tokenizer": real_tokenizer}
    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)


@pytest.mark.parametrize("name", [name for name in diffusers_text.__all__ if name != "__version__"])
def test_docstring_examples_run(name, real_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = getattr(diffusers_text, name)
    names = {
        **{public: getattr(diffusers_text, public) for public in diffusers_text.__all__},
        "torch": torch,
        "tokenizer": real_tokenizer,
        "model": toy_model(max_position_embeddings=128),
    }
    if name in ("TextDiffusionPipeline", "TextDiffusionTrainer", "likelihood_bound", "score"):
        names["tokenizer"] = toy_tokenizer()
    text = re.sub(r"```(python)?", "", value.__doc__)
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    failures = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_the_api_page_has_every_public_name_and_no_other():
    listed = re.findall(r"\[\[autodoc\]\] (\w+)", (ROOT / "docs" / "source" / "en" / "api.md").read_text())
    assert sorted(listed) == sorted(name for name in diffusers_text.__all__ if name != "__version__")


SCRIPTS = [
    path
    for folder in ("examples", "utils")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_commands_on_pages_have_options_that_exist(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code
    shown = capsys.readouterr().out
    known = set(re.findall(r"--\w+", shown))
    commands = [
        line
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", script]
        for line in re.findall(
            rf"^ +python [\w/]+/{script.name}.*$", page.read_text().replace("\\\n", ""), flags=re.MULTILINE
        )
    ]
    assert commands
    for command in commands:
        assert {word for word in shlex.split(command) if word.startswith("--")} <= known, command


def test_pages_hold_no_placeholder():
    for page in PAGES:
        assert not re.search(r"\b[A-Z]+_OUTPUT\b|TODO|FIXME", page.read_text()), page


def test_pages_name_no_file_that_is_not_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
