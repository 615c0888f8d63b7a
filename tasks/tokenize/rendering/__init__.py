"""Conversations as chat templates render them: text and special tokens, before a tokenizer sees them."""
