"""The stages of a build, one module each. Nothing here imports ``flows``; models and pure functions need no Prefect."""
