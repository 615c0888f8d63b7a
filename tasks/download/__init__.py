"""Stage download: sources to files, files to slices."""
