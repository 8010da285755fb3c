"""Decoder layers of few operations: what a model's layers consist of, the forms they may have, and which one computes the same."""
