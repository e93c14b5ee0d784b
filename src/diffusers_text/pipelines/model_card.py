"""The model card of a pushed pipeline."""

from huggingface_hub import ModelCard, ModelCardData

from ..models.sparse_head import unwrap_model
from ..schedulers.scheduling_remdm import ReMDMScheduler

TEMPLATE = """
---
{card_data}
---

# {name}

A masked diffusion model for text, made with diffusers-text.

## Usage

```python
from diffusers_text import TextDiffusionPipeline

pipe = TextDiffusionPipeline.from_pretrained("{repo_id}")
print(pipe(num_texts_per_prompt=2, gen_length={gen_length}{steps}).texts)
print(pipe("The {mask} of this text was {mask}."{steps}).texts)
```

## Model

| | |
|---|---|
| denoiser | {model} |
| time conditioning | {time_conditioning} |
| parameters | {parameters} |
| noise schedule | {schedule} |

## Training data

{data}
{training}
## License

{license}
"""


def create_model_card(
    pipe, repo_id: str, license: str | None, datasets: str | list[str] | None, training: str = ""
) -> ModelCard:
    """
    The card of a [`TextDiffusionPipeline`].

    Args:
        pipe ([`TextDiffusionPipeline`]): what is described.
        repo_id (`str`): where it is loaded from.
        license (`str`, *optional*): identifier of the licence on the Hub.
        datasets (`str` or `list[str]`, *optional*): ids of the training data on the Hub.
        training (`str`, defaults to `""`): sections about the training, in Markdown.
    """
    config, model = pipe.scheduler.config, unwrap_model(pipe.model)
    card_data = ModelCardData(
        library_name="diffusers-text",
        pipeline_tag="text-generation",
        license=license,
        datasets=datasets,
        tags=["text-diffusion", "masked-diffusion", "diffusers-text"],
    )
    schedule = config.schedule
    if schedule == "spindle":
        schedule += f" (lambda {config.spindle_lambda}, {config.spindle_information}, {config.spindle_mean} mean)"
    names = [datasets] if isinstance(datasets, str) else datasets or []
    data = ", ".join(f"`{name}`" for name in names) or config.corpus or "Not stated."
    if config.corpus is not None and config.token_counts is not None:
        data += f" Token frequencies were counted on {config.corpus}."
    return ModelCard(
        TEMPLATE.format(
            card_data=card_data.to_yaml(),
            name=repo_id.split("/")[-1],
            repo_id=repo_id,
            gen_length=config.gen_length,
            steps=", num_inference_steps=64" if isinstance(pipe.scheduler, ReMDMScheduler) else "",
            mask=pipe.tokenizer.mask_token,
            model=f"`{type(model).__name__}`",
            time_conditioning=getattr(model.config, "time_conditioning", "none"),
            parameters=f"{model.num_parameters() / 1e6:.1f} M",
            schedule=schedule,
            data=data,
            training=training,
            license=license or "Not stated.",
        ).lstrip()
    )
