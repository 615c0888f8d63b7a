"""Vocabularies of one's own: byte pairs that are learned from text, as tokenizer.json files."""
