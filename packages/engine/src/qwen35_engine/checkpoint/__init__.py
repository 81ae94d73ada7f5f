"""Checkpoint folders in the Hugging Face layout: what they say of the model, and their tensors."""
