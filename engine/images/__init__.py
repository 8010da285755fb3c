"""Prompts with images: encoded once for all requests that share them.

``inputs`` is what a processor and the model made of them; ``reader`` decides what to encode, in ``batches``; ``encoder`` runs the
model; ``adapters`` is for LoRA on vision towers.
"""
