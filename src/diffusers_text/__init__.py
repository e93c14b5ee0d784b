"""Masked diffusion text generation in the manner of transformers and diffusers."""

from importlib import import_module

from diffusers import SchedulerMixin  # noqa: F401
from diffusers.pipelines import pipeline_loading_utils
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel  # noqa: F401

from .models.configuration_diffusion_bert import DiffusionBertConfig
from .models.modeling_diffusion_bert import DiffusionBertForMaskedDiffusion

__version__ = "0.1.0"

# Public names by submodule, imported when first asked for.
_SUBMODULES = {
    "data.collators": ["DataCollatorForTextDiffusion"],
    "data.loading": ["load_splits"],
    "data.packing": ["pack_texts"],
    "data.preparation": ["prepare_completions", "prepare_pairs", "prepare_texts"],
    "data.special_tokens": ["maskable_tokens", "token_settings"],
    "data.token_counts": ["count_tokens"],
    "evaluation.likelihood": ["LikelihoodBound", "likelihood_bound"],
    "evaluation.quality": ["generation_metrics", "generative_perplexity"],
    "evaluation.scoring": ["TextScores", "score"],
    "losses": ["continuous_time_bound", "discrete_time_bound", "masked_count_bound"],
    "models.loading": ["load_denoiser"],
    "models.sparse_head": ["logits_at"],
    "pipelines.pipeline_output": ["TextDiffusionPipelineOutput", "TextDiffusionTrajectory"],
    "pipelines.pipeline_text_diffusion": ["TextDiffusionPipeline"],
    "schedulers.scheduling_absorbing_state": ["AbsorbingStateScheduler", "AbsorbingStateSchedulerOutput"],
    "schedulers.scheduling_confidence_unmasking": ["ConfidenceUnmaskingScheduler"],
    "schedulers.scheduling_remdm": ["ReMDMScheduler"],
    "training.arguments": ["TextDiffusionTrainingArguments"],
    "training.trainer": ["TextDiffusionTrainer"],
}
_SUBMODULE_OF = {name: module for module, names in _SUBMODULES.items() for name in names}

__all__ = sorted(["DiffusionBertConfig", "DiffusionBertForMaskedDiffusion", "__version__", *_SUBMODULE_OF])

AutoConfig.register(DiffusionBertConfig.model_type, DiffusionBertConfig)
AutoModelForMaskedLM.register(DiffusionBertConfig, DiffusionBertForMaskedDiffusion)

# diffusers loads a component from `model_index.json` only if it finds one of these base classes in the component's
# library: so any component of ours loads, and may be replaced by one of another class.
pipeline_loading_utils.LOADABLE_CLASSES["diffusers_text"] = {
    name: ["save_pretrained", "from_pretrained"] for name in ("PreTrainedModel", "SchedulerMixin")
}


def __getattr__(name):
    if name not in _SUBMODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_SUBMODULE_OF[name]}")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "matplotlib":
            raise
        raise ImportError(f"`{name}` needs matplotlib: install the extra `train`.") from error
    return getattr(module, name)


def __dir__():
    return __all__
