"""Rebuild the demonstration model: corpus, tokenizer, training, export, samples."""
