"""The command ``flat-tokens``: one file a command, and what they share."""
