"""Perplexities on corpora that a model was not trained on, in the layout of MDLM's table."""

# Perplexity per token of models trained on OpenWebText, upper bounds but for AR: MDLM (arXiv 2406.07524), its table of
# zero-shot perplexities.
CORPORA = ["ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv"]
PUBLISHED = {
    "AR": [82.05, 25.75, 51.25, 51.28, 52.09, 49.01, 41.73],
    "SEDD": [100.09, 34.28, 68.20, 49.86, 62.09, 44.53, 38.48],
    "MDLM": [95.26, 32.83, 67.01, 47.52, 61.15, 41.89, 37.37],
}


def table(pipeline: str, bounds: dict[str, dict]) -> str:
    r"""
    A table in Markdown: a column for each corpus, with the published rows where they have it.

    Args:
        pipeline (`str`): name of the first row.
        bounds (`dict[str, dict]`): of each corpus what [`LikelihoodBound.to_dict`] gives.
    """
    names = [*bounds]
    lines = [["perplexity per token", *names], ["---"] * (1 + len(names))]
    lines.append([f"{pipeline} (at most)", *(f"{bounds[name]['perplexity_per_token']:.2f}" for name in names)])
    for model, values in PUBLISHED.items():
        published = dict(zip(CORPORA, values))
        lines.append(
            [f"{model}, as published", *(f"{published[name]:.2f}" if name in published else "" for name in names)]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
