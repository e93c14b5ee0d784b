"""Likelihood and quality of text diffusion models."""
