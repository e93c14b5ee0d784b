"""The `diffusers-text` command line."""
