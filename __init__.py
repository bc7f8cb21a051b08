"""Baton serves large language models with prefill and decode in separate processes."""
