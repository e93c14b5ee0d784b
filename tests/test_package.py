"""The package as a whole: names, imports, types, and what it does to transformers and diffusers on import."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import diffusers_text

ROOT = Path(__file__).parents[1]


def test_every_public_name_exists_and_has_a_docstring():
    for name in diffusers_text.__all__:
        value = getattr(diffusers_text, name)
        assert name == "__version__" or value.__doc__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        diffusers_text.nonsense  # noqa: B018
    assert files("diffusers_text").joinpath("py.typed").is_file()


def test_import_is_lazy_and_registers():
    code = (
        "import sys, diffusers_text\n"
        "from transformers import AutoConfig\n"
        "from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES\n"
        "assert 'diffusers_text.pipelines.pipeline_text_diffusion' not in sys.modules\n"
        "assert 'datasets' not in sys.modules\n"
        "AutoConfig.for_model('diffusion_bert')\n"
        "assert all(hasattr(diffusers_text, name) for name in LOADABLE_CLASSES['diffusers_text'])\n"
        "from diffusers_text import *\n"
        "TextDiffusionPipeline, AbsorbingStateScheduler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_extras_all_but_training_works():
    """What `pip install .` leaves out: matplotlib draws, and is named where it is missing."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['matplotlib', 'evaluate', 'peft', 'rouge_score', 'gguf', 'lm_eval']))\n"
        "import diffusers_text, diffusers_text.commands.main\n"
        "for name in set(diffusers_text.__all__) - {'TextDiffusionTrainer'}:\n"
        "    getattr(diffusers_text, name)\n"
        "try:\n"
        "    diffusers_text.TextDiffusionTrainer\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "`TextDiffusionTrainer` needs matplotlib: install the extra `train`."


def test_rooms_import_in_one_direction():
    """models and schedulers know nobody; losses knows schedulers; data knows neither models nor pipelines."""
    forbidden = {
        "models": ["schedulers", "losses", "pipelines", "data", "training"],
        "schedulers": ["models", "losses", "pipelines", "data", "training"],
        "data": ["models", "schedulers", "losses", "pipelines", "training"],
        "losses.py": ["models", "pipelines", "data", "training"],
        "pipelines": ["losses", "training"],
    }
    for room, others in forbidden.items():
        place = ROOT / "src" / "diffusers_text" / room
        for path in [place] if place.is_file() else place.glob("*.py"):
            text = path.read_text()
            for other in others:
                assert f"from ..{other}" not in text
                assert f"from .{other}" not in text
                assert f"diffusers_text.{other}" not in text, path
