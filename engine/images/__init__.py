"""Prompts with images: what the model makes of them, once for all that share them."""
