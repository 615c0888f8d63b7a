"""Where bytes lie: local directories and object stores."""
